"""What ranks run in the model tests of context parallelism: one step of a small model against one process.

The reference is transformers' eager attention on the whole batch; parameters have a standard deviation of 0.2, so that
attention matters to every gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ndbench.measure.collectives import CollectiveRecorder, totals
from ndbench.parallel import attention
from ndbench.parallel.checkpointing import apply_checkpointing
from ndbench.parallel.context import shard_sequence
from tests.context.cases import document_ids, planted

VOCABULARY = 97


@dataclass(frozen=True)
class ModelCase:
    """One step of a two-layer model on two sequences."""

    method: str
    model_type: str = "llama"
    extra: dict[str, Any] = field(default_factory=dict)
    documents: tuple[tuple[int, ...], ...] | None = None
    checkpointing: str = "none"
    compiled: bool = False
    length: int = 64
    fault: str | None = None


@dataclass(frozen=True)
class Step:
    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]


def model_errors(case: ModelCase) -> dict[str, float]:
    """Relative error of loss, gradient norm, and of the worst parameter's gradient (||a - e|| / ||e||)."""
    expected, actual = whole_step(case), sharded_step(case)
    worst = max(
        ((actual.gradients[name] - e).norm() / e.norm()).item() for name, e in expected.gradients.items() if e.any()
    )
    return {
        "loss": abs(actual.loss - expected.loss) / abs(expected.loss),
        "norm": abs(actual.norm - expected.norm) / expected.norm,
        "gradients": worst,
    }


def whole_step(case: ModelCase) -> Step:
    """The step in one process. transformers masks packed documents where position ids restart."""
    model = _model(case, "eager")
    ids, labels, position_ids, _ = _batch(case)
    loss = _loss_sum(model(input_ids=ids, position_ids=position_ids, use_cache=False).logits, labels)
    (loss / (labels >= 0).sum()).backward()
    return _step(model, loss / (labels >= 0).sum())


def sharded_step(case: ModelCase) -> Step:
    """The step over all ranks as one cp group: everything that follows the tokens is sharded, document ids are not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = _model(case, attention.ATTENTION_NAME)
    attention.configure(model, dist.group.WORLD, case.method)
    apply_checkpointing(list(model.model.layers), case.checkpointing)
    if case.compiled:
        torch._dynamo.reset()
        for block in model.model.layers:
            # Only the ring may break the graph: point-to-point calls cannot be traced.
            block.compile(backend="aot_eager", fullgraph=case.method == "ulysses")
    ids, labels, position_ids, documents = _batch(case)
    valid = (labels >= 0).sum()
    shard = functools.partial(shard_sequence, cp_size=size, cp_rank=rank, method=case.method)
    mine, my_labels, my_positions = shard(ids), shard(labels), shard(position_ids)
    if case.fault == "rope_positions_not_permuted":
        my_positions = position_ids[:, rank * mine.shape[1] : (rank + 1) * mine.shape[1]]
    if case.fault == "labels_not_permuted":
        my_labels = labels[:, rank * mine.shape[1] : (rank + 1) * mine.shape[1]]
    extra = {"document_ids": documents} if documents is not None else {}
    with planted(case.fault if case.fault and "permuted" not in case.fault else None):
        logits = model(input_ids=mine, position_ids=my_positions, use_cache=False, **extra).logits
        loss = _loss_sum(logits, my_labels) / valid
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    return _step(model, total)


def messages(case: ModelCase) -> dict[str, int]:
    """Messages of attention in forward, backward and recomputation of one step, by operation."""
    with CollectiveRecorder({dist.group.WORLD.group_name: "cp"}) as recorder:
        sharded_step(case)
    counts = totals(recorder.table())
    return {op: count for (op, _), (count, _) in counts.items() if op in ("send", "all_to_all")}


def _model(case: ModelCase, implementation: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.model_type, **{**shape, **case.extra})
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32).train()


def _batch(case: ModelCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, case.length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    # The first quarter bears no loss, as a masked prompt would: ranks hold unequal numbers of valid tokens.
    labels[:, : case.length // 4] = -100
    documents = document_ids(case.documents)
    position_ids = torch.arange(case.length).expand(2, -1).clone()
    if case.documents is not None:
        position_ids = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in case.documents])
    return ids[:, :-1], labels, position_ids, documents


def _loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def _step(model: torch.nn.Module, loss: torch.Tensor) -> Step:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return Step(loss.item(), norm.item(), gradients)
