"""Peak memory on GPUs at one global batch, by the allocator: each technique and each axis saves what it should.

Counted exactly on the CPU in ``test_memory.py``; offload can only be seen here, where host and device differ.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ndbench.engines.bundled import BundledEngine
from ndbench.parallel.mesh import build_mesh
from tests.parity.cases import Case, batch, case, layout, llama, training
from tests.parity.gpus import on_ranks
from tests.parity.ranks import on_device

GPUS = min(torch.cuda.device_count(), 2)
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")

SHAPE: dict[str, Any] = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
MODEL = llama(**SHAPE, initializer_range=0.02)
ELEMENTS = 2 * 32768 * 1024 + 8 * (2 * 1024 * 1024 + 2 * 1024 * 512 + 3 * 1024 * 4096)
"""Of the matrices; norms are nothing beside them."""


def of(parallelism: Any, **changes: Any) -> Case:
    fields = {"global_batch_size": 4, "sequence_length": 1024, "optimizer": "adamw", "precision": "bf16"}
    return case(parallelism, MODEL, training=training(**(fields | changes)), steps=2, weight_jitter=0.0)


def peak(here: Case, device: str) -> dict[str, int]:
    """Bytes of this rank beyond cuBLAS's own workspace: held between steps, and at most during the second one."""
    mesh = build_mesh(here.parallelism, device)
    engine = BundledEngine()
    at = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    engine.build(here.model, here.training, mesh, at)
    data = on_device(batch(here, 0, mesh.batch_rank, mesh.batch_size), at)
    engine.step(data)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    engine.step(data)
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated()
    engine.close()
    del engine
    gc.collect()  # a sharded model refers to itself; the next case starts from nothing
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    assert left < 2**27, f"{left} bytes left, cuBLAS alone keeps 2**26"
    dist.barrier()
    return {"held": held - left, "peak": most - left}


LONG: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12}
TOKENS = 2**16
"""Of a rank, in a model that is nothing beside what its blocks keep: 32 MiB an input, and as much of attention's."""
KEPT = {"full": TOKENS * 256 * 2, "attention": TOKENS * (2 * 256 * 2 + 8 * 4)}


def long(parallelism: Any, mode: str, offload: bool) -> Case:
    fields = {"precision": "bf16", "optimizer": "adamw", "sequence_length": 2**13, "global_batch_size": 2**3 * GPUS}
    steps = training(**fields, activation_checkpointing=mode, activation_offload=offload)
    return case(parallelism, llama(**LONG, initializer_range=0.02), training=steps, steps=2, weight_jitter=0.0)


CASES = {
    "none": of(layout(1, GPUS)),
    "full": of(layout(1, GPUS), activation_checkpointing="full"),
    "selective": of(layout(1, GPUS), activation_checkpointing="selective"),
    "attention": of(layout(1, GPUS), activation_checkpointing="attention"),
    "chunked": of(layout(1, GPUS), loss_chunk_size=512),
    "offload": of(layout(1, GPUS, cpu_offload=True)),
    "ddp": of(layout(GPUS)),
    "tp": of(layout(1, 1, 1, GPUS)),
    "cp": of(layout(1, 1, GPUS)),
} | {
    f"{name}_{mode}_{'host' if offload else 'device'}": long(at, mode, offload)
    for name, at in (("dp", layout(1, GPUS)), ("cp", layout(1, 1, GPUS)))
    for mode in KEPT
    for offload in (False, True)
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int]]:
    """The fullest rank of each case."""
    results = on_ranks(peak, list(CASES.values()), GPUS)
    most = {name: {key: max(each[key] for each in by_rank) for key in by_rank[0]} for name, by_rank in
            zip(CASES, results, strict=True)}  # fmt: skip
    print({name: {key: f"{value / 2**20:.0f} MiB" for key, value in each.items()} for name, each in most.items()})
    return most


@pytest.mark.timeout(300)
def test_between_steps_a_rank_holds_its_shards_of_weights_and_moments(found: dict[str, dict[str, int]]) -> None:
    """Float32 weights and moments; whoever holds all of them keeps the bf16 copies too."""
    assert found["ddp"]["held"] == pytest.approx(14 * ELEMENTS, rel=0.01)
    assert found["none"]["held"] == pytest.approx((12 if GPUS > 1 else 14) * ELEMENTS / GPUS, rel=0.01)


def test_offload_leaves_almost_nothing_on_the_device_between_steps(found: dict[str, dict[str, int]]) -> None:
    """Weights, gradients and moments are on the host; what comes back for a step is a block or two at a time."""
    assert found["offload"]["held"] < 0.01 * found["none"]["held"]
    assert found["offload"]["peak"] < found["none"]["peak"] - 12 * ELEMENTS / GPUS * 0.8


def test_recomputation_and_a_chunked_loss_each_save(found: dict[str, dict[str, int]]) -> None:
    none = found["none"]["peak"]
    assert found["full"]["peak"] < found["attention"]["peak"] < found["selective"]["peak"] < none
    logits = 4 * 1024 // GPUS * 32768 * 4
    assert none - found["chunked"]["peak"] > logits


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_what_waits_on_the_host_is_not_on_the_device(axis: str, mode: str, found: dict[str, dict[str, int]]) -> None:
    """Of 12 layers two are there, and beside them at most gradients, which are less than a layer's."""
    there, away = found[f"{axis}_{mode}_device"], found[f"{axis}_{mode}_host"]
    assert away["held"] == pytest.approx(there["held"], abs=2**20)
    assert there["peak"] - away["peak"] > 8 * KEPT[mode]


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_shards_need_less_than_replicas(found: dict[str, dict[str, int]]) -> None:
    assert found["none"]["peak"] < found["ddp"]["peak"] - 12 * ELEMENTS / 2 * 0.8
    assert found["tp"]["peak"] < found["ddp"]["peak"] - 12 * ELEMENTS / 2 * 0.8
    assert found["cp"]["peak"] < found["ddp"]["peak"] - 12 * ELEMENTS / 2 * 0.8
