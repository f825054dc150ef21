"""One block of attention, forward and backward, with the log-sum-exp that lets blocks be merged.

The public ``scaled_dot_product_attention`` keeps the log-sum-exp to itself, so the ring calls the ATen operators below
it. All use of them is in this file. Tried on torch 2.13 (CPU); the signatures are the same in 2.11, 2.12 and 2.13.

========  ===============================  ============================================================
device    block                            operator
========  ===============================  ============================================================
CPU       any                              ``_scaled_dot_product_flash_attention_for_cpu`` (takes GQA and a float mask)
CUDA      fp16/bf16, no mask, ``flash4``   FlashAttention-4's own (takes GQA), ``_flash4_private.py``
CUDA      fp16/bf16, no mask, ``cudnn``    ``_scaled_dot_product_cudnn_attention`` (takes GQA)
CUDA      fp16/bf16, no mask, otherwise    ``_scaled_dot_product_flash_attention`` (takes GQA, has no mask)
CUDA      fp32, or with a mask             ``_scaled_dot_product_efficient_attention`` (neither: kv heads are repeated)
========  ===============================  ============================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ndbench.parallel._flash4_private import flash4, flash4_backward

aten = torch.ops.aten

HEAD_DIM_MULTIPLE = 8
"""CUDA kernels want head dims that are a multiple of this; others are padded with zeros, which changes no score."""
LSE_MULTIPLE = 32
"""The efficient kernel's backward reads a log-sum-exp whose rows are padded to a multiple of this."""
BIAS_MULTIPLE = 16
"""... and a bias whose rows start at multiples of this many elements."""


def block_kernel(device_type: str, dtype: torch.dtype, masked: bool, asked: str | None = None) -> str:
    """The kernel of a block, for the record: ``flash_cpu``, ``flash4``, ``cudnn``, ``flash`` or ``efficient``.

    ``asked`` is what :func:`ndbench.parallel.sdpa.choose_kernel` found for such heads: it serves blocks without a mask.
    """
    if device_type == "cpu":
        return "flash_cpu"
    if device_type != "cuda":
        raise ValueError(f"ring attention has no kernel for device '{device_type}': it runs on cpu and cuda")
    if masked or dtype not in (torch.float16, torch.bfloat16):
        return "efficient"
    return asked or "flash"


def block_forward(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    asked: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a block of queries over a block of keys: output [b, h, s, d] and log-sum-exp [b, h, s].

    k and v may have fewer heads than q (GQA). ``mask`` is additive, [b or 1, 1, queries, keys], in q's dtype;
    ``causal`` masks by local index and needs as many queries as keys; ``asked`` as for :func:`block_kernel`. The
    log-sum-exp is float32 (float64 for float64).
    """
    # An empty block kills the process inside the CPU kernel (SIGFPE) instead of raising.
    assert min(q_bhsd.shape[2], k_bhsd.shape[2]) > 0, "empty attention block"
    q, k, v = (_rows_contiguous(x) for x in (q_bhsd, k_bhsd, v_bhsd))
    kernel = _kernel(q, k, mask, asked)
    if kernel == "flash_cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    if kernel == "flash4":
        out, lse = flash4(*(x.transpose(1, 2) for x in (q, k, v)), scale, causal)
        return out.transpose(1, 2), lse
    if kernel == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        return out, lse.reshape(q.shape[:3])
    head_dim = q.shape[3]
    q, k, v = (_pad_head_dim(x) for x in (q, k, v))
    if kernel == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    else:
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
        out, lse = aten._scaled_dot_product_efficient_attention(
            q, k, v, _aligned_bias(mask, q, k), True, 0.0, causal, scale=scale
        )[:2]
        lse = lse[:, :, : q.shape[2]]
    return out[..., :head_dim], lse


def block_backward(
    dout_bhsd: torch.Tensor,
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    out_bhsd: torch.Tensor,
    lse_bhs: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    asked: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a block's q, k and v, given output and log-sum-exp *of the whole row*, merged over all blocks.

    With these, exp(score - lse) is the block's part of the row's softmax, so the gradients of all blocks add up to
    those of the whole (FlashAttention, arXiv:2205.14135, algorithm 4). dk and dv have k's number of heads.
    """
    dout, q, k, v, out = (_rows_contiguous(x) for x in (dout_bhsd, q_bhsd, k_bhsd, v_bhsd, out_bhsd))
    kernel = _kernel(q, k, mask, asked)
    if kernel == "flash_cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse_bhs, 0.0, causal, attn_mask=mask, scale=scale
        )
        return dq, dk, dv
    if kernel == "flash4":
        laid_out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        dq, dk, dv = flash4_backward(*laid_out, lse_bhs.contiguous(), scale, causal)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    # Dropout is off, so the random state is never read; it must only be there.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    if kernel == "cudnn":
        # PyTorch keeps a compiled graph for each layout of q, k and v, and with it the strides that out, dout and the
        # log-sum-exp had in the *first* such call; others are read wrongly, in silence. So they always follow q.
        dout, out, lse = _strided_like(dout, q), _strided_like(out, q), lse_bhs.contiguous()
        lse = lse if _cudnn_statistics_ndim(q.device) == 3 else lse[..., None]
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
        )
        return dq, dk, dv
    head_dim, kv_heads = q.shape[3], k.shape[1]
    dout, q, k, v, out = (_pad_head_dim(x) for x in (dout, q, k, v, out))
    if kernel == "flash":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse_bhs.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset,
            scale=scale,
        )  # fmt: skip
    else:
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
        # This backward takes its output for dense in [b, s, h, d], whatever its strides say.
        out = by_rows(out)
        rows = lse_bhs.shape[2]
        lse = F.pad(lse_bhs, (0, -rows % LSE_MULTIPLE), value=float("inf"))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, _aligned_bias(mask, q, k), out, lse, seed, offset, 0.0, [True, True, True, False], causal,
            scale=scale,
        )  # fmt: skip
        dk, dv = (_sum_repeated_heads(x, kv_heads) for x in (dk, dv))
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim]


