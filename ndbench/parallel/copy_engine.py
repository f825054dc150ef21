"""FSDP's all-gather and reduce-scatter by the GPUs' copy engines, over memory that the ranks of a host share.

NCCL's kernels take multiprocessors from the matrix products they overlap with; a copy engine takes none. Gradients
travel in the dtype they were computed in and are summed in float32 on arrival: half of the bytes of a float32
reduce-scatter, with the same sums. The buffers are symmetric memory (``torch.distributed._symmetric_memory``), kept for
the next model of the process. It knows nothing of models; ``data.py`` decides which units use it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ndbench.parallel._torch_private import (
    AllGather,
    ReduceScatter,
    group_name,
    group_named,
    symmetric_memory,
    watched,
)

ALIGNMENT = 128
"""Bytes to which a buffer's size is rounded up."""
BUFFERS = 3
"""One that is filled, one that is read, and one whose readers may not have come to an end on every rank."""
WARM_UP_STEPS = 2
"""Steps of a shape that are taken with NCCL before the copy engines are used."""
GATHER, SCATTER = 0, 1
"""Channels of the barriers: a gather and a reduction may wait at the same time."""


class PeerMemory:
    """One buffer on every rank of ``group``, each mapped into all of them. Made by all ranks together."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.world = group.rank(), group.size()
        before = torch.cuda.memory_allocated(device)
        self.local: torch.Tensor = symmetric_memory().empty(size, dtype=torch.uint8, device=device)
        self.uncounted = max(size - (torch.cuda.memory_allocated(device) - before), 0)
        self._handle: Any = symmetric_memory().rendezvous(self.local, group)
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        # What these load and map for the first time is there before any rank waits for another.
        for channel in (GATHER, SCATTER):
            self.barrier(channel)
        for peer in range(self.world):
            self.local[:ALIGNMENT].copy_(self.of(peer, 0, ALIGNMENT, torch.uint8))

    def of(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements of ``rank``'s buffer from element ``start`` on."""
        key = (rank, start, numel, dtype)
        if key not in self._views:
            self._views[key] = self._handle.get_buffer(rank, (numel,), dtype, storage_offset=start)
        return self._views[key]

    def barrier(self, channel: int) -> None:
        """On the current stream: later work sees what every rank's earlier work wrote."""
        self._handle.barrier(channel=channel)


