"""FSDP by the GPUs' copy engines, over memory that the ranks of a host share: what is used when.

NCCL's kernels take multiprocessors from the matrix products they overlap with, and FSDP copies what they send and what
they bring once more; a copy engine takes none, and puts things where they belong. ``peer_gather.py`` gathers,
``peer_scatter.py`` reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ndbench.parallel._fsdp_private import Unit
from ndbench.parallel._torch_private import watched
from ndbench.parallel.peer_gather import PeerShards
from ndbench.parallel.peer_memory import PeerMemory, Switch
from ndbench.parallel.peer_scatter import HeldByOwners, Reducer, Rows

WARM_UP_STEPS = 2
"""Steps of a shape that are taken with NCCL before the copy engines are used."""


class CopyEngines:
    """Gathers and reduces ``units`` over ``group``, which FSDP2 shards them over. Made by all ranks together.

    ``units`` are in the order of forward, the root among them. ``replicas`` is who holds the same shards, ``dtype``
    what computes, ``gradient_dtype`` what gradients travel in; ``fused`` compiles their sums.

    While a rank waits in a barrier its GPU may not load a kernel: loading can stop what other streams have still to do,
    for which the other ranks wait. So the first steps of each shape, which compile, tune and load, and whatever is
    not a step (evaluation, generation, a step that is watched) are taken with NCCL, with the same sums.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        device: torch.device,
        fused: bool,
    ) -> None:
        self._device, self._switch, self._taken = device, Switch(), dict[Any, int]()
        forward = [unit for unit in map(Unit, units) if unit.parameters]
        self.shards = PeerShards(forward, group, dtype, device, self._switch, PeerMemory)
        # Backward's order, but for the root's own: its norms come with the head, its tables after all.
        trained = [
            [(each, leaf) for each, leaf in zip(unit.parameters, leaves, strict=True) if leaf.requires_grad]
            for unit, leaves in zip(forward, self.shards.leaves, strict=True)
        ]
        backward = [pairs for pairs in reversed(trained) if pairs]
        reducer = Reducer(
            [[Rows(each) for each, _ in pairs] for pairs in backward],
            group,
            replicas,
            gradient_dtype,
            device,
            fused,
            self._switch,
            self.shards.lane,
            PeerMemory,
        )
        for unit, pairs in enumerate(backward):
            for index, (_, leaf) in enumerate(pairs):
                reducer.listen(unit, index, leaf)
        parameters = [[each.parameter for each, _ in pairs] for pairs in backward]
        self.held = HeldByOwners(model, reducer, parameters, self.shards)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)

    @contextmanager
    def step(self, shape: Any) -> Iterator[None]:
        """A step whose kernels depend on ``shape`` alone, which is the same on all ranks."""
        taken = self._taken.get(shape, 0)
        self._taken[shape] = taken + 1
        if taken >= WARM_UP_STEPS and not watched():
            self.shards.start()
            self._switch.on = True
        elif self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # new kernels are coming, and a barrier may still be waiting
        try:
            yield
        finally:
            self._switch.on = False
