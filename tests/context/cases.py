"""What ranks run in the context-parallel tests: one attention call, or one step of a small model, against no CP.

Errors come back as sums of squares, so that a test can state one number over all ranks: ||actual - expected|| /
||expected|| (Frobenius) of the output and of the gradients of q, k and v.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ndbench.measure.collectives import CollectiveRecorder, totals
from ndbench.parallel import attention, kernels, masks, ring, ulysses
from ndbench.parallel.context import shard_sequence

NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One attention problem. ``documents`` gives the lengths of the documents of each sequence of the batch."""

    method: str
    heads: int = 8
    kv_heads: int = 2
    length: int = 64
    head_dim: int = 16
    batch: int = 2
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    dtype: torch.dtype = torch.float32
    explicit_reference: bool = True
    """Reference from written-out scores in float64; False: from PyTorch's fused kernel in float64 (long sequences)."""
    fault: str | None = None
    """Name of a planted bug, see :func:`planted`."""
    device: str = "cpu"
    masked_rows: int = ring.MASKED_ROWS
    """Rows of a masked tile of the ring; small ones make short sequences many tiles."""
    kernel: str | None = None
    """What blocks without a mask run on, on CUDA."""
    fused: bool = False


class _Layer(torch.nn.Module):
    is_causal = True


def attention_errors(case: Case) -> dict[str, tuple[float, float]]:
    """(squared error, squared norm) of this rank's shard of the output and of each gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v, dout = inputs(case)
    documents = document_ids(case.documents)
    if documents is not None:
        documents = documents.to(case.device)
    expected = reference(case, q, k, v, dout, documents)
    layer = _Layer()
    attention.configure(layer, dist.group.WORLD, case.method, case.kernel, case.fused)
    small = functools.partial(ring.tiles, masked_rows=case.masked_rows)
    with mock.patch.object(ring, "tiles", small), planted(case.fault) as change:
        # A fault of the caller: the shards are cut for the other method.
        cut = {"ring": "ulysses", "ulysses": "ring"}[case.method] if "cut" in change else case.method
        mine = [shard_sequence(x, size, rank, cut, dim=2).requires_grad_() for x in (q, k, v)]
        out, _ = attention.ndbench_attention(
            layer,
            *mine,
            scaling=None if "scale" in change else 0.3,
            sliding_window=None if "window" in change else case.window,
            document_ids=None if "documents" in change else documents,
        )
        out.backward(shard_sequence(dout, size, rank, cut, dim=2).transpose(1, 2))
    actual = [out.detach().transpose(1, 2), *(x.grad for x in mine)]
    errors = {}
    for name, a, whole in zip(NAMES, actual, expected, strict=True):
        assert a is not None
        assert a.dtype == case.dtype
        e = shard_sequence(whole, size, rank, cut, dim=2).double()
        errors[name] = ((a.double() - e).square().sum().item(), e.square().sum().item())
    return errors


def inputs(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(case.batch, heads, case.length, case.head_dim, generator=generator).to(case.device, case.dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    ]


def document_ids(documents: tuple[tuple[int, ...], ...] | None) -> torch.Tensor | None:
    if documents is None:
        return None
    return torch.stack(
        [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in documents]
    )


def reference(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, documents: torch.Tensor | None
) -> list[torch.Tensor]:
    wide = [x.double().clone().requires_grad_() for x in (q, k, v)]
    if case.explicit_reference:
        tokens = torch.arange(case.length, device=q.device)
        distance = tokens[:, None] - tokens[None, :]
        hidden = (distance < 0)[None]
        if case.window is not None:
            hidden = hidden | (distance >= case.window)
        if documents is not None:
            hidden = hidden | (documents[:, :, None] != documents[:, None, :])
        group = case.heads // case.kv_heads
        scores = wide[0] @ wide[1].repeat_interleave(group, 1).transpose(2, 3) * 0.3
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        out = scores.softmax(-1) @ wide[2].repeat_interleave(group, 1)
    else:
        assert documents is None
        assert case.window is None
        out = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.3, enable_gqa=True)
    out.backward(dout.double())
    return [out.detach(), *(x.grad for x in wide if x.grad is not None)]


def sent(case: Case) -> dict[str, dict[str, tuple[int, int]]]:
    """What this rank puts on the wire in forward and in backward: operation -> (count, bytes)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v, dout = (shard_sequence(x, size, rank, case.method, dim=2) for x in inputs(case))
    layer = _Layer()
    attention.configure(layer, dist.group.WORLD, case.method)
    axes = {dist.group.WORLD.group_name: "cp"}
    with CollectiveRecorder(axes) as forward:
        out, _ = attention.ndbench_attention(
            layer, *(x.requires_grad_() for x in (q, k, v)), sliding_window=case.window
        )
    with CollectiveRecorder(axes) as backward:
        out.backward(dout.transpose(1, 2))
    table = {"forward": totals(forward.table()), "backward": totals(backward.table())}
    assert all(axis == "cp" for phase in table.values() for _, axis in phase)
    return {phase: {op: both for (op, _), both in rows.items() if op != "recv"} for phase, rows in table.items()}


