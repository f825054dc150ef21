"""What ranks run for the test of how the ring adds up the gradient of its queries."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ndbench.parallel import ring
from ndbench.parallel.context import shard_sequence

HEADS, HEAD_DIM, LENGTH = 2, 16, 256


def gradients(in_bf16: bool) -> dict[str, torch.Tensor]:
    """dq of this rank from the ring in bf16, and the float32 sum of what its blocks gave, rounded once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, HEADS, LENGTH, HEAD_DIM, generator=generator) for _ in range(4)]
    *inputs, dout = (shard_sequence(x, size, rank, "ring", dim=2).to(torch.bfloat16) for x in whole)
    q, k, v = (x.requires_grad_() for x in inputs)
    given: list[torch.Tensor] = []
    block = ring.block_backward

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = block(*args, **kwargs)
        given.append(found[0].clone())
        return found

    assert dist.group.WORLD is not None
    plan = ring.RingPlan(dist.group.WORLD, HEAD_DIM**-0.5)
    with (
        patch.object(ring, "block_backward", noted),
        patch.object(ring, "sum_dtype", (lambda dtype, summands: dtype) if in_bf16 else ring.sum_dtype),
    ):
        ring.ring_attention(q, k, v, plan).backward(dout)
    summed, blocks = torch.zeros(q.shape), iter(given)
    for step in reversed(range(size)):
        for tile in ring.tiles(size, rank, (rank - step) % size, q.shape[2]):
            summed[:, :, tile.queries] += next(blocks)
    assert q.grad is not None
    return {"ring": q.grad, "float32": summed.to(torch.bfloat16)}
