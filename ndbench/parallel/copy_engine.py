"""Data parallelism by the GPUs' copy engines, over memory that the ranks of a host share: what is used when.

NCCL's kernels take multiprocessors from the matrix products they overlap with, and what they send and bring is copied
once more; a copy engine takes none, and puts things where they belong. ``peer_gather.py`` gathers, ``peer_scatter.py``
reduces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ndbench.parallel._fsdp_private import Root, Unit
from ndbench.parallel._torch_private import watched
from ndbench.parallel.held import Held, Leaves
from ndbench.parallel.peer_gather import PeerShards
from ndbench.parallel.peer_held import HeldByOwners
from ndbench.parallel.peer_memory import PeerMemory, Switch
from ndbench.parallel.peer_rows import Rows
from ndbench.parallel.peer_scatter import Reducer
from ndbench.parallel.replicate import HeldInBuckets, units_of

WARM_UP_STEPS = 2
"""Steps of a shape that are taken with NCCL before the copy engines are used."""


class CopyEngines:
    """Decides which steps of a model are taken with its GPUs' copy engines.

    While a rank waits in a barrier its GPU may not load a kernel: loading can stop what other streams have still to do,
    for which the other ranks wait. So the first steps of each shape, which compile, tune and load, and whatever is
    not a step (evaluation, generation, a step that is watched) are taken with NCCL, with the same sums.
    """

    def __init__(
        self, switch: Switch, device: torch.device, held: Held, reducer: Reducer, shards: PeerShards | None = None
    ) -> None:
        self.held, self.shards, self._reducer = held, shards, reducer
        self._switch, self._device, self._taken = switch, device, dict[Any, int]()

    @contextmanager
    def step(self, shape: Any) -> Iterator[None]:
        """A step whose kernels depend on ``shape`` alone, which is the same on all ranks."""
        taken = self._taken.get(shape, 0)
        self._taken[shape] = taken + 1
        if taken >= WARM_UP_STEPS and not watched():
            if self.shards is not None:
                self.shards.start()
            self._reducer.start()
            self._switch.on = True
        elif self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # new kernels are coming, and a barrier may still be waiting
        try:
            yield
        finally:
            self._switch.on = False


def shard_by_copies(
    model: nn.Module,
    units: Sequence[nn.Module],
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    device: torch.device,
    fused: bool,
) -> CopyEngines:
    """Gather and reduce ``units``, which FSDP2 shards over ``group``. All ranks together.

    ``units`` are in the order of forward, the root among them. ``replicas`` is who holds the same shards, ``dtype``
    what computes, ``gradient_dtype`` what gradients travel in; ``fused`` compiles their sums.
    """
    switch = Switch()
    forward = [unit for unit in map(Unit, units) if unit.parameters]
    shards = PeerShards(Root(model), forward, group, dtype, device, switch, PeerMemory)
    trained = [
        [(each, leaf) for each, leaf in zip(unit.parameters, leaves, strict=True) if leaf.requires_grad]
        for unit, leaves in zip(forward, shards.leaves, strict=True)
    ]
    backward = [pairs for pairs in reversed(trained) if pairs]
    rows = [[Rows.of_shard(each) for each, _ in pairs] for pairs in backward]
    reducer = Reducer(rows, group, replicas, gradient_dtype, device, fused, switch, shards.lane, PeerMemory)
    _listen(reducer, ([leaf for _, leaf in pairs] for pairs in backward))
    parameters = [[each.parameter for each, _ in pairs] for pairs in backward]
    held = HeldByOwners(model, Held(model), reducer, parameters, shards)
    _made(group, device)
    return CopyEngines(switch, device, held, reducer, shards)


def replicate_by_copies(
    model: nn.Module,
    leaves: Leaves,
    blocks: Iterable[nn.Module],
    group: dist.ProcessGroup,
    gradient_dtype: torch.dtype,
    device: torch.device,
    fused: bool,
) -> CopyEngines:
    """Sum the gradients of ``leaves`` over the replicas of ``group``: each sends all of them to each. All together."""
    switch, pairs = Switch(), list(leaves)
    buckets = HeldInBuckets(model, pairs, blocks, group, switch)
    units = [[pairs[index] for index in unit] for unit in units_of([p for p, _ in pairs], blocks)]
    rows = [[Rows.of_replica(parameter) for parameter, _ in unit] for unit in units]
    reducer = Reducer(rows, group, None, gradient_dtype, device, fused, switch, None, PeerMemory)
    _listen(reducer, ([leaf for _, leaf in unit] for unit in units))
    held = HeldByOwners(model, buckets, reducer, [[parameter for parameter, _ in unit] for unit in units])
    _made(group, device)
    return CopyEngines(switch, device, held, reducer)


def _listen(reducer: Reducer, units: Iterable[list[nn.Parameter]]) -> None:
    for unit, leaves in enumerate(units):
        for index, leaf in enumerate(leaves):
            reducer.listen(unit, index, leaf)


def _made(group: dist.ProcessGroup, device: torch.device) -> None:
    """What the making loads is loaded on all ranks before any of them waits in a barrier of a step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier(group)