def merge_into(out_bhsd: torch.Tensor, lse_bhs: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Make output and log-sum-exp those of the union of two disjoint sets of keys, in place.

    Each output is a softmax average over its own keys; the block's weight in the union is exp(block_lse - lse_union) =
    sigmoid(block_lse - lse). Computed in the dtype of the log-sum-exp, rounded once to that of the output.
    """
    weight = torch.sigmoid(block_lse - lse_bhs)[..., None]
    out_bhsd.copy_(torch.lerp(out_bhsd.to(weight.dtype), block_out.to(weight.dtype), weight))
    lse_bhs.copy_(torch.logaddexp(lse_bhs, block_lse))


@functools.cache
def fused_merge_into() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """:func:`merge_into` compiled: each element of the output is read and written once."""
    return torch.compile(merge_into, dynamic=False)


def by_rows(x_bhsd: torch.Tensor) -> torch.Tensor:
    """``x`` dense in memory as [b, s, h, d], which is how projections write and read it; itself when it is."""
    return x_bhsd.transpose(1, 2).contiguous().transpose(1, 2)


def _kernel(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, asked: str | None) -> str:
    # cuDNN does not take a single key.
    return block_kernel(q.device.type, q.dtype, mask is not None, None if k.shape[2] == 1 else asked)


def _strided_like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``x`` with the strides of ``other``, which has its shape; those of dims of size 1 mean nothing."""
    if all(size == 1 or mine == want for size, mine, want in zip(x.shape, x.stride(), other.stride(), strict=True)):
        return x
    return torch.empty_strided(x.shape, other.stride(), dtype=x.dtype, device=x.device).copy_(x)


@functools.cache
def _cudnn_statistics_ndim(device: torch.device) -> int:
    """Whether this PyTorch gives and takes cuDNN's log-sum-exp as [b, h, s] or [b, h, s, 1]: versions differ."""
    q = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    lse: torch.Tensor = aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, False, False)[1]
    return lse.ndim


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """A query strided in its last dim is silently wrong in the CPU kernel and refused by the CUDA ones."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _pad_head_dim(x: torch.Tensor) -> torch.Tensor:
    missing = -x.shape[-1] % HEAD_DIM_MULTIPLE
    return F.pad(x, (0, missing)) if missing else x


def _repeat_heads(x_bhsd: torch.Tensor, heads: int) -> torch.Tensor:
    return x_bhsd if x_bhsd.shape[1] == heads else x_bhsd.repeat_interleave(heads // x_bhsd.shape[1], dim=1)


def _sum_repeated_heads(x_bhsd: torch.Tensor, kv_heads: int) -> torch.Tensor:
    return x_bhsd if x_bhsd.shape[1] == kv_heads else torch.stack(x_bhsd.chunk(kv_heads, dim=1)).sum(2).movedim(0, 1)


def _aligned_bias(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """``mask`` expanded to [b, h, queries, keys] without copying heads, its rows aligned."""
    if mask is None:
        return None
    keys = k.shape[2]
    if keys % BIAS_MULTIPLE:
        mask = F.pad(mask, (0, -keys % BIAS_MULTIPLE))[..., :keys]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], keys)
