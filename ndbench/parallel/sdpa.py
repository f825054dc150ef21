"""Which kernel PyTorch's scaled_dot_product_attention runs on, made explicit and known for the record.

The order of preference is set for a forward and its backward; PyTorch takes the first kernel that can serve a call.
A layer whose whole sequence is on the rank goes through it (``attention.py``); the ring does not (``kernels.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from ndbench.parallel.config import ATTENTION_KERNELS

KERNELS = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, can_use_cudnn_attention),
    "flash": (SDPBackend.FLASH_ATTENTION, can_use_flash_attention),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, can_use_efficient_attention),
}
"""Name -> PyTorch's name for it, and whether it can serve a call; ``math``, which stores all scores, always can."""
assert tuple(KERNELS) == ATTENTION_KERNELS, "config.py names them without importing torch"

_ORDER = ("flash", "efficient", "cudnn")
_ORDER_FROM_HOPPER = ("cudnn", "flash", "efficient")
"""cuDNN has kernels for the matrix units of Hopper and Blackwell; PyTorch's flash is written for Ampere's."""


def kernel_order(device: torch.device, first: str | None = None) -> tuple[str, ...]:
    """Names in :data:`KERNELS`, the preferred one first, ``first`` before all; empty where there is no choice (CPU).

    Raises ``ValueError`` for a name that is not known.
    """
    if first is not None and first not in KERNELS:
        raise ValueError(f"attention kernel '{first}' is not known; known: {', '.join(KERNELS)}")
    if device.type != "cuda":
        return ()
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    order = _ORDER_FROM_HOPPER if hopper else _ORDER
    return order if first is None else (first, *(name for name in order if name != first))


def preferring(order: tuple[str, ...]) -> AbstractContextManager[None]:
    """Inside, calls run on the first kernel of ``order`` that can serve them."""
    if not order:
        return nullcontext()
    kinds = [KERNELS[name][0] for name in order]
    return sdpa_kernel([*kinds, SDPBackend.MATH], set_priority=True)  # type: ignore[no-any-return]


def chosen_kernel(
    order: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    masked: bool = False,
) -> str:
    """The kernel of ``order`` that a training call with these heads runs on, else ``math``."""
    tokens = 128
    q = torch.empty(1, heads, tokens, head_dim, device=device, dtype=dtype, requires_grad=True)
    k = torch.empty(1, heads if masked else kv_heads, tokens, head_dim, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(tokens, tokens, device=device, dtype=torch.bool) if masked else None
    call = SDPAParams(q, k, k, mask, 0.0, not masked, k.shape[1] != heads)
    return next((name for name in order if KERNELS[name][1](call)), "math")
