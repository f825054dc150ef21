"""One lock a device, so that two runs never measure on the same one at the same time.

Locks are advisory (flock) on files in the temporary folder of the machine, whatever results folder a run writes to.
They are held for one repeat, so that two runs take turns; the system frees them when a process dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO


def lock_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"ndbench-locks-{os.getuid()}"


@contextmanager
def device_locks(devices: list[str], limit: float, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the locks of ``devices`` (``cpu``, ``cuda0``, ...), taken in sorted order so that two runs cannot deadlock.

    Calls ``waiting`` once with a line naming the holder; raises ``TimeoutError`` with it after ``limit`` seconds.
    """
    folder = lock_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + limit
    with ExitStack() as stack:
        for device in sorted(devices):
            stream = stack.enter_context((folder / f"{device}.lock").open("a+", encoding="utf-8"))
            told = False
            while not _try_lock(stream):
                line = f"device {device} is in use by process {_holder(stream)}"
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{line}; waited {limit:.0f} s")
                if not told:
                    waiting(line)
                    told = True
                time.sleep(0.1)
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


def _holder(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read().strip() or "unknown"
