"""Ring attention: keys and values travel from rank to rank while each rank attends with its own queries.

After Liu et al., arXiv:2310.01889, with head-tail balance for causal masks (``context.sequence_chunks``). Blocks come
from ``kernels.py``, masks from ``masks.py``; this file owns the schedule, the rotation and the autograd function.
Bytes on the wire: ``context.ring_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ndbench.parallel import kept, kernels, masks
from ndbench.parallel.context import sequence_chunks, shard_sequence
from ndbench.parallel.kernels import block_backward, block_forward, by_rows
from ndbench.parallel.ring_sums import RowSum, add_keys, first_keys, no_keys, packed, sum_dtype, unpacked

MASKED_ROWS = 1024
"""Query rows of a tile that needs a mask: bounds the mask's memory to this many rows of local keys."""


@dataclass(frozen=True)
class Tile:
    """A rectangle of scores to compute: local query rows against local key rows of the visiting rank's shard."""

    queries: slice
    keys: slice
    mask: str
    """``none`` (all visible), ``causal`` (by local index) or ``positions`` (window, documents: an additive mask)."""


@dataclass(frozen=True)
class RingPlan:
    """What one call of ring attention needs besides tensors."""

    group: dist.ProcessGroup
    scale: float
    window: int | None = None
    kernel: str | None = None
    """What blocks without a mask run on, of ``sdpa.KERNELS``; None: ``kernels.block_kernel`` decides."""
    fused: bool = False
    """Blocks are merged by a compiled function: one pass over the output instead of several."""

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size of the group."""
        return self.group.rank(), self.group.size()


def ring_attention(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    plan: RingPlan,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over the whole sequence, of which each rank of ``plan.group`` holds its zigzag shard.

    q is [b, heads, s, d], k and v [b, kv heads, s, d] with s = sequence / cp; ``documents`` holds the document ids of
    the *whole* sequence, [b, sequence], in natural order. Returns [b, heads, s, d]. All ranks must call it.
    """
    out: torch.Tensor = _RingAttention.apply(q_bhsd, k_bhsd, v_bhsd, documents, plan)  # type: ignore[no-untyped-call]
    return out


def tiles(
    cp_size: int,
    rank: int,
    source: int,
    local_length: int,
    window: int | None = None,
    documents: bool = False,
    masked_rows: int = MASKED_ROWS,
) -> list[Tile]:
    """Tiles that ``rank`` computes while it holds the keys of ``source``.

    Chosen from positions alone: what a causal mask or the window hides from all queries of a tile is left out, so each
    rank does half a block a step, and a window costs its own width. Document boundaries are data; they mask but never
    skip, which keeps the schedule free of device synchronisation. A tile with a mask has at most ``masked_rows`` rows.
    No query is in two tiles, and every query is in one when ``source == rank``.
    """
    masked = documents or window is not None
    if rank == source and not masked:
        return [Tile(slice(0, local_length), slice(0, local_length), "causal")]
    total, half = cp_size * local_length, local_length // 2
    rows: list[Tile] = []
    for q_index, queries in enumerate(sequence_chunks(total, cp_size, rank, "ring")):
        for start in range(0, half, masked_rows if masked else half):
            part = queries[start : start + masked_rows] if masked else queries
            spans, shown = [], 0
            for k_index, keys in enumerate(sequence_chunks(total, cp_size, source, "ring")):
                first = keys.start if window is None else max(keys.start, part[0] - window + 1)
                stop = min(keys.stop, part[-1] + 1)
                if first < stop:
                    spans.append((k_index * half + first - keys.start, k_index * half + stop - keys.start))
                    all_see = stop - 1 <= part[0] and (window is None or part[-1] - first < window)
                    shown += stop - first if all_see else 0
            if spans:
                local = slice(spans[0][0], spans[-1][1])
                whole = not documents and shown == local.stop - local.start
                first_row = q_index * half + start
                rows.append(Tile(slice(first_row, first_row + len(part)), local, "none" if whole else "positions"))
    if not masked and len(rows) == 2 and rows[0].keys == rows[1].keys:
        return [Tile(slice(0, local_length), rows[0].keys, "none")]
    return rows


