"""What must hold of a folder before a process works in it: it can be written, and nobody else works in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone_in(folder: Path, busy: str) -> Iterator[None]:
    """One process at a time, the folder itself is the lock. Raises ``ValueError(busy)`` when another one has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(busy) from None
        except OSError:
            pass  # a file system without locks (Lustre as it is often mounted) must not stop a run
        yield
    finally:
        os.close(handle)


def check_writable(folder: Path, what: str) -> None:
    """Make ``folder`` where it is missing and write into it; raises ``ValueError`` naming it, as ``what``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(b"ndbench")
    except OSError as error:
        raise ValueError(f"{what} {folder.absolute()} cannot be written: {error.strerror}") from error
