"""Gradients summed by copies between GPUs: each rank sends the others those rows of its gradients that they own.

Gradients travel in the dtype they were computed in, straight from where backward left them, and are summed in float32
by whom they belong to, in the order of the ranks: half of the bytes of float32 sums of bfloat16 gradients, and the same
sums. Of FSDP a rank owns its shard, of replicas all. It knows nothing of how parameters are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch._dynamo.config as dynamo
import torch.distributed as dist
from torch import nn

from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.held import taken
from ndbench.parallel.peer_memory import SCATTER, Lane, PeerMemory, Switch, mark, wait
from ndbench.parallel.peer_rows import Inbox, Reduction, Rows, inboxes

SENDING = 2
"""Units whose gradients are kept until they are sent; whoever computes waits for the one before."""


class Reducer:
    """Sums the gradients of ``units`` over ``group``, then over ``replicas``, in this order on all ranks.

    Made by all ranks together. It works while ``switch`` is on; what backward leaves out counts as zeros, if it ever
    came. ``gathering`` is where this rank fetches parameters, if others write what it fetches.
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
        gathering: Lane | None,
        memory: type[PeerMemory],
    ) -> None:
        self._units = [Reduction(each, dtype) for each in units]
        self._switch, self._gathering, self._group, self._replicas = switch, gathering, group, replicas
        self._dtype, self._device, self._lane, self._of_replicas = dtype, device, Lane(device), Lane(device)
        # As NCCL has it: a replica counts what backward left out as zeros, FSDP has no gradient there.
        self._ever = [{i for i in unit.indices if unit.parameters[i].replicated} for unit in self._units]
        """What is waited for: whatever backward left a gradient for in steps that others took."""
        self._agreed = False
        self._add_up = torch.compile(_add_up_with_norms, dynamic=False) if fused else _add_up
        self._inboxes, size = inboxes(self._units, group.size())
        self._memory = memory(size, group, device)
        self.forget()
        if fused:
            # One function for all structures, compiled for each.
            dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * len({each.sum_bytes for each in self._units}) + 8)
        self._rehearse()

    def listen(self, unit: int, index: int, leaf: nn.Parameter) -> None:
        """Take the gradients that backward leaves on ``leaf``.

        The hook must not know its leaf, nor whoever does: a cycle through it is never collected.
        """
        leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            functools.partial(self._take, unit, index)
        )

    def start(self) -> None:
        """Before a step that reduces by copies, on all ranks: no rank still reads what the others sent it."""
        self._agree()
        with self._lane.after_current():
            self._memory.barrier(SCATTER)
        wait(self._lane.mark())

    def forget(self) -> None:
        for unit in self._units:
            unit.forget()
        for inbox in self._inboxes:
            inbox.read = -1
        self.begun = self.finished = False
        self._next, self._last, self._barriers = 0, True, 0
        self._settled: torch.cuda.Event | None = None
        self._sending: list[Reduction] = []

    def expect(self, last: bool) -> None:
        """The next backward comes: is it the one after which sums are complete?"""
        assert self._next == 0, "the gradients of the step before are still there"
        self._last = last
        for unit in self._units:
            unit.arrived.clear()

    def of(self, unit: int, index: int) -> torch.Tensor | None:
        """This rank's part of a gradient, summed; None where no step ever had one.

        The first call reduces what backward has left out; whoever asks for the last unit's waits for all of it.
        """
        self._finish()
        reduction = self._units[unit]
        if not reduction.waited:
            reduction.waited = True
            wait(reduction.done)
            if reduction is self._units[-1]:
                wait(self._settled)
        return reduction.view(index) if index in self._ever[unit] else None

    def norm_of(self, unit: int, index: int) -> torch.Tensor | None:
        """Of :meth:`of`, where it came with the sums."""
        self.of(unit, index)
        return self._units[unit].norms.get(index)

    def changed(self, unit: int, index: int) -> None:
        """The gradient is no longer what was added up."""
        self._units[unit].norms.pop(index, None)

    def _take(self, unit: int, index: int, leaf: torch.Tensor) -> None:
        if not self._switch.on:
            self._ever[unit].add(index)
            self._agreed = False
            if leaf.grad is not None:
                local_tensor(leaf.grad).contiguous()  # the kernel is loaded, if it takes one
            return
        if index not in self._ever[unit]:
            raise RuntimeError(
                "data_collectives=copy_engine: a parameter has its first gradient after steps in which it had none;"
                " take nccl"
            )
        reduction, gradient = self._units[unit], taken(leaf)
        before = reduction.there.get(index)
        reduction.there[index] = gradient if before is None else before.to(torch.float32).add_(gradient)
        reduction.arrived.add(index)
        self.begun = True
        while self._last and self._next < len(self._units) and self._complete(self._next):
            self._reduce_next()

    def _complete(self, unit: int) -> bool:
        return self._units[unit].arrived >= self._ever[unit]

    def _agree(self) -> None:
        """On which parameters have gradients: what backward leaves out on one rank comes from another."""
        if self._agreed:
            return
        flags = [float(i in ever) for ever, unit in zip(self._ever, self._units, strict=True) for i in unit.indices]
        told = torch.tensor(flags, device=self._device)
        for group in (self._group, self._replicas):
            if group is not None:
                dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        there = iter(told.tolist())
        self._ever = [{index for index in unit.indices if next(there)} for unit in self._units]
        self._agreed = True

    def _finish(self) -> None:
        if self.finished:
            return
        while self._next < len(self._units):
            self._reduce_next()
        self.finished = True
        # What comes next writes the shards that others fetch: on no rank is anything still to be fetched.
        fetched = None if self._gathering is None else self._gathering.mark()
        with self._lane.after_current():
            wait(fetched)
            self._barrier()
        self._settled = self._lane.mark()

    @torch.no_grad()
    def _reduce_next(self) -> None:
        unit, inbox, ever = self._units[self._next], self._inboxes[self._next], self._ever[self._next]
        self._next += 1
        while len(self._sending) >= SENDING:
            before = self._sending.pop(0)
            wait(before.added)
            before.there.clear()
        self._sending.append(unit)
        for index in sorted(ever):
            each, gradient = unit.parameters[index], unit.there.get(index)
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
            unit.added = unit.done = mark(self._device)
        if self._replicas is not None:
            with self._of_replicas.after(unit.added):
                dist.all_reduce(unit.sum, group=self._replicas)
                unit.norms.clear()
                unit.done = mark(self._device)

    def _send(self, unit: Reduction, inbox: Inbox) -> None:
        memory = self._memory
        for step in range(1, memory.world):
            peer = (memory.rank + step) % memory.world
            row = memory.rank if memory.rank < peer else memory.rank - 1
            for index in sorted(unit.there):
                first, count = unit.parameters[index].of(peer)
                if count:
                    start = inbox.start + row * unit.row_bytes + unit.starts[index]
                    memory.of(peer, start, count, self._dtype).copy_(unit.there[index].narrow(0, first, count))

    def _sum(self, unit: Reduction, inbox: Inbox) -> None:
        memory, sums, parts, there = self._memory, list[torch.Tensor](), list[list[torch.Tensor]](), list[int]()
        for index in sorted(unit.there):
            first, count = unit.parameters[index].of(memory.rank)
            if count:
                starts = [inbox.start + row * unit.row_bytes + unit.starts[index] for row in range(memory.world - 1)]
                of_ranks = [memory.of(memory.rank, start, count, self._dtype) for start in starts]
                of_ranks.insert(memory.rank, unit.there[index].narrow(0, first, count))
                parts.append(of_ranks)
                sums.append(unit.view(index).view(-1))
                there.append(index)
        unit.norms = dict(zip(there, self._add_up(sums, parts), strict=False))

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


def _add_up(sums: list[torch.Tensor], parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    for out, of_ranks in zip(sums, parts, strict=True):
        out.copy_(_total(of_ranks))
    return []


def _add_up_with_norms(sums: list[torch.Tensor], parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """:func:`_add_up`, and the Euclidean norm of each: compiled, nothing is read twice."""
    norms = []
    for out, of_ranks in zip(sums, parts, strict=True):
        total = _total(of_ranks)
        out.copy_(total)
        norms.append(total.square().sum().sqrt())
    return norms


def _total(of_ranks: list[torch.Tensor]) -> torch.Tensor:
    total = of_ranks[0].float()
    for part in of_ranks[1:]:
        total = total + part.float()
    return total
