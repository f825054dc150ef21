"""What ranks run for the tests of traffic and memory: one more step of the engine, recorded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ndbench.engines.bundled import BundledEngine
from ndbench.measure.collectives import CollectiveRecorder, totals
from ndbench.measure.memory import TrackedMemory
from ndbench.parallel.mesh import build_mesh
from ndbench.parallel.traffic import LlamaShape, StepShape
from tests.parity.cases import Case, batch


def recorded(case: Case, stray: str | None = None) -> dict[str, Any]:
    """Collectives of the second step by (operation, axis); ``stray``: a module after which an all-gather is planted."""
    mesh = build_mesh(case.parallelism, "cpu")
    engine = BundledEngine()
    engine.build(case.model, case.training, mesh, torch.device("cpu"))
    assert engine.model is not None
    engine.step(batch(case, 0, mesh.batch_rank, mesh.batch_size))
    if stray is not None:
        out = torch.empty(dist.get_world_size())
        module = engine.model.get_submodule(stray)
        module.register_forward_hook(lambda *_: dist.all_gather_into_tensor(out, torch.ones(1)))
    recorder = CollectiveRecorder(mesh.axis_of_group, engine.model)
    data = batch(case, 1, mesh.batch_rank, mesh.batch_size)
    with recorder:
        engine.step(data)
    engine.close()
    return {"totals": totals(recorder.table()), "table": recorder.table()}


def tracked(case: Case) -> tuple[int, int]:
    """Bytes of live tensors before the second step (parameters and optimizer state), and at most during it."""
    mesh = build_mesh(case.parallelism, "cpu")
    engine = BundledEngine()
    engine.build(case.model, case.training, mesh, torch.device("cpu"))
    engine.step(batch(case, 0, mesh.batch_rank, mesh.batch_size))
    data = batch(case, 1, mesh.batch_rank, mesh.batch_size)
    memory = TrackedMemory([engine, data])
    with memory:
        before = memory.current
        engine.step(data)
    engine.close()
    return before, memory.peak


def shapes(case: Case) -> tuple[LlamaShape, StepShape]:
    """The case as the closed forms read it."""
    model, training = case.model, case.training
    assert model.hidden_size is not None
    assert model.num_attention_heads is not None
    llama = LlamaShape(
        vocab_size=model.vocab_size or 0,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size or 0,
        num_hidden_layers=model.num_hidden_layers or 0,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads or 0,
        head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
        tie_word_embeddings=model.tie_word_embeddings,
    )
    step = StepShape(
        global_batch_size=training.global_batch_size,
        sequence_length=training.sequence_length,
        micro_batch_size=training.micro_batch_size,
        element_size=2 if training.precision == "bf16" else 4,
        activation_checkpointing=training.activation_checkpointing,
        loss_chunk_size=training.loss_chunk_size,
    )
    return llama, step
