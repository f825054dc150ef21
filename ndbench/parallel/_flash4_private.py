"""FlashAttention-4's kernels (package ``flash-attn-4``) as PyTorch operators, for Hopper and Blackwell.

Its public function keeps backward to itself, and the ring hands backward the log-sum-exp of the whole row; so its two
inner functions are called, whose names and keywords may change. PyTorch's own way to them
(``torch.nn.attention.activate_flash_attention_impl``) replaces its flash kernel in the whole process, and each PyTorch
fits some versions of the package only. The package compiles a kernel when it is first called, in about two seconds.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from importlib.metadata import distributions
from typing import Any

import torch

from ndbench.parallel.config import FLASH4_PACKAGE

TRIED_FLASH_ATTN_4 = ("4.0.0b36",)
"""Versions of the package that this file was run with, on Hopper."""

CAPABILITIES = (9, 10)
"""Major compute capabilities that its kernels are written for, forward and backward: Hopper, Blackwell of servers."""
HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = {9: 256, 10: 128}
"""Largest head dim by compute capability; above 128 Blackwell takes some pairs of head dims only."""

_COMPILING = threading.Lock()
"""The first call with arguments of a kind compiles, and two threads that do so at once end the process."""


def installed() -> bool:
    """Whether the package is there; FlashAttention-2 has the same module name, so the distribution is asked for."""
    return next(iter(distributions(name=FLASH4_PACKAGE)), None) is not None


@functools.cache
def import_error() -> str | None:
    """Why its kernels cannot be loaded, in one line; None when they can. Imports the package, which takes seconds."""
    try:
        _functions()
    except Exception as error:  # a compiler with libraries of its own: what can go wrong is not only an ImportError
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def serves(dtype: torch.dtype, head_dim: int, capability: int) -> bool:
    """Whether its kernels take heads of this width and dtype on a device of this major compute capability."""
    return (
        dtype in (torch.float16, torch.bfloat16)
        and capability in CAPABILITIES
        and head_dim % HEAD_DIM_MULTIPLE == 0
        and head_dim <= MAX_HEAD_DIM[capability]
    )


@torch.library.custom_op("ndbench::flash4", mutates_args=())
def flash4(
    q_bshd: torch.Tensor,
    k_bshd: torch.Tensor,
    v_bshd: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention: output [b, s, h, d] and float32 log-sum-exp [b, h, s]; k and v may have fewer heads (GQA).

    A query sees the last ``window`` tokens, itself included; ``softcap`` bounds the scores to ±softcap by tanh.
    """
    with _COMPILING:
        result = _functions().forward(
            q_bshd, k_bshd, v_bshd, softmax_scale=scale, return_lse=True, **_mask(causal, window, softcap)
        )
    out, lse = result[:2]  # newer versions return more
    return out, lse


@torch.library.custom_op("ndbench::flash4_backward", mutates_args=())
def flash4_backward(
    dout_bshd: torch.Tensor,
    q_bshd: torch.Tensor,
    k_bshd: torch.Tensor,
    v_bshd: torch.Tensor,
    out_bshd: torch.Tensor,
    lse_bhs: torch.Tensor,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, [b, s, h, d] each, given output and log-sum-exp of the whole row."""
    with _COMPILING:
        dq, dk, dv = _functions().backward(
            q_bshd, k_bshd, v_bshd, out_bshd, dout_bshd, lse_bhs, softmax_scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_mask(causal, window, softcap),
        )[:3]  # fmt: skip
    return dq, dk, dv


def _mask(causal: bool, window: int | None, softcap: float | None) -> dict[str, Any]:
    """As the package has it: tokens to the left of a query beyond itself, and no cap is zero."""
    left, right = (None, None) if window is None else (window - 1, 0)
    return {"causal": causal, "window_size_left": left, "window_size_right": right, "softcap": softcap or 0.0}


@flash4.register_fake
def _(q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
    batch, tokens, heads, _width = q.shape
    out = q.new_empty(batch, tokens, heads, v.shape[3])
    return out, q.new_empty(batch, heads, tokens, dtype=torch.float32)


@flash4_backward.register_fake
def _(_dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: torch.Tensor | None, _dlse: torch.Tensor | None) -> Any:
    """The log-sum-exp has no gradient: nothing here differentiates it."""
    if dout is None:
        return (None,) * 7
    q, k, v, out, lse = ctx.saved_tensors
    return *flash4_backward(dout, q, k, v, out, lse, *ctx.settings), None, None, None, None


flash4.register_autograd(_differentiate, setup_context=_save)


_MASK = {"softmax_scale", "causal", "window_size_left", "window_size_right", "softcap"}
_KEYWORDS = {"_flash_attn_fwd": _MASK | {"return_lse"}, "_flash_attn_bwd": _MASK | {"deterministic"}}
_TENSORS = {"_flash_attn_fwd": ["q", "k", "v"], "_flash_attn_bwd": ["q", "k", "v", "out", "dout", "lse"]}


class _Functions:
    """Of the package's module; raises ``ImportError`` where they are not those that this file calls."""

    def __init__(self, module: Any) -> None:
        for name, tensors in _TENSORS.items():
            parameters = list(inspect.signature(getattr(module, name)).parameters)
            lacking = sorted(_KEYWORDS[name] - set(parameters))
            if lacking or parameters[: len(tensors)] != tensors:
                what = f"has no {', '.join(lacking)}" if lacking else f"takes {', '.join(parameters[: len(tensors)])}"
                raise ImportError(f"its {name} {what}; tried with {', '.join(TRIED_FLASH_ATTN_4)}")
        self.forward, self.backward = module._flash_attn_fwd, module._flash_attn_bwd


@functools.cache
def _functions() -> _Functions:
    return _Functions(importlib.import_module("flash_attn.cute.interface"))
