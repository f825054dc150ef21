"""One process in float32, written without the engine: what every layout has to reproduce.

Attention is a masked softmax over all pairs of tokens, the loss a plain cross-entropy of all logits over the whole
global batch, the optimizer torch's own. Shared with the engine are only the starting weights.
"""

from __future__ import annotations

import functools
import importlib
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM

from ndbench.parallel.initialize import Weights, fill
from ndbench.training.models import build_model, transformers_config
from ndbench.training.schedule import schedule_factors
from tests.parity.cases import Case, batch

NAME = "parity_reference"


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    document_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax over all scores, with everything a query must not see set to -inf."""
    del module, attention_mask, kwargs
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    length = query.shape[2]
    behind = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = (behind >= 0)[None, None]
    if sliding_window is not None:
        seen = seen & (behind < sliding_window)
    if document_ids is not None:
        seen = seen & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def train(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Losses and gradient norms of each step, the first step's gradients, the weights at the end.

    Computed on CPU; ``device`` is the kind whose starting weights are wanted.
    """
    return _train(pickle.dumps(case.one_process()), device)


@functools.cache
def _train(pickled: bytes, device: str) -> dict[str, Any]:
    case: Case = pickle.loads(pickled)
    model, training = build(case, device), case.training
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[training.optimizer]
    options: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    options |= {"betas": tuple(training.betas)} if kind is torch.optim.AdamW else {"momentum": training.momentum}
    optimizer = kind(model.parameters(), foreach=False, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_factors(training))
    result: dict[str, Any] = {"loss": [], "norm": [], "tokens": []}
    for step in range(case.steps):
        data = batch(case, step, 0, 1)
        inputs = {} if data.document_ids is None else {"document_ids": data.document_ids}
        out = model(input_ids=data.input_ids, position_ids=data.position_ids, **inputs)
        logits = out if isinstance(out, torch.Tensor) else out.logits
        loss = F.cross_entropy(logits.flatten(0, 1), data.labels.flatten(), ignore_index=-100)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([g.double().norm() for g in grads.values()]).norm()
        if step == 0:
            result["gradients"] = grads
        if training.max_grad_norm is not None and norm > training.max_grad_norm:
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= training.max_grad_norm / norm
        if training.max_grad_value is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), training.max_grad_value)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        result["loss"].append(loss.item())
        result["norm"].append(norm.item())
        result["tokens"].append(int((data.labels != -100).sum()))
    result["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def build(case: Case, device: str = "cpu") -> nn.Module:
    """transformers' own model (or the user's), with the starting weights of the engine."""
    model: nn.Module
    if case.model.target is not None:
        module, _, name = case.model.target.rpartition(".")
        model = getattr(importlib.import_module(module), name)(**case.model.kwargs)
    else:
        AttentionInterface.register(NAME, attention)
        model = AutoModelForCausalLM.from_config(transformers_config(case.model), attn_implementation=NAME)
    constants = build_model(case.model).constants
    model.to(device)
    fill(model, Weights(case.training.seed, case.model.initializer_range, case.weight_jitter, constants))
    return model.float().cpu()
