"""The whole ring in one process against attention in float64: on CPU, and on one GPU every kernel of its blocks.

A wrong convention of the log-sum-exp, a merge or a hop that loses something shows here in seconds, on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ndbench.parallel import kernels, ring, sdpa
from tests.context.alone import by_heads, by_rows, errors
from tests.context.cases import Case

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 9},
    "documents": {"documents": ((10, 54), (30, 34))},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_the_ring_equals_attention_over_the_whole_sequence(cp_size: int, mask: str, dtype: torch.dtype) -> None:
    length = 60 if cp_size == 3 else 64
    case = Case("ring", dtype=dtype, length=length, **MASKS[mask])
    if cp_size == 3 and case.documents is not None:
        case = Case("ring", dtype=dtype, length=length, documents=((10, 50), (30, 30)))
    worst = errors(case, cp_size)
    assert max(worst.values()) < TOLERANCE[dtype], worst


def half_of_the_weight(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """The planted fault of a log-sum-exp in base 2."""
    kernels.merge_into(out, lse, block_out, block_lse / math.log(2))


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("lost", ["out", "dk"])
def test_a_wrong_weight_or_a_lost_gradient_is_seen(cp_size: int, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lost == "out":
        monkeypatch.setattr(ring.kernels, "fused_merge_into", lambda: half_of_the_weight)
    else:
        monkeypatch.setattr(ring, "add_keys", lambda *_: None)
    worst = errors(Case("ring"), cp_size, fused=lost == "out")
    assert worst[lost] > 100 * TOLERANCE[torch.float32], worst


@pytest.mark.parametrize(
    ("cp_size", "changes", "most"), [(2, {}, 1), (2, {"documents": ((40, 24), (64,))}, 0), (4, {}, 0)], ids=str
)
def test_blocks_of_queries_gradients_do_not_pile_up(
    cp_size: int, changes: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may wait where the only other has all rows: with a mask, or more ranks, none would ever come or many wait."""
    waited = []

    class Noted(ring.RowSum):
        def add(self, rows: slice, block: torch.Tensor) -> None:
            super().add(rows, block)
            waited.append(int(self._waiting is not None))

    monkeypatch.setattr(ring, "RowSum", Noted)
    errors(Case("ring", **changes), cp_size)
    assert max(waited) == most


class Cudnn:
    """cuDNN's two operators as PyTorch has them, computed by the CPU kernel, with what makes them easy to misuse.

    A graph is built for each layout of q, k, v and keeps the strides of out, dout and log-sum-exp of that first call;
    a later call with others has its memory read by the old strides. The log-sum-exp has ``ndim`` dims.
    """

    def __init__(self, ndim: int) -> None:
        self.ndim, self.calls = ndim, 0
        self.graphs: dict[Any, list[tuple[int, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)

    def _scaled_dot_product_cudnn_attention(
        self, q: Any, k: Any, v: Any, bias: None, with_lse: bool, dropout: float, causal: bool, debug: bool,
        *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        assert with_lse
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        laid_out = torch.empty_like(q).copy_(out)
        return laid_out, lse.contiguous() if self.ndim == 3 else lse.contiguous()[..., None], None, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any, bias: None,
        cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float, causal: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        self.calls += 1
        assert lse.ndim == self.ndim
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        layout = tuple((x.shape, x.stride()) for x in (q, k, v))
        built = self.graphs.setdefault((layout, causal), [x.stride() for x in (dout, out, lse)])
        read = [
            torch.as_strided(x, x.shape, strides, x.storage_offset())
            for x, strides in zip((dout, out, lse), built, strict=True)
        ]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            read[0], q, k, v, read[1], read[2].reshape(q.shape[:3]), 0.0, causal, scale=scale
        )
        return [torch.empty_like(like).copy_(grad) for like, grad in zip((q, k, v), grads, strict=True)]


@pytest.fixture
def fresh() -> Iterator[None]:
    kernels._cudnn_statistics_ndim.cache_clear()
    yield
    kernels._cudnn_statistics_ndim.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("ndim", [3, 4])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_cudnns_operators_get_the_layouts_that_they_remember(
    ndim: int, cp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = Cudnn(ndim)
    monkeypatch.setattr(kernels, "aten", operators)
    monkeypatch.setattr(kernels, "block_kernel", lambda *_: "cudnn")
    for lay_out in (by_rows, by_heads, by_rows):
        worst = errors(Case("ring"), cp_size, lay_out, kernel="cudnn")
        assert max(worst.values()) < TOLERANCE[torch.float32], worst
    assert operators.calls == 3 * cp_size * cp_size


@pytest.mark.usefixtures("fresh")
def test_a_layout_that_changes_between_calls_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "aten", Cudnn(4))
    monkeypatch.setattr(kernels, "block_kernel", lambda *_: "cudnn")
    monkeypatch.setattr(kernels, "_strided_like", lambda x, other: x)
    backward = ring.block_backward

    def any_layout(dout: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
        return backward(by_heads(dout) if rest[0].shape[2] == 32 else dout, *rest, **keywords)

    assert max(errors(Case("ring"), 2).values()) < TOLERANCE[torch.float32]
    monkeypatch.setattr(ring, "block_backward", any_layout)
    assert max(errors(Case("ring"), 2).values()) > 100 * TOLERANCE[torch.float32]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _served(kernel: str, head_dim: int) -> None:
    try:
        sdpa.choose_kernel(torch.device("cuda", 0), torch.bfloat16, 8, 2, head_dim, kernel)
    except ValueError as refused:
        pytest.skip(str(refused))


@needs_cuda
@pytest.mark.parametrize("kernel", sdpa.KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_each_kernel_of_the_gpu_gives_the_ring_of_float64(
    kernel: str, head_dim: int, cp_size: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # While one thread compiles the merge, another that calls it takes it for part of what is being traced.
    monkeypatch.setattr("torch._dynamo.config.error_on_nested_fx_trace", False)
    _served(kernel, head_dim)
    case = Case("ring", length=2048, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")
    for lay_out in (by_rows, by_heads):
        worst = errors(case, cp_size, lay_out, kernel=kernel, fused=fused)
        assert max(worst.values()) < TOLERANCE[torch.bfloat16], worst


@needs_cuda
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cp_size", [2, 4])
def test_masks_and_float32_on_the_gpu(cp_size: int, dtype: torch.dtype, mask: str) -> None:
    case = Case("ring", dtype=dtype, device="cuda", **MASKS[mask])
    worst = errors(case, cp_size)
    assert max(worst.values()) < TOLERANCE[dtype], worst
