"""Which rows of which gradient are whose, and the memory that they need: arithmetic, nothing is sent here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ndbench.parallel._fsdp_private import ShardedParameter, rows_of
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.peer_memory import ALIGNMENT, Offsets

INBOXES = 2
"""Of blocks, which share them: one fills while the other is added up."""


@dataclass(frozen=True)
class Rows:
    """Who owns what of one parameter's gradient. Plain numbers: see ``Reducer.listen``."""

    whole: int
    """Elements of the gradient that backward leaves."""
    padded: int
    """Elements that the fullest rank owns."""
    shape: torch.Size
    """Of what this rank owns."""
    replicated: bool = False
    """Every rank owns all of it."""

    @classmethod
    def of_shard(cls, of: ShardedParameter) -> Rows:
        return cls(of.whole, of.padded, local_tensor(of.parameter).shape)

    @classmethod
    def of_replica(cls, parameter: nn.Parameter) -> Rows:
        shape = local_tensor(parameter).shape
        return cls(shape.numel(), shape.numel(), shape, replicated=True)

    def of(self, rank: int) -> tuple[int, int]:
        """The first element that ``rank`` owns, and how many."""
        return (0, self.whole) if self.replicated else rows_of(rank, self.padded, self.whole)


class Inbox:
    """Where the other ranks' rows of one unit at a time arrive, from byte ``start`` on."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.read = -1
        """How many barriers there had been when it was last added up; with one more all ranks have done so."""


class Reduction:
    """The gradients of one unit on this rank."""

    def __init__(self, parameters: Iterable[Rows], dtype: torch.dtype) -> None:
        self.parameters = list(parameters)
        self.indices = range(len(self.parameters))
        one_rank, sums = Offsets(), Offsets()
        self.starts = [one_rank.add(each.padded, dtype) for each in self.parameters]
        self.places = [sums.add(each.shape.numel(), torch.float32) for each in self.parameters]
        self.row_bytes, self.sum_bytes = one_rank.size, sums.size
        self.forget()

    def forget(self) -> None:
        self.there: dict[int, torch.Tensor] = {}
        """What backward has left so far, by index."""
        self.arrived: set[int] = set()
        self.sum: torch.Tensor | None = None
        self.norms: dict[int, torch.Tensor] = {}
        """Of what is in ``sum``, by index, where they came with the sums."""
        self.added: torch.cuda.Event | None = None
        """What was sent is sent, and what came is added up."""
        self.done: torch.cuda.Event | None = None
        self.waited = False

    def view(self, index: int) -> torch.Tensor:
        assert self.sum is not None, "it is reduced"
        start, shape = self.places[index] // self.sum.itemsize, self.parameters[index].shape
        return self.sum[start : start + shape.numel()].view(shape)


def inboxes(units: list[Reduction], world: int) -> tuple[list[Inbox], int]:
    """One for each unit, shared by those of one size, and the bytes of all."""
    plan, alike, found = Offsets(), dict[int, list[Inbox]](), list[Inbox]()
    for unit in units:
        shared = alike.setdefault(unit.row_bytes, [])
        # One whose rows are just being added up would be waited for; a table comes long after the other.
        free = [inbox for inbox in shared if inbox not in found[-1:]]
        if not free and len(shared) < INBOXES:
            free = [Inbox(plan.add((world - 1) * unit.row_bytes, torch.uint8))]
            shared += free
        found.append((free or shared)[0])
    return found, max(plan.size, ALIGNMENT)