def two_models_of_two_groups(method: str) -> bool:
    """A layer with a cp group and one without live in one process, and neither sees the other's group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v, _ = inputs(Case(method))
    wide, alone = _Layer(), _Layer()
    attention.configure(wide, dist.group.WORLD, method)
    attention.configure(alone, None, method)
    expected, _ = attention.ndbench_attention(alone, q, k, v)
    actual, _ = attention.ndbench_attention(wide, *(shard_sequence(x, size, rank, method, dim=2) for x in (q, k, v)))
    return torch.allclose(actual, shard_sequence(expected, size, rank, method), atol=1e-6)


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[set[str]]:
    """Plant a bug for as long as the context lasts; yields what the caller itself must get wrong."""
    size = dist.get_world_size()
    callers = {"wrong_permutation": "cut", "window_ignored": "window", "documents_ignored": "documents"}
    callers["scaling_ignored"] = "scale"
    if fault is None or fault in callers:
        yield {callers[fault]} if fault else set()
        return
    calls = {"merge": 0, "wait": 0, "exchange": 0}
    merge, wait, tiles, exchange = kernels.merge_into, ring._Rotation.wait, ring.tiles, ulysses._exchange
    visible, additive, join = masks.visible, masks.additive, ulysses._join_sequence

    def merge_without_last_lse(out: Any, lse: Any, block_out: Any, block_lse: Any) -> None:
        calls["merge"] += 1
        merge(out, lse.clone() if calls["merge"] == size - 1 else lse, block_out, block_lse)

    def blocks_averaged(out: Any, lse: Any, block_out: Any, block_lse: Any) -> None:
        merge(out, lse.clone(), block_out, lse)
        merge(torch.empty_like(out), lse, block_out, block_lse)

    def wait_without_last_hop(self: Any) -> Any:
        calls["wait"] += 1
        received = wait(self)
        return self.sent if calls["wait"] == 3 * size - 4 else received

    def tiles_without_last_block(cp_size: int, rank: int, source: int, *rest: Any) -> Any:
        return [] if source == (rank + 1) % cp_size else tiles(cp_size, rank, source, *rest)

    def exchange_forward_only(x: Any, group: Any) -> Any:
        calls["exchange"] += 1
        return exchange(x, group) if calls["exchange"] <= 2 else x

    patches: dict[str, Any] = {
        "last_lse_dropped": mock.patch.object(kernels, "merge_into", merge_without_last_lse),
        "last_block_dropped": mock.patch.object(ring, "tiles", tiles_without_last_block),
        "kv_gradients_one_hop_short": mock.patch.object(ring._Rotation, "wait", wait_without_last_hop),
        "blocks_averaged": mock.patch.object(kernels, "merge_into", blocks_averaged),
        "window_off_by_one": mock.patch.object(
            masks, "visible", lambda q, k, w=None, *d: visible(q, k, None if w is None else w + 1, *d)
        ),
        "infinite_masks": mock.patch.object(
            masks, "additive", lambda seen, dtype: additive(seen, dtype).masked_fill_(~seen, float("-inf"))
        ),
        "chunks_joined_in_reverse": mock.patch.object(ulysses, "_join_sequence", lambda x: join(x.flip(0))),
        "no_exchange_in_backward": mock.patch.object(ulysses, "_exchange", exchange_forward_only),
    }
    with patches[fault]:
        yield set()