class Rotation:
    """Buffers of one size, handed out in turn: which one is next must not differ between ranks.

    So nothing here depends on when Python frees a tensor, and a buffer is never given back to the allocator, whose
    choice among free blocks goes by their addresses. FSDP drops a tensor in stream order before it needs two more.
    """

    def __init__(self, buffers: int, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.made = [PeerMemory(size, group, device) for _ in range(buffers)]
        self._given: list[weakref.ref[torch.Tensor] | None] = [None] * buffers
        self._next = 0

    def start(self) -> None:
        """Before a step: a step that broke off may have taken more on one rank than on another."""
        self._next, self._given = 0, [None] * len(self.made)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        index, self._next = self._next, (self._next + 1) % len(self.made)
        before = self._given[index]
        assert before is None or before() is None, "FSDP still holds the tensor that was handed out before"
        tensor = self.made[index].local[: numel * dtype.itemsize].view(dtype)
        self._given[index] = weakref.ref(tensor)
        return tensor

    def holding(self, tensor: torch.Tensor) -> PeerMemory | None:
        return next((made for made in self.made if made.local.data_ptr() == tensor.data_ptr()), None)


_rotations: dict[tuple[str, str, int], Rotation] = {}
"""(group, use, bytes) -> buffers, for all models of this process."""


class Pool:
    """The buffers for one ``use`` of a group, by size; ``buffers`` of each."""

    def __init__(self, use: str, engines: CopyEngines, buffers: int = BUFFERS) -> None:
        self.use, self.engines, self.buffers = use, engines, buffers

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if not self.engines.on:
            self.engines.needed[self, size] = None
            return torch.empty(numel, dtype=dtype, device=self.engines.device)
        return self.rotation(size).take(numel, dtype)

    def rotation(self, size: int) -> Rotation:
        """Made when it is asked for first, by all ranks together."""
        key = (group_name(self.engines.group), self.use, size)
        if key not in _rotations:
            _rotations[key] = Rotation(self.buffers, size, self.engines.group, self.engines.device)
        return _rotations[key]


def _holding(tensor: torch.Tensor) -> PeerMemory | None:
    found = (rotation.holding(tensor) for rotation in _rotations.values())
    return next((memory for memory in found if memory is not None), None)


class CopyEngines:
    """Decides which steps of a model are taken with its GPUs' copy engines.

    While a rank waits in a barrier its GPU may not load a kernel: loading can stop what other streams have still to do,
    for which the other ranks wait. So the first steps of each shape, which compile, tune and load, and whatever is
    not a step (evaluation, generation, a step that is watched) are taken with NCCL, with the same sums.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.on = False
        self.needed: dict[tuple[Pool, int], None] = {}
        self._taken: dict[Any, int] = {}

    @contextmanager
    def step(self, shape: Any) -> Iterator[None]:
        """A step whose kernels depend on ``shape`` alone, which is the same on all ranks."""
        taken = self._taken.get(shape, 0)
        self._taken[shape] = taken + 1
        if taken >= WARM_UP_STEPS and not watched():
            for pool, size in self.needed:
                pool.rotation(size).start()
            self.on = True
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # new kernels are coming, and a barrier may still be waiting
        try:
            yield
        finally:
            self.on = False


def uncounted_bytes() -> int:
    """Memory of this rank's buffers that the caching allocator does not count."""
    return sum(memory.uncounted for rotation in _rotations.values() for memory in rotation.made)


def why_not(group: dist.ProcessGroup) -> str | None:
    """Why the ranks of ``group`` cannot read each other's memory; null when they can."""
    ranks, a_host = dist.get_process_group_ranks(group), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    hosts = {rank // a_host for rank in ranks} if a_host else set()
    if len(hosts) != 1:
        return f"ranks {ranks} are not on one host" if hosts else "LOCAL_WORLD_SIZE, the ranks of this host, is not set"
    here = torch.cuda.current_device()
    for other in (rank % a_host for rank in ranks):
        if other >= torch.cuda.device_count():
            return f"rank {other} of the host has no GPU of its own that this rank sees"
        if other != here and not torch.cuda.can_device_access_peer(here, other):
            return f"GPU {here} cannot read the memory of GPU {other}"
    return None


def use_copy_engines(
    blocks: list[nn.Module], tables: list[nn.Module], group: dist.ProcessGroup, device: torch.device, fused: bool
) -> CopyEngines:
    """Gather and reduce ``blocks``, which FSDP2 shards over ``group``, by the copy engines of its GPUs.

    Of ``tables``, which are large and seldom, only the gradients: one buffer does. ``fused`` compiles the sums.
    """
    engines = CopyEngines(group, device)
    gather, scatter = Pool("gather", engines), Pool("scatter", engines)
    add_up = torch.compile(_add_up, dynamic=False) if fused else _add_up
    for block in blocks:
        assert isinstance(block, FSDPModule)
        block.set_custom_all_gather(PeerAllGather(gather))
        block.set_custom_reduce_scatter(PeerReduceScatter(scatter, add_up))
    for table in tables:
        assert isinstance(table, FSDPModule)
        table.set_custom_reduce_scatter(PeerReduceScatter(Pool("tables", engines, buffers=1), add_up))
    return engines


class PeerAllGather(AllGather):
    """Each rank fetches the others' shards out of their output buffers, where FSDP put them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:  # noqa: ARG002
        return self.pool.take(int(size[0]), dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        torch.ops.ndbench.all_gather_by_copies(output_tensor, input_tensor, group_name(group))


class PeerReduceScatter(ReduceScatter):
    """Each rank fetches its part of the others' gradients and adds them up in float32, in the order of the ranks."""

    def __init__(self, pool: Pool, add_up: Callable[[torch.Tensor, list[torch.Tensor]], None]) -> None:
        self.pool, self.add_up = pool, add_up
        self._input = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # FSDP asks for the input and then for the output, both in the dtype of the gradients.
        numel = int(size[0])
        if self._input and numel * self.pool.engines.group.size() == self._input:
            self._input = 0
            return torch.empty(numel, dtype=torch.float32, device=device)
        self._input = numel
        return self.pool.take(numel, dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        arrived = input_tensor.new_empty(group.size() - 1, output_tensor.numel())
        torch.ops.ndbench.scatter_by_copies(arrived, input_tensor, group_name(group))
        parts = [*arrived.unbind(0)]
        parts.insert(group.rank(), input_tensor.narrow(0, group.rank() * output_tensor.numel(), output_tensor.numel()))
        self.add_up(output_tensor, parts)


def _add_up(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    out.copy_(total)


# As operators, so that whoever records the collectives of a step sees these, too.
_library = torch.library.Library("ndbench", "DEF")  # type: ignore[no-untyped-call]
_library.define("all_gather_by_copies(Tensor(a!) output, Tensor input, str group_name) -> ()")  # type: ignore[no-untyped-call]
_library.define("scatter_by_copies(Tensor(a!) arrived, Tensor input, str group_name) -> ()")  # type: ignore[no-untyped-call]


def _all_gather_by_copies(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    memory = _holding(output)
    if memory is None:
        dist.all_gather_into_tensor(output, input, group=group_named(group_name))
        return
    numel, dtype = input.numel(), input.dtype
    memory.barrier(GATHER)
    for step in range(1, memory.world):
        peer = (memory.rank + step) % memory.world
        output.narrow(0, peer * numel, numel).copy_(memory.of(peer, peer * numel, numel, dtype))
    # No rank may write into its buffer again while another still reads it.
    memory.barrier(GATHER)


def _scatter_by_copies(arrived: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """Into each row of ``arrived`` this rank's part of another rank's ``input``, by rank."""
    memory = _holding(input)
    if memory is None:
        group, received = group_named(group_name), torch.empty_like(input)
        dist.all_to_all_single(received, input, group=group)
        rows = received.view(group.size(), -1)
        others = [rows[peer] for peer in range(group.size()) if peer != group.rank()]
        torch._foreach_copy_(list(arrived.unbind(0)), others)
        return
    numel, dtype = arrived.shape[1], input.dtype
    memory.barrier(SCATTER)
    for step in range(1, memory.world):
        peer = (memory.rank + step) % memory.world
        row = peer if peer < memory.rank else peer - 1
        arrived[row].copy_(memory.of(peer, memory.rank * numel, numel, dtype))
    memory.barrier(SCATTER)


_library.impl("all_gather_by_copies", _all_gather_by_copies, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("scatter_by_copies", _scatter_by_copies, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
