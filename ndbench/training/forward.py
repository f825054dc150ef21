"""From a micro-batch to the summed loss of this rank, as one method of the model that FSDP knows as a forward.

Without chunks the model's own forward makes the logits, whatever the family does to them. With chunks, the output head
is called here, so what a family does to its logits must be known by name.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from ndbench.parallel.collectives import Group, enter_replicated, gather_sequence
from ndbench.parallel.mesh import Mesh
from ndbench.parallel.plan import TensorPlan
from ndbench.parallel.tensor import local_parameter
from ndbench.training.loss import CrossEntropy, Transform, Upstream, chunked_loss_sum

PLAIN_LOGITS = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gpt_neox", "olmo2", "gemma"}
)
"""Model types whose logits are the output head's."""


def chunk_refusals(model: nn.Module) -> list[str]:
    """Why the loss of ``model`` cannot be chunked; empty when it can."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in PLAIN_LOGITS or kind in LOGIT_TRANSFORMS:
        return []
    known = ", ".join(sorted(PLAIN_LOGITS | LOGIT_TRANSFORMS.keys()))
    return [f"loss_chunk_size: what model type '{kind}' does to its logits is not known; known: {known}"]


def _softcapped(config: Any) -> Transform:
    cap = config.final_logit_softcapping
    return (lambda x: x) if cap is None else lambda x: torch.tanh(x / cap) * cap


def _multiplied(config: Any) -> Transform:
    return lambda x: x * config.logit_scale


def _divided(config: Any) -> Transform:
    return lambda x: x / config.logits_scaling


LOGIT_TRANSFORMS: dict[str, Callable[[Any], Transform]] = {
    "cohere": _multiplied,
    "gemma2": _softcapped,
    "gemma3_text": _softcapped,
    "granite": _divided,
}
"""Model type -> what its forward does to the head's output."""


def attach_loss(
    model: nn.Module,
    mesh: Mesh,
    plan: TensorPlan | None,
    vocab_size: int | None,
    chunk_size: int | None,
    computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    compiled: bool = False,
) -> Callable[..., torch.Tensor]:
    """Give ``model`` a method ``loss_sum(labels, upstream, input_ids, position_ids, document_ids)`` and return it.

    All arguments are this rank's shard of the sequence, but for the document ids, which are whole. The forward runs
    inside ``computing``; with ``compiled`` the passes over the logits are fused.
    """
    tp = Group(mesh.tp.get_group()) if mesh.tp.size() > 1 else None
    loss = CrossEntropy(compiled=compiled)
    if tp is not None and plan is not None and plan.head is not None:
        assert vocab_size is not None, "a transformers model has a vocabulary"
        loss = CrossEntropy(tp, vocab_size, compiled)
    enter = None
    if tp is not None and plan is not None:
        gather = gather_sequence if plan.sequence_parallel else enter_replicated
        enter = lambda hidden: gather(hidden, tp)  # noqa: E731

    def whole(self: nn.Module, labels: torch.Tensor, upstream: Upstream | None = None, **inputs: Any) -> torch.Tensor:
        with computing():
            out = self.forward(**inputs)
            logits = out if isinstance(out, torch.Tensor) else out.logits
            return loss(logits.flatten(0, 1), labels.flatten(), upstream)

    def chunked(self: nn.Module, labels: torch.Tensor, upstream: Upstream | None = None, **inputs: Any) -> torch.Tensor:
        assert chunk_size is not None
        with computing():
            hidden = self.base_model(**inputs).last_hidden_state  # type: ignore[operator]
            if enter is not None:
                hidden = enter(hidden)
            summed: torch.Tensor = head.loss_sum(hidden.flatten(0, 1), labels.flatten(), upstream)
            return summed

    def of_head(
        self: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, upstream: Upstream | None = None
    ) -> torch.Tensor:
        assert chunk_size is not None
        weight, bias = local_parameter(self, "weight"), None if self.bias is None else local_parameter(self, "bias")
        return chunked_loss_sum(hidden, weight, bias, labels, loss, transform, chunk_size, upstream)

    if chunk_size is not None:
        kind = str(model.config.model_type)  # type: ignore[union-attr]
        transform = LOGIT_TRANSFORMS[kind](model.config) if kind in LOGIT_TRANSFORMS else None
        head = model.get_output_embeddings()  # type: ignore[operator]
        # The head may be gathered by itself, which FSDP does for its methods that it knows as forwards.
        head.loss_sum = types.MethodType(of_head, head)
        register_fsdp_forward_method(head, "loss_sum")
    model.loss_sum = types.MethodType(whole if chunk_size is None else chunked, model)  # type: ignore[assignment]
    register_fsdp_forward_method(model, "loss_sum")
    return model.loss_sum  # type: ignore[return-value]
