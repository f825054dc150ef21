"""Ulysses: exchange sequence shards for head shards, attend over the whole sequence, exchange back.

After Jacobs et al., arXiv:2309.14509. Each rank holds one contiguous chunk of the sequence before and after, and
heads / cp heads of the whole sequence in between. Bytes on the wire: ``context.ulysses_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ndbench.parallel._torch_private import functional, group_name
from ndbench.parallel.context import kv_replication


def ulysses_attention(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    group: dist.ProcessGroup,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """``attend(q, k, v)`` over the whole sequence, of which each rank of ``group`` holds a contiguous chunk.

    q is [b, heads, s, d], k and v [b, kv heads, s, d] with s = sequence / cp. ``attend`` gets and returns
    [b, heads / cp, sequence, d]; where kv heads do not divide by cp each is repeated, so that a rank has those its
    query heads need. Returns [b, heads, s, d]. Raises ``ValueError`` when the query heads do not divide by cp.
    """
    size = dist.get_world_size(group)
    heads, kv_heads = q_bhsd.shape[1], k_bhsd.shape[1]
    if heads % size:
        raise ValueError(f"ulysses splits attention heads over cp: {heads} local heads do not divide by cp {size}")
    repeats = kv_replication(kv_heads, size)
    if repeats > 1:
        k_bhsd, v_bhsd = k_bhsd.repeat_interleave(repeats, dim=1), v_bhsd.repeat_interleave(repeats, dim=1)
    # [cp, b, heads of one rank (q, k, v side by side), s, d]: one exchange instead of three.
    packed = torch.cat([torch.stack(x.chunk(size, dim=1)) for x in (q_bhsd, k_bhsd, v_bhsd)], dim=2)
    whole = _join_sequence(_all_to_all(packed, group))
    q_heads, k_heads = heads // size, kv_heads * repeats // size
    q, k, v = torch.split(whole, [q_heads, k_heads, k_heads], dim=1)
    out_bhsd = attend(q, k, v)
    return torch.cat(_all_to_all(torch.stack(out_bhsd.chunk(size, dim=2)), group).unbind(0), dim=1)


def _join_sequence(x: torch.Tensor) -> torch.Tensor:
    """[cp, b, h, s, d], the chunks of all ranks -> [b, h, cp · s, d]: contiguous chunks in rank order."""
    return x.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out: torch.Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class _AllToAll(torch.autograd.Function):
    """Chunk i of dim 0 goes to rank i, chunk j of the result comes from rank j. Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _exchange(dout, ctx.group), None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # The backend reads and writes memory in order and ignores strides: both sides must be contiguous, and say so.
    x = x.contiguous()
    chunks = [1] * x.shape[0]
    out: torch.Tensor = functional().all_to_all_single(x, chunks, chunks, group_name(group))
    out = functional().wait_tensor(out)
    assert out.is_contiguous()
    return out
