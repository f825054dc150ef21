"""CUDA kernels for plain causal attention, called by name instead of left to PyTorch's dispatch.

So the record names the kernel that ran, and torch.compile's caches tell them apart, which they do not of the dispatch.
Layers whose whole sequence is on the rank use it, without documents and, but for FlashAttention-4, without a window or
a cap of the scores; the ring's blocks are in ``kernels.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from ndbench.parallel import _flash4_private
from ndbench.parallel.config import ATTENTION_KERNELS, FLASH4_PACKAGE

logger = logging.getLogger(__name__)

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(q [b, heads, s, d], k, v [b, kv heads, s, d], scale) -> [b, heads, s, d]."""


def flash4_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """A ``Call`` of FlashAttention-4's kernels, which also take a sliding window and a cap of the scores."""
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out: torch.Tensor = _flash4_private.flash4(*rows, scale, True, window, softcap)[0]
    return out.transpose(1, 2)


def _can_use_flash4(call: SDPAParams) -> bool:
    query = call.query
    capability = torch.cuda.get_device_capability(query.device)[0]
    if torch.version.hip is not None or not _flash4_private.installed():
        return False
    if not _flash4_private.serves(query.dtype, query.shape[3], capability):
        return False
    if (error := _flash4_private.import_error()) is not None:
        logger.warning("%s is installed and cannot be loaded: %s", FLASH4_PACKAGE, error)
    return error is None


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )[0]
    return out


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[0]
    return out


KERNELS: dict[str, tuple[Callable[[SDPAParams], bool], Call]] = {
    "flash4": (_can_use_flash4, flash4_attention),
    "cudnn": (can_use_cudnn_attention, _cudnn),
    "flash": (can_use_flash_attention, _flash),
}
"""Name -> whether it can serve a call, and the call; the fastest on Hopper first."""
assert tuple(KERNELS) == ATTENTION_KERNELS, "config.py names them without importing torch"

HEAD_DIM_MULTIPLE = 8
"""PyTorch pads other head dims before it calls a kernel."""


def choose_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, asked: str | None = None
) -> str | None:
    """The kernel for layers of these heads: ``asked``, else the first of ``KERNELS`` from Hopper on, else flash.

    FlashAttention-4, where it is installed, and cuDNN use the matrix units of Hopper and Blackwell; PyTorch's flash is
    written for Ampere's. Null: none serves, PyTorch decides. Raises ``ValueError`` when ``asked`` is not known or
    cannot serve such layers here.
    """
    if asked is not None and asked not in KERNELS:
        raise ValueError(f"attention kernel '{asked}' is not known; known: {', '.join(KERNELS)}")
    usable = [name for name in KERNELS if _serves(name, device, dtype, heads, kv_heads, head_dim)]
    if asked is not None:
        if asked not in usable:
            shape = f"{heads} heads, {kv_heads} kv heads, head dim {head_dim}, {dtype} on {device.type}"
            raise ValueError(f"attention kernel '{asked}' cannot serve {shape}")
        return asked
    if not usable:
        return None
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    return usable[0] if hopper else usable[-1]


def _serves(name: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    if device.type != "cuda" or head_dim % HEAD_DIM_MULTIPLE:
        return False
    tokens = 128
    q, k = (
        torch.empty(1, count, tokens, head_dim, device=device, dtype=dtype, requires_grad=True)
        for count in (heads, kv_heads)
    )
    return KERNELS[name][0](SDPAParams(q, k, k, None, 0.0, True, heads != kv_heads))
