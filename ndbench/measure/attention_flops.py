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
    if hasattr(torch.ops, "ndbench") and hasattr(torch.ops.ndbench, "flash4"):
        found[torch.ops.ndbench.flash4] = _of_rows(forward_flops)
        found[torch.ops.ndbench.flash4_backward] = _of_rows(backward_flops)
    return found


def _of_rows(formula: Callable[..., int]) -> Callable[..., int]:
    """``formula`` for an operator that takes [batch, tokens, heads, width]."""

    def transposed(*args: Any, **_: Any) -> int:
        return formula(*((*x[:1], x[2], x[1], *x[3:]) if isinstance(x, tuple) else x for x in args[:4]))

    return transposed
