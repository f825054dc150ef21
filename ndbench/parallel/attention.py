"""Our attention function for transformers' attention registry: every layout uses it, a single process too.

It owns causality, sliding windows, packed documents and grouped kv heads, and refuses by name what it does not
implement. It must not know how a model is sharded beyond the cp group that :func:`configure` leaves on each module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ndbench.parallel import masks
from ndbench.parallel._transformers_private import leave_torchao_alone
from ndbench.parallel.context import METHODS, refuse_attention
from ndbench.parallel.kernels import block_kernel
from ndbench.parallel.ring import RingPlan, ring_attention
from ndbench.parallel.sdpa import KERNELS, flash4_attention
from ndbench.parallel.ulysses import ulysses_attention

ATTENTION_NAME = "ndbench"
"""Pass as ``attn_implementation``. It must stay out of transformers' mask registry: no mask is then built for us."""

HARMLESS = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keywords that models hand through and that do not change what attention computes."""

_CONTEXT = "_ndbench_attention"


@dataclass(frozen=True)
class AttentionContext:
    """What the attention function knows about its layer. Shared by copies of a model: groups cannot be copied."""

    group: dist.ProcessGroup | None
    method: str
    sliding: bool
    """The configuration says that this layer has a sliding window, so a call without one is a mistake."""
    kernel: str | None = None
    """What attention without a mask runs on (``sdpa.py``); null: PyTorch's own dispatch, or flash in the ring."""
    fused: bool = False
    """The ring's own arithmetic is compiled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionContext:
        return self


def register() -> None:
    """Make the function known to transformers as ``attn_implementation="ndbench"``; may be called again."""
    leave_torchao_alone()
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, ndbench_attention)


def configure(
    model: torch.nn.Module,
    cp_group: dist.ProcessGroup | None = None,
    method: str = "ring",
    kernel: str | None = None,
    fused: bool = False,
) -> int:
    """Tell every attention layer of ``model`` its cp group (None or one rank: no context parallelism).

    The group is kept on the modules, so that several models with several groups live in one process. To be called
    before the first forward and again to change the group. Returns the number of layers found.

    Raises ``ValueError`` for an unknown method, what :func:`refuse_attention` finds in the model's configuration, or a
    model without causal attention layers.
    """
    if method not in METHODS:
        raise ValueError(f"cp_method is '{method}', known methods are {', '.join(METHODS)}")
    if cp_group is not None and dist.get_world_size(cp_group) == 1:
        cp_group = None
    cp_size = 1 if cp_group is None else dist.get_world_size(cp_group)
    if reasons := refuse_attention(getattr(model, "config", None), cp_size, method):
        raise ValueError(f"{type(model).__name__}: {'; '.join(reasons)}")
    found = 0
    for name, module in model.named_modules():
        # Every class that calls the registry says whether it is causal; layers that are wrapped keep the attribute.
        if not isinstance(getattr(module, "is_causal", None), bool):
            continue
        if not module.is_causal:
            raise ValueError(f"{name} is not causal: only causal attention is implemented")
        sliding = _layer_type(module) == "sliding_attention"
        setattr(module, _CONTEXT, AttentionContext(cp_group, method, sliding, kernel, fused))
        found += 1
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention layer that uses transformers' attention registry")
    return found


def uses_ring(block: torch.nn.Module) -> bool:
    """Whether a layer of ``block`` was configured for the ring, whose result no operator of PyTorch gives."""
    found = (getattr(module, _CONTEXT, None) for module in block.modules())
    return any(each is not None and each.group is not None and each.method == "ring" for each in found)


def attention_kernel(
    device_type: str,
    dtype: torch.dtype,
    cp_size: int,
    method: str,
    kernel: str | None = None,
    *,
    bounded: bool = False,
    documents: bool = False,
) -> str:
    """What a layer's attention runs on, for the record; ``sdpa`` is PyTorch's own dispatch.

    ``bounded``: it has a window shorter than the sequence, or its scores a cap.
    """
    if cp_size > 1 and method == "ring":
        return f"ring:{block_kernel(device_type, dtype, bounded or documents, kernel)}"
    name = "sdpa" if kernel is None or documents or (bounded and kernel != "flash4") else kernel
    return f"ulysses:{name}" if cp_size > 1 else name


def ndbench_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    document_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of ``module``'s layer over the whole sequence, wherever its tokens are.

    query is [b, heads, s, d], key and value [b, kv heads, s, d]; s is the rank's shard of the sequence. A query sees
    the last ``sliding_window`` tokens, itself included, and only tokens with its own id in ``document_ids``:
    [b, sequence] ids of the *whole* sequence in natural order on every rank (pass them to the model's forward, which
    hands them through). ``softcap`` bounds the scores to ±softcap by tanh; the ring has no kernel for it. Returns
    ([b, s, heads, d] contiguous, None).

    Raises ``ValueError`` naming any keyword that changes attention and is not implemented here (sinks, dropout,
    position bias, an explicit mask, a cache; softcap under the ring), and when shapes do not fit together.
    """
    layer = type(module).__name__
    context: AttentionContext | None = getattr(module, _CONTEXT, None)
    if context is None:
        raise ValueError(f"{layer} was not configured: call attention.configure(model, ...) first")
    ring = context.group is not None and context.method == "ring"
    kwargs.update(attention_mask=attention_mask, dropout=dropout, non_causal=is_causal is False)
    kwargs["softcap under cp_method"] = "ring" if ring and softcap is not None else None
    _refuse_keywords(kwargs, layer)
    cp_size = 1 if context.group is None else dist.get_world_size(context.group)
    sequence = query.shape[2] * cp_size
    _check_shapes(query, key, value, document_ids, cp_size)
    if context.sliding and sliding_window is None:
        raise ValueError(f"{layer} has a sliding window but does not pass it to its attention function")
    # A window as long as the sequence hides nothing, and without it blocks need no mask.
    window = sliding_window if sliding_window is not None and sliding_window < sequence else None
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return whole_attention(q, k, v, scale, window, document_ids, softcap, context.kernel)

    if context.group is None:
        out = whole(query, key, value)
    elif ring:
        plan = RingPlan(context.group, scale, window, context.kernel, context.fused)
        out = _ring(query, key, value, plan, document_ids)
    else:
        out = ulysses_attention(query, key, value, context.group, whole)
    return out.transpose(1, 2).contiguous(), None


