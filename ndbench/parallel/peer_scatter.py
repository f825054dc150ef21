"""FSDP's reduce-scatter by copies between GPUs: each rank sends the others their rows of its gradients.

Gradients travel in the dtype they were computed in, straight from where backward left them, and are summed in float32
by whom they belong to, in the order of the ranks: half of the bytes of a float32 reduce-scatter of bfloat16 gradients,
with the same sums. It knows nothing of how parameters are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ndbench.parallel._fsdp_private import OwnStreams, ShardedParameter, rows_of
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.held import Held, placed_like, taken
from ndbench.parallel.peer_memory import ALIGNMENT, SCATTER, Lane, PeerMemory, Plan, Switch, mark, wait
from ndbench.parallel.precision import Copies

INBOXES = 2
"""Of blocks, which share them: one fills while the other is added up."""
SENDING = 2
"""Units whose gradients are kept until they are sent; whoever computes waits for the one before."""


class Rows:
    """What one parameter's gradient is on each rank. Plain numbers: see :meth:`Reducer.listen`."""

    def __init__(self, of: ShardedParameter) -> None:
        self.padded, self.whole = of.padded, of.whole
        self.shape = local_tensor(of.parameter).shape
        """Of this rank's part."""

    def rows_of(self, rank: int) -> tuple[int, int]:
        return rows_of(rank, self.padded, self.whole)


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
        one_rank, sums = Plan(), Plan()
        self.starts = [one_rank.add(each.padded, dtype) for each in self.parameters]
        self.places = [sums.add(each.shape.numel(), torch.float32) for each in self.parameters]
        self.row_bytes, self.sum_bytes = one_rank.size, sums.size
        self.forget()

    def forget(self) -> None:
        self.there: dict[int, torch.Tensor] = {}
        """What backward has left so far, by index."""
        self.arrived: set[int] = set()
        self.sum: torch.Tensor | None = None
        self.done: torch.cuda.Event | None = None
        self.waited = False

    def view(self, index: int) -> torch.Tensor:
        assert self.sum is not None, "it is reduced"
        start, shape = self.places[index] // self.sum.itemsize, self.parameters[index].shape
        return self.sum[start : start + shape.numel()].view(shape)


