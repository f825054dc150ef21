"""Activation checkpointing of transformer blocks: drop activations in forward, compute them again in backward.

``full`` keeps a block's input only; ``selective`` also keeps the outputs of matmuls, attention and collectives, which
are dear to compute again, and recomputes the rest (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models"); ``attention`` keeps the input and what attention kernels gave, output and log-sum-exp, which are
small and the dearest of all in long sequences. Parameter names do not change. Of how blocks are sharded it asks one
thing: whether attention is the ring, which keeps its merged result itself (``kept.py``). Where kept tensors wait until
backward is up to whoever passes a way to ``pack`` them.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ndbench.parallel import kept
from ndbench.parallel.attention import uses_ring
from ndbench.parallel.config import CHECKPOINTING_MODES

_COLLECTIVES = ("_c10d_functional",)
_MATMULS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
)
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
    "ndbench::flash4",
)


def apply_checkpointing(blocks: list[nn.Module], mode: str, pack: Any = None, unpack: Any = None) -> None:
    """Make every block recompute by ``mode``; raises ``ValueError`` for a mode that is not known.

    ``pack`` and ``unpack`` (of ``kept.contexts``) get what attention gave, where autograd does not save it: that has
    hooks of its own.
    """
    if mode not in CHECKPOINTING_MODES:
        raise ValueError(f"activation_checkpointing is '{mode}', known are {', '.join(CHECKPOINTING_MODES)}")
    if mode == "none":
        return
    for block in blocks:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        through = () if pack is None else (pack, unpack)
        if mode == "attention" and uses_ring(block):
            # Its kernels' outputs are one for each rank that the keys came from: larger than what they are merged into.
            options["context_fn"] = functools.partial(kept.contexts, *through)
        elif mode == "attention" and through:
            options["context_fn"] = functools.partial(_keeping_operators, *through)
        elif mode in _POLICIES:
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _POLICIES[mode])
        block.forward = functools.partial(checkpoint, block.forward, **options)  # type: ignore[method-assign]


def compiles_inside(block: nn.Module, mode: str) -> bool:
    """Whether ``block`` is to be compiled before :func:`apply_checkpointing`, and not with what that makes of it.

    Not under ``selective``: what it keeps are operators, and compiled code does not show them.
    """
    return mode in ("full", "attention") and uses_ring(block)


class _KeptOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside of ``side``: attention's operators hand over what they gave instead of running again."""

    def __init__(self, side: AbstractContextManager[None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._side = side

    def __enter__(self) -> _KeptOperators:
        self._side.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._side.__exit__(*exception)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _name(op) not in _ATTENTION:
            return op(*args, **(kwargs or {}))
        results = kept.recalled()
        if results is None:
            results = op(*args, **(kwargs or {}))
            kept.keep(*results)
        return results


def _keeping_operators(pack: Any, unpack: Any) -> tuple[Any, Any]:
    """PyTorch's own cache of what operators gave has no hooks, but a graph that is traced saves it in autograd."""
    if get_proxy_mode() is not None:
        return create_selective_checkpoint_contexts(_attention)  # type: ignore[no-any-return, no-untyped-call]
    forward, again = kept.contexts(pack, unpack)
    return _KeptOperators(forward), _KeptOperators(again)


def _selective(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = _name(op)
    return _kept_if(name in _MATMULS or name in _ATTENTION or name.startswith(_COLLECTIVES))


def _attention(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return _kept_if(_name(op) in _ATTENTION)


def _name(op: Any) -> str:
    return op._schema.name if isinstance(op, torch._ops.OpOverload) else ""


def _kept_if(dear: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


_POLICIES = {"selective": _selective, "attention": _attention}
