"""Blocks of attention: merging them, and their gradients, give back attention over all keys."""

from __future__ import annotations

import pytest
import torch

from ndbench.parallel import masks
from ndbench.parallel.kernels import block_backward, block_forward, block_kernel, merge_into

SCALE = 0.3
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}
ON_DEVICE = [("cpu", dtype) for dtype in TOLERANCE]
if torch.cuda.is_available():
    ON_DEVICE += [("cuda", torch.float32), ("cuda", torch.bfloat16)]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def _full(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * SCALE
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


@pytest.mark.parametrize(("device", "dtype"), ON_DEVICE, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [16, 20])
def test_merged_blocks_equal_attention_over_all_keys(
    device: str, dtype: torch.dtype, kv_heads: int, masked: bool, head_dim: int
) -> None:
    torch.manual_seed(0)
    q, dout = (torch.randn(2, 4, 12, head_dim).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, 20, head_dim).to(device, dtype) for _ in range(2))
    # Query 3 sees no key of the first block, query 5 none of the second: neither may poison the merge.
    seen = torch.rand(2, 1, 12, 20) > 0.3
    seen[:, :, 3, :8], seen[:, :, 5, 8:], seen[:, :, :, [0, 19]] = False, False, True
    seen[:, :, 3, 0], seen[:, :, 5, 19] = False, False
    seen[:, :, 3, 10] = True
    mask = masks.additive(seen.to(device), dtype) if masked else None
    parts = [slice(0, 8), slice(8, 20)]

    def mask_of(part: slice) -> torch.Tensor | None:
        return None if mask is None else mask[..., part].contiguous()

    blocks = [
        block_forward(q, k[:, :, part], v[:, :, part], causal=False, mask=mask_of(part), scale=SCALE) for part in parts
    ]
    out, lse = blocks[0][0].to(lse_dtype := blocks[0][1].dtype), blocks[0][1].clone()
    merge_into(out, lse, *blocks[1])
    grads = [
        block_backward(
            dout, q, k[:, :, part], v[:, :, part], out.to(dtype), lse, causal=False, mask=mask_of(part), scale=SCALE
        )
        for part in parts
    ]
    # The merged output of a ring may lie in memory in either order; the gradients must not depend on it.
    other = block_backward(
        dout, q, k[:, :, parts[0]], v[:, :, parts[0]], out.to(dtype).contiguous(), lse, causal=False,
        mask=mask_of(parts[0]), scale=SCALE,
    )  # fmt: skip
    assert all(_error(a, b.double()) < TOLERANCE[dtype] for a, b in zip(other, grads[0], strict=True))
    assert lse.dtype == lse_dtype == torch.promote_types(dtype, torch.float32)

    wide = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = _full(*wide, None if mask is None else mask.double())
    expected.backward(dout.double())
    actual = [
        grads[0][0].double() + grads[1][0].double(),
        torch.cat([grads[0][1], grads[1][1]], 2),
        torch.cat([grads[0][2], grads[1][2]], 2),
    ]
    assert _error(out, expected) < TOLERANCE[dtype]
    assert _error(lse, expected_lse) < TOLERANCE[dtype]
    for gradient, reference in zip(actual, wide, strict=True):
        assert reference.grad is not None
        assert _error(gradient, reference.grad) < TOLERANCE[dtype]


def test_a_query_that_is_strided_in_its_last_dim_gives_the_same_result() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    strided = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert strided.stride(-1) != 1
    expected = block_forward(q, k, v, causal=True, mask=None, scale=SCALE)
    actual = block_forward(strided, k, v, causal=True, mask=None, scale=SCALE)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_an_empty_block_is_an_error_and_not_a_dead_process() -> None:
    q, k = torch.randn(1, 2, 0, 16), torch.randn(1, 2, 4, 16)
    with pytest.raises(AssertionError, match="empty"):
        block_forward(q, k, k, causal=False, mask=None, scale=SCALE)


def test_the_kernel_of_a_block_is_known_without_running_it() -> None:
    assert block_kernel("cpu", torch.float32, True) == "flash_cpu"
    assert block_kernel("cuda", torch.bfloat16, False) == "flash"
    assert block_kernel("cuda", torch.bfloat16, False, "cudnn") == "cudnn"
    assert block_kernel("cuda", torch.bfloat16, True, "cudnn") == "efficient"
    assert block_kernel("cuda", torch.float32, False, "cudnn") == "efficient"
    assert block_kernel("cuda", torch.bfloat16, True) == "efficient"
    assert block_kernel("cuda", torch.float32, False) == "efficient"
    with pytest.raises(ValueError, match="mps"):
        block_kernel("mps", torch.float32, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_masks_hide_without_infinities_in_any_base(dtype: torch.dtype) -> None:
    hidden = masks.additive(torch.tensor([[False, True]]), dtype)
    assert torch.isfinite(hidden * 1.4427).all()
    assert hidden.tolist()[0][1] == 0.0
    assert torch.exp(hidden.float() - 100.0)[0, 0] == 0.0


def test_a_query_sees_its_window_and_its_document_only() -> None:
    tokens, documents = torch.arange(12), torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    seen = masks.visible(tokens, tokens, 4, documents, documents)
    for batch in range(2):
        for q in range(12):
            for k in range(12):
                expected = k <= q and q - k < 4 and bool(documents[batch, q] == documents[batch, k])
                assert bool(seen[batch, 0, q, k]) == expected
