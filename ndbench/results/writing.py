"""Writing a session of a baseline: whole or not at all, one writer at a time, nothing that was accepted overwritten."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ndbench.results.schema import Record
from ndbench.results.sessions import cell_file, parse_session
from ndbench.results.store import check_name, read_json, sync_folder, write_json

LOCK_SECONDS = 60.0
"""How long a writer waits for another one; writing a session takes a second."""
LOCK_FILE = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer of a baseline at a time; the folder itself is the lock, so that nothing is left behind.

    On a file system without such locks (Lustre as it is often mounted, some NFS) a file stands for it, which only a
    killed writer leaves behind. Raises ``ValueError`` naming the holder when another writer does not end.
    """
    handle = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + LOCK_SECONDS
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, handle)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _wait(deadline, f"{folder} is being written by another process")
            except OSError:
                stack.enter_context(_lock_file(folder / LOCK_FILE, deadline))
                break
        yield


@contextlib.contextmanager
def _lock_file(path: Path, deadline: float) -> Iterator[None]:
    while True:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            break
        except FileExistsError:
            holder = ""
            with contextlib.suppress(OSError):  # it may go in this moment
                holder = path.read_text().strip()
            _wait(deadline, f"{path} is held by {holder or 'another process'}; if that has ended, remove the file")
    try:
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        os.close(handle)
        yield
    finally:
        path.unlink(missing_ok=True)


def _wait(deadline: float, line: str) -> None:
    if time.monotonic() > deadline:
        raise ValueError(f"{line} (waited {LOCK_SECONDS:.0f} s)")
    time.sleep(0.05)


def add_cells(folder: Path, head: dict[str, Any], cells: dict[str, list[Record]]) -> list[str]:
    """Add cells to the session that ``head`` describes; returns those that were in it before, unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / head["session"]
    with locked(folder):
        if final.exists():
            return _add(final, head, cells)
        staged = folder / f".{head['session']}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        staged.mkdir()
        try:
            for name, records in cells.items():
                write_json(staged / f"{check_name(name)}.json", cell_file(records))
            write_json(staged / "session.json", head)
            staged.rename(final)
        except OSError:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        sync_folder(folder)
    return []


def _add(final: Path, head: dict[str, Any], cells: dict[str, list[Record]]) -> list[str]:
    stored = parse_session(read_json(final / "session.json"), str(final / "session.json"))
    already: list[str] = []
    for name, records in cells.items():
        path = final / f"{check_name(name)}.json"
        if name in stored["cells"]:
            if read_json(path) != cell_file(records):
                raise ValueError(f"{path} holds other measurements under the same session; it is not overwritten")
            already.append(name)
        else:
            write_json(path, cell_file(records))
    merged = dict(stored)
    for key in ("cells", "restarted", "improved", "retired"):
        added = [name for name in head[key] if name not in already]
        merged[key] = sorted({*stored.get(key, []), *added})
    if head["reason"] != stored["reason"] and len(already) < len(cells):
        merged["reason"] = f"{stored['reason']}; {', '.join(n for n in cells if n not in already)}: {head['reason']}"
    if merged != stored:  # the manifest is written last: a file it does not list is not part of the session
        write_json(final / "session.json", merged)
    return already
