"""One lock a device, so that two runs never measure on the same one at the same time.

Locks are advisory (flock) on files that every user of the machine can lock, whatever results folder a run writes to.
They are held for one repeat, so that two runs take turns; the system frees them when a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import psutil

from ndbench.report.tracker import known_secrets
from ndbench.report.wandb_runs import without_secrets

SHARED_FOLDERS = (Path("/run/lock"), Path("/dev/shm"), Path("/tmp"))
"""Where every user may make a file and nobody may remove another's, the same whatever TMPDIR says."""


def lock_folder(device: str) -> Path:
    """Where the lock of a device lies. A GPU is one for the whole machine, so its lock must not follow a job's TMPDIR;
    the CPU's does, for a job that the system gave cores and a TMPDIR of its own shares them with nobody."""
    if device != "cpu":
        for folder in SHARED_FOLDERS:
            with contextlib.suppress(OSError):
                mode = folder.stat().st_mode
                if mode & stat.S_ISVTX and mode & stat.S_IWOTH and os.access(folder, os.W_OK):
                    return folder
    return Path(tempfile.gettempdir())


def _open(device: str) -> IO[str]:
    """The lock's file, made when it is not there, open to every user (whoever made it)."""
    path = lock_folder(device) / f"ndbench-{re.sub(r'[^A-Za-z0-9_.-]', '_', device)}.lock"
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            # never O_CREAT on a file of another user: systems refuse that in a shared folder (fs.protected_regular)
            handle = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except (FileNotFoundError, FileExistsError, PermissionError):
            continue
        if flags & os.O_CREAT:
            os.fchmod(handle, 0o666)  # the umask took a part of it
        return os.fdopen(handle, "r" if flags == os.O_RDONLY else "r+", encoding="utf-8")
    raise ValueError(f"the lock {path} of device {device} cannot be opened: remove it, or ask who made it to")


@contextmanager
def device_locks(devices: list[str], limit: float, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the locks of ``devices`` (``cpu``, a GPU's UUID), taken in sorted order so that two runs cannot deadlock.

    Calls ``waiting`` once with a line naming the holder; raises ``TimeoutError`` with it after ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    with ExitStack() as stack:
        for device in sorted(devices):
            stream = stack.enter_context(_open(device))
            told = False
            while not _try_lock(stream):
                line = f"device {device} is in use by process {_holder(stream)}"
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{line}; waited {limit:.0f} s")
                if not told:
                    waiting(f"{line}: waiting for its turn, at most {limit:.0f} s ({_declining(device)})")
                    told = True
                time.sleep(0.1)
            if stream.writable():
                stream.seek(0)
                stream.truncate()
                stream.write(str(os.getpid()))
                stream.flush()
        yield


def _try_lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


LONGEST_COMMAND = 120


def _holder(stream: IO[str]) -> str:
    """``41 (ndbench suite=hsdp_tp, in /home/me)``: as much as this user may know of the process."""
    stream.seek(0)
    number = stream.read().strip()
    if not number.isdecimal():
        return number or "unknown"
    said = []
    with contextlib.suppress(psutil.Error):  # of another container or user, or gone this moment
        process = psutil.Process(int(number))
        said.append(_command(process.cmdline()))
        said.append(f"in {process.cwd()}")
    return f"{number} ({', '.join(part for part in said if part)})" if any(said) else number


def _command(words: list[str]) -> str:
    """A command line as it was typed, without the interpreter and without keys."""
    if len(words) > 1 and Path(words[0]).name.startswith("python") and not words[1].startswith("-"):
        words = [Path(words[1]).name, *words[2:]]
    typed: str = without_secrets(shlex.join(words), known_secrets())
    return typed if len(typed) <= LONGEST_COMMAND else f"{typed[:LONGEST_COMMAND]} …"


def _declining(device: str) -> str:
    """What else there is than to wait."""
    if device == "cpu":
        return "Ctrl-C gives up; with cores of its own, a job sets a TMPDIR of its own and does not wait"
    return "Ctrl-C gives up; CUDA_VISIBLE_DEVICES chooses other devices"