class Reducer:
    """Sums the gradients of ``units`` over ``group``, then over ``replicas``, in this order on all ranks.

    Made by all ranks together. It works while ``switch`` is on; what backward leaves out counts as zeros.
    ``gathering`` is where this rank fetches parameters.
    """

    def __init__(
        self,
        units: Sequence[Iterable[Rows]],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
        fused: bool,
        switch: Switch,
        gathering: Lane,
        memory: type[PeerMemory],
    ) -> None:
        self._units = [Reduction(each, dtype) for each in units]
        self._switch, self._gathering, self._replicas = switch, gathering, replicas
        self._dtype, self._device, self._lane, self._barriers = dtype, device, Lane(device), 0
        self._add_up = torch.compile(_add_up, dynamic=False) if fused else _add_up
        self._inboxes, size = _inboxes(self._units, group.size())
        self._memory = memory(size, group, device)
        self.forget()
        self._rehearse()

    def listen(self, unit: int, index: int, leaf: nn.Parameter) -> None:
        """Take the gradients that backward leaves on ``leaf``.

        The hook must not know its leaf, nor whoever does: a cycle through it is never collected.
        """
        leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            functools.partial(self._take, unit, index)
        )

    def forget(self) -> None:
        for unit in self._units:
            unit.forget()
        self.begun = self._finished = False
        self._next, self._last = 0, True
        self._sending: list[Reduction] = []

    def expect(self, last: bool) -> None:
        """The next backward comes: is it the one after which sums are complete?"""
        assert self._next == 0, "the gradients of the step before are still there"
        self._last = last
        for unit in self._units:
            unit.arrived.clear()

    def of(self, unit: int, index: int) -> torch.Tensor:
        """This rank's part of a gradient, summed. The first call reduces what backward has left out."""
        self._finish()
        reduction = self._units[unit]
        if not reduction.waited:
            reduction.waited = True
            wait(reduction.done)
        return reduction.view(index)

    def _take(self, unit: int, index: int, leaf: torch.Tensor) -> None:
        if not self._switch.on:
            if leaf.grad is not None:
                local_tensor(leaf.grad).contiguous()  # the kernel is loaded, if it takes one
            return
        reduction, gradient = self._units[unit], taken(leaf)
        before = reduction.there.get(index)
        reduction.there[index] = gradient if before is None else before.to(torch.float32).add_(gradient)
        reduction.arrived.add(index)
        self.begun = True
        while self._last and self._next < len(self._units) and self._complete(self._units[self._next]):
            self._reduce_next()

    @staticmethod
    def _complete(reduction: Reduction) -> bool:
        return len(reduction.arrived) == len(reduction.parameters)

    def _finish(self) -> None:
        if self._finished:
            return
        while self._next < len(self._units):
            self._reduce_next()
        self._finished = True
        # What comes next writes the shards that others fetch: on no rank is anything still to be fetched.
        fetched = self._gathering.mark()
        with self._lane.after_current():
            wait(fetched)
            self._barrier()
        wait(self._lane.mark())
        self._sending.clear()

    @torch.no_grad()
    def _reduce_next(self) -> None:
        unit, inbox = self._units[self._next], self._inboxes[self._next]
        self._next += 1
        while len(self._sending) >= SENDING:
            before = self._sending.pop(0)
            wait(before.done)
            before.there.clear()
        self._sending.append(unit)
        for index, each in enumerate(unit.parameters):
            gradient = unit.there.get(index)
            if gradient is None:
                gradient = torch.zeros(each.whole, dtype=self._dtype, device=self._device)
            unit.there[index] = gradient.to(self._dtype).contiguous().view(-1)
        # Made on the stream on which it is given back.
        unit.sum = torch.empty(unit.sum_bytes // 4, dtype=torch.float32, device=self._device)
        with self._lane.after_current():
            if inbox.read == self._barriers:
                self._barrier()
            self._send(unit, inbox)
            self._barrier()
            self._sum(unit, inbox)
            inbox.read = self._barriers
            if self._replicas is not None:
                dist.all_reduce(unit.sum, group=self._replicas)
            unit.done = mark(self._device)

    def _send(self, unit: Reduction, inbox: Inbox) -> None:
        memory = self._memory
        for step in range(1, memory.world):
            peer = (memory.rank + step) % memory.world
            row = memory.rank if memory.rank < peer else memory.rank - 1
            for index, each in enumerate(unit.parameters):
                first, count = each.rows_of(peer)
                if count:
                    start = inbox.start + row * unit.row_bytes + unit.starts[index]
                    memory.of(peer, start, count, self._dtype).copy_(unit.there[index].narrow(0, first, count))

    def _sum(self, unit: Reduction, inbox: Inbox) -> None:
        memory, sums, parts = self._memory, list[torch.Tensor](), list[list[torch.Tensor]]()
        for index, each in enumerate(unit.parameters):
            first, count = each.rows_of(memory.rank)
            if count:
                starts = [inbox.start + row * unit.row_bytes + unit.starts[index] for row in range(memory.world - 1)]
                of_ranks = [memory.of(memory.rank, start, count, self._dtype) for start in starts]
                of_ranks.insert(memory.rank, unit.there[index].narrow(0, first, count))
                parts.append(of_ranks)
                sums.append(unit.view(index).view(-1))
        self._add_up(sums, parts)

    def _barrier(self) -> None:
        self._memory.barrier(SCATTER)
        self._barriers += 1

    @torch.no_grad()
    def _rehearse(self) -> None:
        """Compile and load what a reduction takes: while a rank waits in a barrier its GPU may load nothing."""
        seen = set()
        for unit, inbox in zip(self._units, self._inboxes, strict=True):
            sizes = tuple((each.whole, each.shape) for each in unit.parameters)
            if sizes not in seen:
                seen.add(sizes)
                zeros = [torch.zeros(each.whole, dtype=self._dtype, device=self._device) for each in unit.parameters]
                unit.there = dict(enumerate(zeros))
                unit.sum = torch.zeros(unit.sum_bytes // 4, dtype=torch.float32, device=self._device)
                self._sum(unit, inbox)
                unit.forget()


def _inboxes(units: list[Reduction], world: int) -> tuple[list[Inbox], int]:
    """One for each unit, shared by those of one size, and the bytes of all."""
    plan, alike, found = Plan(), dict[int, list[Inbox]](), list[Inbox]()
    for unit in units:
        shared = alike.setdefault(unit.row_bytes, [])
        # One whose rows are just being added up would be waited for; a table comes long after the other.
        free = [inbox for inbox in shared if inbox not in found[-1:]]
        if not free and len(shared) < INBOXES:
            free = [Inbox(plan.add((world - 1) * unit.row_bytes, torch.uint8))]
            shared += free
        found.append((free or shared)[0])
    return found, max(plan.size, ALIGNMENT)


def _add_up(sums: list[torch.Tensor], parts: list[list[torch.Tensor]]) -> None:
    for out, of_ranks in zip(sums, parts, strict=True):
        total = of_ranks[0].float()
        for part in of_ranks[1:]:
            total = total + part.float()
        out.copy_(total)


class HeldByOwners(Held):
    """Gradients in ``reducer`` after a step that it took, else on the parameters, where FSDP reduces them to.

    ``units`` are its parameters, in its order; ``published`` is what the step computes with.
    """

    def __init__(
        self, model: nn.Module, reducer: Reducer, units: Sequence[Sequence[nn.Parameter]], published: Copies
    ) -> None:
        super().__init__(model)
        self._streams, self._published = OwnStreams(model), published
        self._reducer, self._units = reducer, [list(unit) for unit in units]
        self._places = {id(p): (unit, index) for unit, ps in enumerate(self._units) for index, p in enumerate(ps)}

    def expect(self, last: bool) -> None:
        super().expect(last)
        self._published.used()
        self._reducer.expect(last)

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if not self._reducer.begun or id(parameter) not in self._places:
            return super().of(parameter)
        self._streams.join()
        return self._reducer.of(*self._places[id(parameter)])

    def arrivals(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        wanted = {id(parameter): parameter for parameter in parameters}
        groups = [[wanted.pop(id(p)) for p in unit if id(p) in wanted] for unit in self._units]
        return [group for group in (*groups, list(wanted.values())) if group]

    def settle(self) -> None:
        if self._reducer.begun:
            for parameter in (parameter for unit in self._units for parameter in unit):
                gradient = self.of(parameter)
                assert gradient is not None, "what backward leaves out is zeros"
                parameter.grad = placed_like(parameter, gradient.to(parameter.dtype))
            self._reducer.forget()

    def forget(self) -> None:
        super().forget()
        self._reducer.forget()
