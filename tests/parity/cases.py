"""What a parity test varies, the data it trains on, and the layouts there are."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.engines.protocol import Batch
from ndbench.parallel.config import ParallelismConfig

STD = 0.2
"""Of the starting weights, norms and biases too: at 0.02 most mistakes hide behind the rounding."""


@dataclass(frozen=True)
class Case:
    """One model, layout and training configuration; ``steps`` are taken after the gradients of the first are kept."""

    model: ModelConfig
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    steps: int = 3
    documents: bool = False
    boundaries: tuple[tuple[int, ...], ...] = ()
    """Where documents begin in each sequence (in turn), the first token aside; empty draws them."""
    silent: int = 1
    """The first so many sequences of each global batch have no valid token."""
    weight_jitter: float = STD
    tensors: bool = True
    """Hand back gradients and weights, not only losses and norms."""

    def one_process(self) -> Case:
        """The same numbers without a layout or a technique, in float32: the key of a reference run."""
        plain = {"micro_batch_size": None, "activation_checkpointing": "none", "loss_chunk_size": None}
        training = replace(self.training, precision="fp32", compile=False, **plain)  # type: ignore[arg-type]
        return replace(self, parallelism=ParallelismConfig(), training=training, tensors=True)


def llama(**changes: Any) -> ModelConfig:
    """A small Llama: grouped kv heads and an odd vocabulary."""
    fields: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "initializer_range": STD,
    }
    return ModelConfig(**(fields | changes))


def training(**changes: Any) -> TrainingConfig:
    """SGD without decay at a rate that moves the weights by much more than rounding."""
    fields: dict[str, Any] = {
        "global_batch_size": 8,
        "sequence_length": 32,
        "optimizer": "sgd",
        "weight_decay": 0.0,
        "learning_rate": 0.5,
        "max_grad_norm": 1.0,
    }
    return TrainingConfig(**(fields | changes))


def layout(replicate: int = 1, shard: int = 1, cp: int = 1, tp: int = 1, **options: Any) -> ParallelismConfig:
    return ParallelismConfig(replicate, shard, cp, tp, **options)


def case(parallelism: ParallelismConfig, model: ModelConfig | None = None, **changes: Any) -> Case:
    """A case of ``parallelism`` in which one batch rank has no valid token, when there are several."""
    model = model or llama(num_key_value_heads=8 if parallelism.tp_size == 8 else 4)
    steps = changes.pop("training", training())
    ranks = parallelism.batch_size
    silent = steps.global_batch_size // ranks if ranks > 1 else 1
    return Case(model, parallelism, steps, **({"silent": silent} | changes))


def all_layouts() -> list[ParallelismConfig]:
    """Every combination of degrees in {1, 2, 4, 8} whose product is 2, 4 or 8."""
    degrees = itertools.product((1, 2, 4, 8), repeat=4)
    layouts = [layout(*sizes) for sizes in degrees]
    return sorted((each for each in layouts if each.world_size in (2, 4, 8)), key=lambda each: each.world_size)


HSDP_TP = [
    layout(8),
    layout(1, 8),
    layout(2, 4),
    layout(4, 2),
    layout(1, 4, 1, 2),
    layout(1, 2, 1, 4),
    layout(4, 1, 1, 2),
    layout(2, 2, 1, 2),
]
"""The layouts of the suite of that name at 8 devices."""


def batch(case: Case, step: int, rank: int, ranks: int) -> Batch:
    """Random tokens; sequences have different numbers of valid ones, the first ``silent`` none at all."""
    total, length = case.training.global_batch_size, case.training.sequence_length
    assert case.model.vocab_size is not None
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, case.model.vocab_size, (total, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for index in range(total):
        labels[index, : length if index < case.silent else (index * 37 + step) % (length - 2)] = -100
    positions = torch.arange(length).repeat(total, 1)
    documents = None
    if case.documents:
        starts_here = torch.rand(total, length, generator=generator) < 4 / length
        if case.boundaries:
            starts_here.zero_()
            for index in range(total):
                starts_here[index, list(case.boundaries[index % len(case.boundaries)])] = True
        starts_here[:, 0] = True
        documents = starts_here.cumsum(1)
        positions = positions - torch.where(starts_here, positions, 0).cummax(1).values
    rows = slice(rank * total // ranks, (rank + 1) * total // ranks)
    inputs = tokens[rows, :-1].contiguous()
    return Batch(inputs, labels[rows], positions[rows], None if documents is None else documents[rows])