def whole_attention(
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    scale: float,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    softcap: float | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Causal attention when the whole sequence is here; [b, heads, s, d] in and out.

    ``kernel`` is what it runs on when nothing but causality masks it (``flash4``: or a window, or softcap), else
    PyTorch's own dispatch decides. With ``softcap`` the scores are then stored, s x s of each head: no fused kernel of
    PyTorch has it.
    """
    heads, kv_heads = q_bhsd.shape[1], k_bhsd.shape[1]
    if kernel == "flash4" and documents is None:
        return flash4_attention(q_bhsd, k_bhsd, v_bhsd, scale, window, softcap)
    if window is None and documents is None and softcap is None:
        if kernel is not None:
            return KERNELS[kernel][1](q_bhsd, k_bhsd, v_bhsd, scale)
        return F.scaled_dot_product_attention(
            q_bhsd, k_bhsd, v_bhsd, is_causal=True, scale=scale, enable_gqa=heads != kv_heads
        )
    tokens = torch.arange(q_bhsd.shape[2], device=q_bhsd.device)
    seen = masks.visible(tokens, tokens, window, documents, documents)
    if heads != kv_heads:
        # With a mask and grouped heads at once CUDA would fall back to the kernel that stores all scores.
        k_bhsd, v_bhsd = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k_bhsd, v_bhsd))
    if softcap is None:
        return F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd, attn_mask=seen, scale=scale)
    scores = torch.tanh(q_bhsd @ k_bhsd.transpose(2, 3) * (scale / softcap)) * softcap
    weights = F.softmax(
        scores.masked_fill(~seen, float("-inf")), dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)
    )
    return weights.to(v_bhsd.dtype) @ v_bhsd


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: RingPlan, documents: torch.Tensor | None
) -> torch.Tensor:
    """Point-to-point calls cannot be traced: under torch.compile each ring layer is one graph break."""
    return ring_attention(q, k, v, plan, documents)


def _layer_type(module: torch.nn.Module) -> str | None:
    """``layer_types[layer_idx]`` of the module's transformers configuration, None where there is none."""
    kinds, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return str(kinds[index]) if kinds and isinstance(index, int) and index < len(kinds) else None


def _refuse_keywords(keywords: dict[str, Any], where: str) -> None:
    refused = [
        f"{name}={value}" if isinstance(value, (int, float, str)) else name
        for name, value in keywords.items()
        if name not in HARMLESS and value is not None and value is not False and not (name == "dropout" and value == 0)
    ]
    if refused:
        raise ValueError(f"{where} asks for attention with {', '.join(sorted(refused))}, which is not implemented")


def _check_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor | None, cp_size: int
) -> None:
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{query.shape[2]} queries but {key.shape[2]} keys: only self-attention is implemented")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads are not a multiple of {key.shape[1]} kv heads")
    if cp_size > 1 and value.shape[3] != key.shape[3]:
        raise ValueError(f"context parallelism needs equal head dims, got {key.shape[3]} (k) and {value.shape[3]} (v)")
    whole = (query.shape[0], query.shape[2] * cp_size)
    if documents is not None and tuple(documents.shape) != whole:
        raise ValueError(
            f"document_ids are {list(documents.shape)}, expected {list(whole)}: the ids of the whole sequence "
            f"(cp {cp_size} x {query.shape[2]} local tokens)"
        )
