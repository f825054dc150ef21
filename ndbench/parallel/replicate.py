"""Pure data parallelism: every rank has all parameters (of its tp part), and gradients are summed over the replicas.

Gradients are cast straight into flat float32 buckets, micro-batches add up there, and the last backward starts each
bucket's all-reduce as soon as it is full, so that it runs behind the rest of backward. A bucket is a transformer block,
or what is before or after the blocks. Sums, never means. Nothing here waits for the device or depends on a value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ndbench.parallel._torch_private import local_tensor, placed_like
from ndbench.parallel.held import Held, Leaves, taken
from ndbench.parallel.peer_memory import Switch

ALIGNMENT = 4
"""Gradients start at multiples of 16 bytes: kernels read wide words."""


class HeldInBuckets(Held):
    """Gradients of ``leaves``, summed over ``group``. A parameter that backward leaves out counts as zeros.

    ``blocks`` are the model's transformer blocks in order. All ranks start the all-reduces in the same order, the last
    block's first, whichever of their gradients is ready first. While ``other`` is on, others take the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        leaves: Leaves,
        blocks: Iterable[nn.Module],
        group: dist.ProcessGroup,
        other: Switch | None = None,
    ) -> None:
        super().__init__(model)
        pairs = list(leaves)
        self._parameters = [parameter for parameter, _ in pairs]
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        groups = units_of(self._parameters, blocks)
        self._order = [[self._parameters[index] for index in indices] for indices in groups]
        shapes = [[(index, local_tensor(self._parameters[index]).shape) for index in indices] for indices in groups]
        device = local_tensor(self._parameters[0]).device if pairs else torch.device("cpu")
        self._buckets = Buckets(shapes, group, device)
        for index, (_, leaf) in enumerate(pairs):
            # The hook must not know its leaf, nor whoever does: a cycle through it is never collected.
            leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(_add, self._buckets, index, other or Switch())
            )

    def expect(self, last: bool) -> None:
        self._buckets.expect(last)

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        found = self._buckets.of(self._index[id(parameter)])
        return super().of(parameter) if found is None else found

    def arrivals(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        wanted = {id(parameter) for parameter in parameters}
        groups = [[each for each in unit if id(each) in wanted] for unit in self._order]
        return [group for group in groups if group]

    def settle(self) -> None:
        for parameter in self._parameters:
            gradient = self._buckets.of(self._index[id(parameter)])
            if gradient is not None:
                parameter.grad = placed_like(parameter, gradient.to(parameter.dtype))
        self._buckets.forget()

    def forget(self) -> None:
        super().forget()
        self._buckets.forget()


def _add(buckets: Buckets, index: int, other: Switch, leaf: torch.Tensor) -> None:
    if not other.on:
        buckets.add(index, taken(leaf))


def units_of(parameters: list[nn.Parameter], blocks: Iterable[nn.Module]) -> list[list[int]]:
    """Indices of ``parameters``, unit by unit in the order in which backward is through with them.

    What is registered after the first block (a head) is computed after all blocks, so its gradients come first; what is
    before it (an embedding) comes last, a head tied to it too.
    """
    number = {id(p): unit for unit, block in enumerate(blocks) for p in block.parameters()}
    last = max(number.values(), default=-1)
    units: dict[int, list[int]] = {}
    in_blocks = False
    for index, parameter in enumerate(map(id, parameters)):
        unit = number.get(parameter, last + 1 if in_blocks else -1)
        in_blocks = in_blocks or parameter in number
        units.setdefault(unit, []).append(index)
    return [units[unit] for unit in sorted(units, reverse=True)]


class _Bucket:
    """The gradients of one unit in one tensor, which exists from the first of them to the end of the step."""

    def __init__(self, shapes: list[tuple[int, torch.Size]]) -> None:
        self.size, self.places = 0, dict[int, tuple[int, torch.Size]]()
        for index, shape in shapes:
            self.places[index] = (self.size, shape)
            self.size += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
        self.forget()

    def forget(self) -> None:
        self.flat: torch.Tensor | None = None
        self.there: set[int] = set()
        self.arrived: set[int] = set()
        self.work: Any = None

    def view(self, index: int) -> torch.Tensor:
        assert self.flat is not None, "a gradient is in it"
        start, shape = self.places[index]
        return self.flat[start : start + shape.numel()].view(shape)


class Buckets:
    """Flat float32 sums over ``group``; ``shapes`` has each bucket's (index, shape) in the order of the reductions."""

    def __init__(
        self, shapes: list[list[tuple[int, torch.Size]]], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group, self._device = group, device
        self._buckets = [_Bucket(each) for each in shapes]
        self._of = {index: bucket for bucket in self._buckets for index in bucket.places}
        self.forget()

    def forget(self) -> None:
        """Drop what is there."""
        for bucket in self._buckets:
            bucket.forget()
        self._next, self._last, self._begun = 0, True, False

    def expect(self, last: bool) -> None:
        """The next backward comes: is it the one after which sums are complete?"""
        assert self._next == 0, "the gradients of the step before are still there"
        self._last, self._begun = last, True
        for bucket in self._buckets:
            bucket.arrived.clear()

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """One gradient, complete for this backward."""
        bucket = self._of[index]
        assert bucket.work is None, "a gradient came after its bucket was reduced"
        assert index not in bucket.arrived, "a gradient came twice in one backward"
        self._begun = True
        self._allocate(bucket)
        if index in bucket.there:
            bucket.view(index).add_(gradient)
        else:
            bucket.view(index).copy_(gradient)
            bucket.there.add(index)
        bucket.arrived.add(index)
        while (
            self._last
            and self._next < len(self._buckets)
            and len(self._buckets[self._next].arrived) == len(self._buckets[self._next].places)
        ):
            self._reduce_next()

    def of(self, index: int) -> torch.Tensor | None:
        """The gradient, summed; None when no backward came since the last :meth:`forget`.

        The first call starts what backward did not fill, on all ranks alike.
        """
        if not self._begun:
            return None
        while self._next < len(self._buckets):
            self._reduce_next()
        bucket = self._of[index]
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None
        return bucket.view(index)

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self._allocate(bucket)
        for index in bucket.places.keys() - bucket.there:
            bucket.view(index).zero_()
        assert bucket.flat is not None, "allocated above"
        bucket.work = self._all_reduce(bucket.flat)

    def _all_reduce(self, flat: torch.Tensor) -> Any:
        return dist.all_reduce(flat, group=self._group, async_op=True)

    def _allocate(self, bucket: _Bucket) -> None:
        if bucket.flat is None:
            bucket.flat = torch.empty(bucket.size, dtype=torch.float32, device=self._device)
