"""What each rank runs in a parity test: build the engine for a layout, take steps, hand back plain numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.engines.bundled import BundledEngine
from ndbench.engines.protocol import Batch
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.mesh import build_mesh


@dataclasses.dataclass
class Case:
    """One model, layout and training configuration, and what to hand back."""

    model: ModelConfig
    parallelism: ParallelismConfig
    training: TrainingConfig
    steps: int = 5
    documents: bool = False
    gradients: bool = False
    """Every parameter's whole gradient of the first step (taken before the steps)."""
    weights: bool = False
    """Every parameter's whole value after the steps."""


def batch(case: Case, step: int, rank: int, ranks: int) -> Batch:
    """Random tokens; each sequence has another number of valid tokens, and some have none at all."""
    training, vocab_size = case.training, case.model.vocab_size
    assert vocab_size is not None
    total, length = training.global_batch_size, training.sequence_length
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab_size, (total, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for index in range(total):
        # The first eighth of the batch has no valid token: at 8 batch ranks the first rank has none.
        masked = length if index < max(1, total // 8) else (index * 37) % (length - 2)
        labels[index, :masked] = -100
    positions = torch.arange(length).repeat(total, 1)
    documents = None
    if case.documents:
        cuts = torch.rand(total, length, generator=generator) < 4 / length
        cuts[:, 0] = False
        documents = cuts.cumsum(1)
        starts = torch.where(cuts, positions, 0).cummax(1).values
        positions = positions - starts
    rows = slice(rank * total // ranks, (rank + 1) * total // ranks)
    return Batch(
        tokens[rows, :-1].contiguous(), labels[rows], positions[rows], None if documents is None else documents[rows]
    )


def train(case: Case) -> dict[str, Any]:
    """Run ``case`` on this rank: losses, norms and tokens of each step, and on rank 0 what else was asked for."""
    mesh = build_mesh(case.parallelism, "cpu")
    engine = BundledEngine(weight_jitter=case.model.initializer_range)
    engine.build(case.model, case.training, mesh, torch.device("cpu"))
    result: dict[str, Any] = {"loss": [], "norm": [], "tokens": []}
    assert engine.model is not None
    if case.gradients:
        assert engine._step is not None
        engine._step.backward(batch(case, 0, mesh.batch_rank, mesh.batch_size))
        result["gradients"] = whole({n: p.grad for n, p in engine.model.named_parameters()})
        engine.model.zero_grad()
    for step in range(case.steps):
        done = engine.step(batch(case, step, mesh.batch_rank, mesh.batch_size))
        result["loss"].append(float(done.loss))
        result["norm"].append(float(done.grad_norm))  # type: ignore[arg-type]
        result["tokens"].append(int(done.tokens))  # type: ignore[arg-type]
    if case.weights:
        result["weights"] = whole(dict(engine.model.named_parameters()))
    engine.close()
    return result


def whole(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None] | None:
    """Global tensors from DTensors by gathering every shard, on rank 0."""
    gathered: dict[str, torch.Tensor | None] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        gathered[name] = None if tensor is None else tensor.detach().clone()
    return gathered if not dist.is_initialized() or dist.get_rank() == 0 else None
