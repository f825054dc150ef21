"""On one GPU: the numbers of one process on CPU in float32, and a step that never waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ndbench.engines.bundled import BundledEngine
from ndbench.parallel.mesh import Mesh, build_mesh
from tests.parity import reference
from tests.parity.cases import Case, batch, case, layout, llama, training
from tests.parity.ranks import on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield build_mesh(layout(), "cuda")
    dist.destroy_process_group()


def worst(here: Case, mesh: Mesh, sync: str = "error") -> tuple[float, float]:
    """Worst relative error of loss and norm; the last step may not wait for the device."""
    want = reference.train(here, "cuda")
    engine = BundledEngine(weight_jitter=here.weight_jitter)
    engine.build(here.model, here.training, replace(mesh, config=here.parallelism), DEVICE)
    errors: dict[str, list[float]] = {"loss": [], "norm": []}
    for step in range(here.steps):
        data = on_device(batch(here, step, 0, 1), DEVICE)  # from pageable memory, which waits
        torch.cuda.set_sync_debug_mode(sync if step == here.steps - 1 else "default")
        try:
            done: Any = engine.step(data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        errors["loss"].append(abs(done.loss.item() / want["loss"][step] - 1))
        errors["norm"].append(abs(done.grad_norm.item() / want["norm"][step] - 1))
    return max(errors["loss"]), max(errors["norm"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adamw", "learning_rate": 1e-3},
        {"activation_checkpointing": "full", "loss_chunk_size": 7, "micro_batch_size": 2},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "attention"},
        {"activation_checkpointing": "attention", "compile": True},
        {"compile": True},
    ],
    ids=lambda changes: "_".join(changes) or "plain",
)
def test_a_gpu_has_the_numbers_of_the_cpu(changes: dict[str, Any], mesh: Mesh) -> None:
    assert max(worst(case(layout(), training=training(**changes)), mesh)) < 1e-5


def test_packed_documents_on_a_gpu(mesh: Mesh) -> None:
    assert max(worst(case(layout(), documents=True), mesh)) < 1e-5


def test_cpu_offload_on_a_gpu(mesh: Mesh) -> None:
    """Gradients come to the host here, so this step does wait."""
    assert max(worst(case(layout(cpu_offload=True)), mesh, sync="default")) < 1e-5


def test_bf16_on_a_gpu(mesh: Mesh) -> None:
    low = case(
        layout(), llama(initializer_range=0.02), training=training(precision="bf16"), weight_jitter=0.02, steps=1
    )
    loss, norm = worst(low, mesh)
    assert loss < 3e-4
    assert norm < 3e-3
