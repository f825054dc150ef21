"""Activation checkpointing of transformer blocks: drop activations in forward, compute them again in backward.

``full`` keeps a block's input only; ``selective`` also keeps the outputs of matmuls, attention and collectives, which
are dear to compute again, and recomputes the rest (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models"). Parameter names do not change. It knows nothing of how blocks are sharded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ndbench.parallel.config import CHECKPOINTING_MODES

_KEPT_NAMESPACES = ("_c10d_functional",)
_KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
)


def apply_checkpointing(blocks: list[nn.Module], mode: str) -> None:
    """Make every block recompute by ``mode``; raises ``ValueError`` for a mode that is not known."""
    if mode not in CHECKPOINTING_MODES:
        raise ValueError(f"activation_checkpointing is '{mode}', known are {', '.join(CHECKPOINTING_MODES)}")
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, **options)  # type: ignore[method-assign]


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if isinstance(op, torch._ops.OpOverload):
        name = op._schema.name
        if name in _KEPT or name.startswith(_KEPT_NAMESPACES):
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
