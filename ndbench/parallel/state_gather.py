"""What the ranks tell each other around a checkpoint: whether all is well, and whole tensors for rank 0.

Collective over the default process group; called by the main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ndbench.parallel.state_files import CheckpointError, Entry
from ndbench.parallel.state_pieces import Piece

T = TypeVar("T")


def agree(error: Exception | None) -> None:
    """Raise on every rank the error of the first rank that has one."""
    errors: list[str | None] = [None] * dist.get_world_size()
    kind = "" if error is None or isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    dist.all_gather_object(errors, None if error is None else f"{kind}{error}")
    if kind:
        assert error is not None
        raise error
    for text in errors:
        if text is not None:
            raise CheckpointError(text) from error


def together(work: Callable[[], T]) -> T:
    """``work()``; if it fails on any rank, it fails on all."""
    error = None
    try:
        done = work()
    except Exception as raised:  # raised again below, after the other ranks have heard of it
        error = raised
    agree(error)
    return done


@dataclass(frozen=True)
class Planned:
    """A tensor that rank 0 will have whole, and where each of its pieces comes from."""

    entry: Entry
    pieces: list[tuple[int, Entry]]
    """(rank, piece) without overlap."""


def plan_gather(mine: Sequence[Piece]) -> list[Planned]:
    """The tensors of which the ranks bring ``mine``, in the order in which :func:`gather` gives them; the same list on
    every rank."""
    everyone: list[list[tuple[Entry, tuple[int, ...]]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, [(piece.entry, piece.shape) for piece in mine])
    planned: dict[str, Planned] = {}
    for rank, brought in enumerate(everyone):
        for entry, shape in brought:
            whole = Entry(entry.name, entry.dtype, shape, (0,) * len(shape))
            pieces = planned.setdefault(entry.name, Planned(whole, [])).pieces
            if all(other.offset != entry.offset for _, other in pieces):
                pieces.append((rank, entry))
    return sorted(planned.values(), key=lambda each: -each.entry.dtype.itemsize)


def gather(planned: Sequence[Planned], mine: Sequence[Piece], device: torch.device) -> Iterator[torch.Tensor | None]:
    """Each planned tensor in turn: whole and on the host on rank 0, None elsewhere. One is in memory at a time.

    ``device`` is where the process group can send from. Every rank must go through the whole iterator.
    """
    rank = dist.get_rank()
    tensors = {piece.entry.name: piece.tensor for piece in mine}
    for item in planned:
        if rank == 0:
            yield _receive(item, tensors, device)
            continue
        if any(sender == rank for sender, _ in item.pieces):
            data = _bytes(tensors[item.entry.name].to(device))
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, data, 0)]):
                work.wait()
        yield None


def _receive(item: Planned, tensors: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    if len(item.pieces) == 1 and item.pieces[0][0] == 0:
        return tensors[item.entry.name].cpu()
    whole = torch.empty(item.entry.size, dtype=item.entry.dtype)
    parts, receives = [], []
    for sender, piece in item.pieces:
        if sender == 0:
            part = tensors[item.entry.name]
        else:
            part = torch.empty(piece.size, dtype=piece.dtype, device=device)
            receives.append(dist.P2POp(dist.irecv, _bytes(part), sender))
        parts.append((piece, part))
    if receives:
        for work in dist.batch_isend_irecv(receives):
            work.wait()
    for piece, part in parts:
        place = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.size, strict=True))
        whole[place].copy_(part)
    return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
