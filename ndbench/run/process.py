"""What a rank does about its own process: die with its parent and take along what it started, log to its own file,
show its stacks when asked."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
END_SECONDS = 5.0
"""How long :func:`end_descendants` waits for killed processes to be gone."""


def adopt_orphans(adopt: bool = True) -> None:
    """Ask Linux that a process below this one whose parent ends becomes a child of this one, not of init.

    Otherwise a daemon that a script starts (a double fork, a session and group of its own) is lost from sight and
    outlives the run. Elsewhere (macOS) this does nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Every process below this one."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process().children(recursive=True)
    return []


def end_descendants(spared: Collection[psutil.Process] = (), wait: float = END_SECONDS) -> None:
    """Kill every process below this one but the ``spared``, and those that they start meanwhile."""
    deadline = time.monotonic() + wait
    killed: set[int] = set()
    while alive := [process for process in descendants() if process not in spared and not _is_over(process)]:
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
            killed.add(process.pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for pid in killed:
        with contextlib.suppress(ChildProcessError):  # it is another's child, who takes note of its end
            os.waitpid(pid, os.WNOHANG)


def _is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, so that ``kill -9`` of a run leaves nothing behind.

    Elsewhere (macOS) this does nothing.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        os._exit(1)  # the parent ended before the request took effect


def die_with(runner: int) -> None:
    """End this process and all below it when process ``runner`` ends. A rank's parent is the fork server, which
    outlives a killed run.

    A thread waits in the kernel for it, so nothing is polled where the system offers that.
    """
    adopt_orphans()
    try:
        handle = os.pidfd_open(runner)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # not Linux, or a kernel without it
        handle = None

    def wait() -> None:
        if handle is not None:
            select.select([handle], [], [])
        else:
            while psutil.pid_exists(runner):
                time.sleep(1.0)
        end_descendants(wait=1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="ndbench-die-with-runner").start()


def log_to(path: Path) -> None:
    """Send stdout and stderr, C libraries' included, to ``path``; SIGUSR1 appends every thread's stack."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)


def tail(path: Path, lines: int = 30, limit: int = 8000) -> str:
    """The last ``lines`` lines of a log, at most ``limit`` characters; empty when there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 4 * limit))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])[-limit:]
