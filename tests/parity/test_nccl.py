"""Several GPUs over NCCL are one process on the CPU: loss, gradient norm, every gradient, the weights after steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ndbench.parallel.config import ParallelismConfig
from tests.parity import ranks
from tests.parity.cases import Case, all_layouts, case, layout, llama, training
from tests.parity.compare import TOLERANCE, assert_small, errors_of
from tests.parity.gpus import on_ranks

GPUS = next(size for size in (8, 4, 2, 1, 0) if size <= torch.cuda.device_count())

pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")


def techniques(world_size: int) -> dict[str, Case]:
    """What changes the step, each on a layout where it has something to do; seen on ``world_size`` devices."""
    fsdp, cp, tp = layout(1, world_size), layout(1, 1, world_size), layout(1, 1, 1, world_size)
    heads = llama(num_key_value_heads=8)
    accumulated: dict[str, Any] = {"micro_batch_size": 1, "activation_checkpointing": "full", "loss_chunk_size": 7}
    return {
        "ulysses": case(layout(1, 1, world_size, cp_method="ulysses"), heads),
        "documents_ring": case(cp, documents=True),
        "window_ring": case(cp, llama(model_type="mistral", sliding_window=9)),
        "documents_ulysses": case(layout(1, 1, world_size, cp_method="ulysses"), heads, documents=True),
        "accumulated": case(fsdp, training=training(**(accumulated | {"global_batch_size": 2 * world_size}))),
        "selective": case(cp, training=training(activation_checkpointing="selective")),
        "attention": case(cp, training=training(activation_checkpointing="attention")),
        "compiled_attention": case(cp, training=training(activation_checkpointing="attention", compile=True)),
        "offload": case(layout(1, world_size, cpu_offload=True)),
        "compiled_fsdp": case(fsdp, training=training(compile=True)),
        "compiled_tp": case(tp, heads, training=training(compile=True)),
        "compiled_cp": case(cp, training=training(compile=True)),
        "plain_tp": case(layout(1, 1, 1, world_size, sequence_parallel=False, loss_parallel=False), heads),
        "adamw_tp": case(tp, heads, training=training(optimizer="adamw", learning_rate=1e-3), steps=5),
    }


def cases(world_size: int) -> dict[str, Case]:
    whole: list[ParallelismConfig] = [each for each in all_layouts() if each.world_size == world_size]
    return {each.layout: case(each) for each in whole} | techniques(world_size)


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    here = cases(GPUS)
    return dict(zip(here, on_ranks(on_gpu, list(here.values()), GPUS, timeout=200.0), strict=False))


def on_gpu(here: Case, device: str) -> dict[str, Any]:
    try:
        return ranks.train(here, device=device) | {"backend": dist.get_backend()}
    except Exception as error:  # every rank meets it alike; the other cases are worth their minutes
        return {"error": f"{type(error).__name__}: {error}"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", cases(max(GPUS, 2)))
def test_gpus_are_one_process(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    assert name in found, "the ranks were killed at their time limit before this case"
    here, results = cases(GPUS)[name], found[name]
    assert not [each["error"] for each in results if "error" in each]
    worst = errors_of(here, results, "cuda")
    print(name, {kind: f"{error:.1e}" for kind, (error, _) in worst.items()})
    assert_small(here, worst, TOLERANCE)


def test_the_backend_was_nccl(found: dict[str, list[dict[str, Any]]]) -> None:
    """A pool of CPU ranks would pass everything above."""
    assert all(each["backend"] == "nccl" for results in found.values() for each in results)
