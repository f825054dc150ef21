"""What a rank does about its own process: die with its parent, log to its own file, show its stacks when asked."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1


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
    """End this process when process ``runner`` ends. A rank's parent is the fork server, which outlives a killed run.

    A thread waits in the kernel for it, so nothing is polled where the system offers that.
    """
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
