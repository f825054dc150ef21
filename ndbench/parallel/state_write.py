"""Writing the parts of a checkpoint into its hidden folder, and completing it when all parts are there.

A part is what one rank wrote: its files with their checksums, and where in them which piece of which tensor lies; it
is announced by a JSON file of the rank's own. Completing needs no collective, so that it can happen in the background.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndbench.parallel.state_files import (
    DTYPE_NAMES,
    CheckpointError,
    Entry,
    FileSeries,
    names_file,
    remove,
    sync_folder,
    write_bytes,
)
from ndbench.parallel.state_gather import Planned, gather, plan_gather
from ndbench.parallel.state_index import free_name, merge, whole_checkpoints, write_index
from ndbench.parallel.state_pieces import Piece, elect

Part = dict[str, Any]
POLL_SECONDS = 0.02


def write_sharded(draft: Path, mine: Sequence[Piece], rank: int) -> Part:
    """This rank's pieces, in a file of its own."""
    ordered = sorted(mine, key=lambda piece: -piece.entry.dtype.itemsize)
    file = f"rank{rank:05d}.safetensors"
    series = FileSeries(draft, [(file, [piece.entry for piece in ordered])] if ordered else [])
    for piece in ordered:
        series.write(piece.tensor)
    return {"files": series.records, "tensors": {p.entry.name: described(p.entry, p.shape, file) for p in ordered}}


def write_full(draft: Path, pieces: Sequence[Piece], device: torch.device) -> Part:
    """All tensors whole, by rank 0. Collective."""
    mine = elect(pieces, dist.get_rank(), spread=False)
    planned = plan_gather(mine)
    file = "rank00000.safetensors"
    series = FileSeries(draft, [(file, [item.entry for item in planned])])
    write_gathered(series, planned, mine, device)
    if dist.get_rank() != 0:
        return {"files": {}, "tensors": {}}
    tensors = {item.entry.name: described(item.entry, item.entry.size, file) for item in planned}
    return {"files": series.records, "tensors": tensors}


def write_gathered(series: FileSeries, planned: Sequence[Planned], mine: Sequence[Piece], device: torch.device) -> None:
    """Gather the planned tensors one by one, and write them on rank 0. Collective."""
    error = None
    for tensor in gather(planned, mine, device):
        if tensor is not None and error is None:
            try:
                series.write(tensor)
            except CheckpointError as raised:
                error = raised  # the other ranks still send
    if error is not None:
        raise error


def described(entry: Entry, shape: Sequence[int], file: str) -> dict[str, Any]:
    """A tensor of which one piece lies in ``file``, as the index has it."""
    return {"dtype": DTYPE_NAMES[entry.dtype], "shape": shape, "pieces": [[file, entry.offset, entry.size]]}


def announce(draft: Path, part: Part, rank: int) -> None:
    """This rank's part is on the disk."""
    sync_folder(draft)
    write_bytes(draft / _part_name(rank), json.dumps(part, allow_nan=False, separators=(",", ":")).encode())


def complete(draft: Path, rest: dict[str, Any], ranks: int, keep: int, wait: Callable[[Path], None]) -> None:
    """Rank 0: turn the parts into a whole checkpoint, then remove older ones until ``keep`` are left.

    ``wait`` returns when a file is there.
    """
    parts = []
    for rank in range(ranks):
        path = draft / _part_name(rank)
        wait(path)
        with names_file(path):
            parts.append(json.loads(path.read_bytes()))
            path.unlink()
    # A damaged old one is left alone; it must not keep new ones from being written.
    older = whole_checkpoints(draft.parent, damaged=lambda error: warnings.warn(str(error), stacklevel=2))
    serial = older[-1][0] + 1 if older else 1
    write_index(draft, {**rest, **merge(parts), "random": [part["random"] for part in parts]}, serial)
    sync_folder(draft)
    final = free_name(draft.parent, rest["step"])
    with names_file(final):
        draft.rename(final)
    sync_folder(draft.parent)
    for _, folder in older[: max(len(older) + 1 - keep, 0)]:
        try:
            remove(folder)
        except CheckpointError as error:
            warnings.warn(f"an old checkpoint stays: {error}", stacklevel=2)


def _part_name(rank: int) -> str:
    return f"rank{rank:05d}.json"


def remove_left_overs(parent: Path) -> None:
    """What crashed saves and removals left."""
    with names_file(parent):
        for folder in (*parent.glob(".step-*.tmp"), *parent.glob(".step-*.removed")):
            remove(folder)


def wait_for(path: Path, timeout: float, cancelled: threading.Event) -> None:
    """Until ``path`` exists; another process makes it."""
    until = time.monotonic() + timeout
    while not path.exists():
        if cancelled.wait(POLL_SECONDS):
            raise CheckpointError(f"{path.parent} was given up: another rank failed")
        if time.monotonic() > until:
            raise CheckpointError(
                f"{path} did not appear within {timeout:g} s: is the folder on a disk that all ranks share?"
            )


class Background:
    """A save that goes on in a thread: ``write`` is this rank's part; ``finish``, on rank 0, gets a function that waits
    for a file and completes the checkpoint. ``timeout`` in seconds is for each of the two.
    """

    def __init__(
        self,
        draft: Path,
        write: Callable[[], None],
        finish: Callable[[Callable[[Path], None]], None] | None,
        timeout: float,
    ) -> None:
        self.draft = draft
        self._write, self._finish, self._timeout = write, finish, timeout
        self._written, self._cancelled = threading.Event(), threading.Event()
        self._error: Exception | None = None
        # Not a daemon: an interpreter that ends first lets it finish.
        self._thread = threading.Thread(target=self._run, name=f"save {draft.name}")
        self._thread.start()

    def written(self) -> Exception | None:
        """Wait for this rank's part; its error, if any."""
        return self._error if self._written.wait(self._timeout) else self._late()

    def finished(self) -> Exception | None:
        """Wait for the whole; its error, if any."""
        self._thread.join(2 * self._timeout)
        return self._late() if self._thread.is_alive() else self._error

    def cancel(self) -> None:
        """Do not wait for the other ranks' parts any more."""
        self._cancelled.set()
        self._thread.join(self._timeout)

    def _late(self) -> CheckpointError:
        return CheckpointError(f"{self.draft} was not written within {self._timeout:g} s")

    def _run(self) -> None:
        try:
            self._write()
            self._written.set()
            if self._finish is not None:
                self._finish(lambda path: wait_for(path, self._timeout, self._cancelled))
        except Exception as error:  # raised on the main thread, by whoever waits
            self._error = error
        finally:
            self._written.set()
