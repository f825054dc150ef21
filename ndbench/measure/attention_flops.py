"""FLOP formulas of attention kernels for torch's FlopCounterMode, which lacks the CPU kernel and, up to torch 2.11,
refuses keys with fewer heads than queries.

Counted as torch does: the whole score matrix, two matmuls forward, five backward (the kernel recomputes the scores).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shape = tuple[int, ...]


def forward_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """``query`` [batch, heads, queries, width], ``key`` and ``value`` [batch, kv heads, keys, width]."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def backward_flops(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores again, then the gradients of value, scores, query and key."""
    del gradient
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (3 * width + 2 * value[3])


def attention_formulas() -> dict[Any, Callable[..., int]]:
    """Operator -> formula, as FlopCounterMode's ``custom_mapping`` takes it; only operators this torch has."""
    import torch

    kernels = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    found: dict[Any, Callable[..., int]] = {}
    for kernel in kernels:
        for suffix, formula in (("", forward_flops), ("_backward", backward_flops)):
            name = f"_scaled_dot_product_{kernel}{suffix}"
            if hasattr(torch.ops.aten, name):
                found[getattr(torch.ops.aten, name)] = formula
    return found
