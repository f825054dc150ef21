"""Writing a session of a baseline: whole or not at all, one writer at a time, nothing that was accepted overwritten."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ndbench.results.schema import Record
from ndbench.results.sessions import cell_file, parse_session
from ndbench.results.store import check_name, read_json, sync_folder, write_json


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer of a baseline at a time; the folder itself is the lock, so that nothing is left behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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
