"""On GPUs: steps replayed from a CUDA graph have the numbers of steps that the host queues one kernel at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ndbench.engines.bundled import BundledEngine
from ndbench.engines.protocol import Batch
from ndbench.parallel.mesh import Mesh, build_mesh
from ndbench.training.graphs import WARM_UP_STEPS
from tests.parity.cases import batch, case, layout, llama, training
from tests.parity.gpus import on_ranks
from tests.parity.ranks import on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STEPS = 8
MOVING = {"optimizer": "adamw", "learning_rate": 0.02, "weight_decay": 0.3, "schedule": "cosine", "warmup_steps": 2}
BF16 = {"precision": "bf16", "deterministic": True}
"""Equal kernels in an equal order: what differs would be the graph's doing."""


def steps(device: torch.device, mesh: Mesh, here: Any, graphs: bool | None, count: int = STEPS) -> dict[str, Any]:
    """Losses and norms, read after the last step, and what the record says."""
    engine = BundledEngine(weight_jitter=here.weight_jitter)
    engine.build(here.model, replace(here.training, cuda_graphs=graphs), replace(mesh, config=here.parallelism), device)
    done = [
        engine.step(on_device(batch(here, index, mesh.batch_rank, mesh.batch_size), device)) for index in range(count)
    ]
    numbers = [(float(each.loss), float(each.grad_norm), int(each.tokens)) for each in done]  # type: ignore[arg-type]
    found = {"numbers": numbers, "graph": engine.info().get("cuda_graph")}
    engine.close()
    return found


def agree(graphed: dict[str, Any], plain: dict[str, Any], again: dict[str, Any]) -> bool:
    """To the bit, where the step without a graph has the same bits twice."""
    if plain["numbers"] == again["numbers"]:
        return bool(graphed["numbers"] == plain["numbers"])
    return all(
        ours == pytest.approx(theirs, rel=5e-3)
        for ours, theirs in zip(graphed["numbers"], plain["numbers"], strict=True)
    )


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield build_mesh(layout(), "cuda")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "changes",
    [
        {"compile": True},
        {"compile": True, "loss_chunk_size": 16, "micro_batch_size": 2, **BF16},
        {"compile": True, "activation_checkpointing": "selective", **BF16},
        {"compile": True, "max_grad_norm": None, "max_grad_value": 0.01},
    ],
    ids=["fp32", "bf16_micro", "bf16_selective", "value"],
)
def test_replayed_steps_are_the_steps_to_the_bit(changes: dict[str, Any], mesh: Mesh) -> None:
    here = case(layout(), llama(), training=training(steps=STEPS, **MOVING, **changes))
    device = torch.device("cuda", 0)
    plain, again, graphed = (steps(device, mesh, here, graphs) for graphs in (False, False, True))
    assert graphed["graph"] == {"captures": 1, "replays": STEPS - WARM_UP_STEPS, "reason": None}
    assert agree(graphed, plain, again), (graphed, plain, again)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1}], ids=str)
def test_torchs_optimizers_read_the_rate_in_float32(changes: dict[str, Any], mesh: Mesh) -> None:
    here = case(layout(), llama(), training=training(steps=STEPS, **{**MOVING, **changes}))
    device = torch.device("cuda", 0)
    plain, graphed = (steps(device, mesh, here, graphs) for graphs in (False, True))
    assert graphed["graph"]["replays"] == STEPS - WARM_UP_STEPS
    for ours, theirs in zip(graphed["numbers"], plain["numbers"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_documents_are_data(mesh: Mesh) -> None:
    here = case(layout(), llama(), documents=True, training=training(steps=STEPS, compile=True, **MOVING))
    device = torch.device("cuda", 0)
    plain, again, graphed = (steps(device, mesh, here, graphs) for graphs in (False, False, True))
    assert graphed["graph"]["replays"] == STEPS - WARM_UP_STEPS
    assert agree(graphed, plain, again), (graphed, plain, again)


@pytest.mark.parametrize("where", ["warm_up", "capture"])
def test_a_step_that_waits_for_the_device_is_taken_without_a_graph(
    where: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen in the warm-up, or, when that is missed, by the capture, which may not cost the run."""
    from ndbench.training import cuda_graph

    if where == "capture":
        monkeypatch.setattr(cuda_graph.CudaRecorder, "warm_up", lambda self, work, last: (work(), None))
    device = torch.device("cuda", 0)
    here = case(layout(), llama(), training=training(steps=STEPS, **MOVING))
    results = []
    for graphs in (False, None):
        engine = BundledEngine(weight_jitter=here.weight_jitter)
        engine.build(here.model, replace(here.training, cuda_graphs=graphs), replace(mesh, config=layout()), device)
        backward = engine.stepper.backward

        def waits(given: Batch, backward: Any = backward) -> Any:
            assert given.labels.sum().item() is not None
            return backward(given)

        monkeypatch.setattr(engine.stepper, "backward", waits)
        done = [engine.step(on_device(batch(here, index, 0, 1), device)) for index in range(STEPS)]
        results.append([float(each.loss) for each in done])
        if graphs is None:
            told = engine.info()["cuda_graph"]
            assert told["replays"] == 0
            assert ("the host waits" if where == "warm_up" else "captur") in told["reason"]
        engine.close()
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_the_peak_of_memory_is_that_of_the_steps_before(mesh: Mesh) -> None:
    """The graph's memory takes the place of theirs; both at once would be twice as much."""
    device = torch.device("cuda", 0)
    here = case(layout(), llama(hidden_size=512, intermediate_size=2048, vocab_size=8192),
                training=training(steps=STEPS, compile=True, sequence_length=512, **MOVING))  # fmt: skip
    peaks = []
    for graphs in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        steps(device, mesh, here, graphs)
        peaks.append(torch.cuda.max_memory_reserved() - before)
    assert peaks[1] < 1.35 * peaks[0]


TWO = {
    "ddp2": layout(2),
    "tp2": layout(tp=2),
    "cp2": layout(cp=2),
    "ulysses2": layout(cp=2, cp_method="ulysses"),
    "fsdp2": layout(shard=2),
}


def both_ways(task: tuple[str, dict[str, Any]], on: str) -> dict[str, Any]:
    name, changes = task
    parallelism = TWO[name]
    mesh = build_mesh(parallelism, on)
    here = case(parallelism, llama(), training=training(steps=STEPS, compile=True, **MOVING, **changes))
    device = torch.device(on, torch.cuda.current_device())
    found: dict[str, Any] = {}
    for way, graphs in (("plain", False), ("again", False), ("graphed", True)):
        try:
            found[way] = steps(device, mesh, here, graphs)
        except RuntimeError as error:
            found[way] = {"numbers": None, "graph": {"reason": str(error)[:500]}}
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus_replay_their_messages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    cases = [(name, changes) for name in TWO for changes in ({}, BF16)]
    done = on_ranks(both_ways, cases, 2, timeout=420.0)
    told = {}
    for (name, changes), ranks in zip(cases, done, strict=False):
        for rank, found in enumerate(ranks):
            graph = found["graphed"]["graph"]
            if graph["reason"] is not None or graph["replays"] != STEPS - WARM_UP_STEPS or not agree(**found):
                told[f"{name} {changes} rank {rank}"] = found
    assert not told
    assert len(done) == len(cases), f"rank killed in {cases[len(done)][0]}"