class _Rotation:
    """A tensor on its way to the next rank, and its counterpart from the previous one; or the way ``back``."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, back: bool = False) -> None:
        rank, size, hop = group.rank(), group.size(), -1 if back else 1
        # torch.empty, not empty_like: that keeps the strides of a permuted tensor. Both ends are kept until wait().
        self.sent = tensor.contiguous()
        self.received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, group=group, group_peer=(rank + hop) % size),
                dist.P2POp(dist.irecv, self.received, group=group, group_peer=(rank - hop) % size),
            ]
        )

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


class _TileMasks:
    """Builds the additive mask of a tile, or None; masks are made when needed and never kept."""

    def __init__(self, plan: RingPlan, documents: torch.Tensor | None, q_bhsd: torch.Tensor) -> None:
        self.window, self.documents, self.dtype, self.device = plan.window, documents, q_bhsd.dtype, q_bhsd.device
        self.rank, self.size = plan.place
        self.total = q_bhsd.shape[2] * self.size

    def __call__(self, tile: Tile, source: int) -> torch.Tensor | None:
        if tile.mask != "positions":
            return None
        q_positions, q_documents = self._shard(self.rank, tile.queries)
        k_positions, k_documents = self._shard(source, tile.keys)
        seen = masks.visible(q_positions, k_positions, self.window, q_documents, k_documents)
        return masks.additive(seen, self.dtype)

    def _shard(self, rank: int, part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        chunks = sequence_chunks(self.total, self.size, rank, "ring")
        held = masks.positions(chunks, self.device)[part]
        if self.documents is None:
            return held, None
        return held, shard_sequence(self.documents, self.size, rank, "ring")[:, part]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None, plan: RingPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp over all keys, and the keys and values that came last, packed."""
    rank, size = plan.place
    mask_of = _TileMasks(plan, documents, q)
    merge_into = kernels.fused_merge_into() if plan.fused else kernels.merge_into
    b, h, s, d = q.shape
    # No kernel's output is written to: selective checkpointing keeps it.
    out = torch.empty(b, s, h, d, dtype=sum_dtype(q.dtype, size), device=q.device).transpose(1, 2)
    lse = torch.empty(b, h, s, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    held, sending = (k, v), packed(k, v)
    for step in range(size):
        source = (rank - step) % size
        coming = _Rotation(sending, plan.group) if step + 1 < size else None
        for tile in tiles(size, rank, source, s, plan.window, documents is not None):
            rows = tile.queries
            block_out, block_lse = block_forward(
                q[:, :, rows], held[0][:, :, tile.keys], held[1][:, :, tile.keys],
                causal=tile.mask == "causal", mask=mask_of(tile, source), scale=plan.scale, asked=plan.kernel,
            )  # fmt: skip
            if step == 0:
                out[:, :, rows], lse[:, :, rows] = block_out, block_lse
            else:
                merge_into(out[:, :, rows], lse[:, :, rows], block_out, block_lse)
        if coming is not None:
            sending = coming.wait()
            held = unpacked(sending)
    return out.to(q.dtype), lse, sending


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: torch.Tensor | None,
        plan: RingPlan,
    ) -> torch.Tensor:
        q, k, v = by_rows(q), by_rows(k), by_rows(v)
        if (before := kept.recalled()) is None:
            out, lse, sending = _attend(q, k, v, documents, plan)
            kept.keep(out, lse)
        else:
            if before[0].shape != q.shape:
                raise RuntimeError(f"a block kept attention of {list(before[0].shape)}, and recomputes {list(q.shape)}")
            # The keys that came last are the next rank's own: one hop back instead of all the way round.
            (out, lse), sending = before, _Rotation(packed(k, v), plan.group, back=True).wait()
        # With the keys that came last backward begins, and so needs no rotation before it computes.
        ctx.save_for_backward(q, k, v, out, lse, sending, *([] if documents is None else [documents]))
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:  # type: ignore[override]
        q, k, v, out, lse, sending, *rest = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        documents = rest[0] if rest else None
        rank, size = plan.place
        mask_of = _TileMasks(plan, documents, q)
        dout = by_rows(dout)
        # A mask makes many tiles, which share keys; without one a step has one tile.
        many = plan.window is not None or documents is not None
        precise = torch.promote_types(q.dtype, torch.float32)
        dq = RowSum(q, sum_dtype(q.dtype, size), waits=size == 2 and not many)
        # Forward's steps the other way round, and the keys the other way: the last step is on this rank's own, so their
        # gradients come home while it computes, and no transfer is left when it ends.
        held = unpacked(sending)
        travelling: _Rotation | None = None
        dkv: torch.Tensor | None = None
        for step in reversed(range(size)):
            source, home = (rank - step) % size, step == 0
            if home:
                held = (k, v)
            coming = _Rotation(sending, plan.group, back=True) if step > 1 else None
            arriving, dkv = travelling, None
            for tile in tiles(size, rank, source, q.shape[2], plan.window, documents is not None):
                rows, keys = tile.queries, tile.keys
                block_dq, *block_dkv = block_backward(
                    dout[:, :, rows], q[:, :, rows], held[0][:, :, keys], held[1][:, :, keys],
                    out[:, :, rows], lse[:, :, rows],
                    causal=tile.mask == "causal", mask=mask_of(tile, source), scale=plan.scale, asked=plan.kernel,
                )  # fmt: skip
                dq.add(rows, block_dq)
                if dkv is not None:
                    add_keys(dkv, keys, block_dkv)
                elif many or arriving is None:
                    dkv = first_keys(k, keys, block_dkv, precise if many else k.dtype)
            if dkv is None and (many or arriving is None):  # a window may leave a step without a tile
                dkv = no_keys(k, precise if many else k.dtype)
            # The gradients of source's keys arrive from the rank that held them before, and go on with our share: their
            # transfer hides behind the next step's block. They travel in float32 while they are a sum; what one kernel
            # gave loses nothing in less.
            if dkv is None:
                assert arriving is not None, "it was made above otherwise"
                dkv = arriving.wait().to(dq.dtype)
                add_keys(dkv, keys, block_dkv)  # of the step's only tile
            elif arriving is not None:
                dkv += arriving.wait()
            travelling = None if home else _Rotation(dkv, plan.group, back=True)
            if coming is not None:
                sending = coming.wait()
                held = unpacked(sending)
        assert dkv is not None
        dk, dv = unpacked(dkv.to(k.dtype))
        return dq.whole().to(q.dtype), dk, dv, None, None
