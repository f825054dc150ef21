"""FSDP by copies between peers, held to FSDP by collectives; on CPU ranks, whose peers' memory is in mapped files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.copy_engine import WARM_UP_STEPS
from ndbench.parallel.traffic import difference, exchanges_rows, step_traffic
from tests.parallel import copy_engine_tasks as tasks
from tests.parallel.traffic_tasks import shapes
from tests.parity.cases import Case, case, layout, llama, training
from tests.parity.pool import pool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"shard": 2}),
    "kept": (2, {"shard": 2, "reshard_after_forward": False}),
    "hsdp2x2": (4, {"replicate": 2, "shard": 2}),
    "fsdp2_tp2": (4, {"shard": 2, "tp": 2}),
    "ddp2": (2, {"replicate": 2}),
    "ddp2_tp2": (4, {"replicate": 2, "tp": 2}),
}


def of(options: dict[str, Any], collectives: str, layers: int = 4, vocab_size: int = 132, **changes: Any) -> Case:
    fields = {"precision": "bf16", "optimizer": "adamw", "learning_rate": 0.01} | changes
    at = layout(**options, data_collectives=collectives)
    model = llama(num_hidden_layers=layers, vocab_size=vocab_size)
    return case(at, model, training=training(**fields), steps=WARM_UP_STEPS + 2)


def run(at: Case, ranks: int, folder: Path, memory: str = "FileMemory") -> list[dict[str, Any]]:
    folder.mkdir()
    return pool(ranks).run(tasks.trained, at, str(folder), memory)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("micro", [None, 1], ids=["one micro-batch", "several"])
def test_training_is_the_same_to_the_bit(name: str, micro: int | None, tmp_path: Path) -> None:
    """With two shards a float32 sum of bf16 gradients has one value, whoever adds it up and whatever carries it."""
    ranks, options = LAYOUTS[name]
    copies = run(of(options, "copy_engine", micro_batch_size=micro), ranks, tmp_path / "copies")
    plain = run(of(options, "nccl", micro_batch_size=micro), ranks, tmp_path / "plain")
    for by_copies, by_gloo in zip(copies, plain, strict=True):
        for what in ("losses", "norms", "parameters"):
            assert by_copies[what] == by_gloo[what], what
    assert copies[0]["buffers"] == (2 if "shard" in options else 1), "what ranks fetch, and what they send"
    assert plain[0]["buffers"] == 0
    assert copies[0]["siblings"] == ({True} if "shard" in options else set()), "what can be multiplied by at once"


@pytest.mark.parametrize("name", ["fsdp2", "kept", "hsdp2x2"])
def test_rows_of_a_large_embedding_are_exchanged_beside_the_copies(name: str, tmp_path: Path) -> None:
    ranks, options = LAYOUTS[name]
    found = []
    for collectives in ("copy_engine", "nccl"):
        at = of(options, collectives, 3, vocab_size=4099)
        assert exchanges_rows(*shapes(at)[:1], at.parallelism, shapes(at)[1])
        found.append(run(at, ranks, tmp_path / collectives))
    for by_copies, by_gloo in zip(*found, strict=True):
        for what in ("losses", "norms", "parameters"):
            assert by_copies[what] == by_gloo[what], what


@pytest.mark.parametrize("change", ["frozen", "mostly_frozen", "unused", "scaled", "evaluated", "broken"])
@pytest.mark.parametrize("name", ["fsdp2", "kept", "ddp2"])
def test_training_is_the_same_whatever_else_happens(name: str, change: str, tmp_path: Path) -> None:
    _, options = LAYOUTS[name]
    layers, micro = (6, 1) if change == "mostly_frozen" else (4, None)
    found = []
    for collectives in ("copy_engine", "nccl"):
        folder = tmp_path / collectives
        folder.mkdir()
        at = of(options, collectives, layers, weight_decay=0.5, micro_batch_size=micro)
        found.append(pool(2).run(tasks.trained, at, str(folder), "FileMemory", change))
    for by_copies, by_gloo in zip(*found, strict=True):
        for what in ("losses", "norms", "parameters"):
            assert by_copies[what] == by_gloo[what], what


@pytest.mark.parametrize("options", [{"shard": 2}, {"shard": 2, "reshard_after_forward": False}, {"replicate": 2}])
def test_rows_that_do_not_divide(options: dict[str, Any], tmp_path: Path) -> None:
    """An odd number of rows, and norms of fewer elements than a copy engine's alignment."""
    made = [
        case(
            layout(**options, data_collectives=collectives),
            llama(num_hidden_layers=3, vocab_size=133, intermediate_size=75),
            training=training(precision="bf16", optimizer="adamw", learning_rate=0.01),
            steps=WARM_UP_STEPS + 2,
        )
        for collectives in ("copy_engine", "nccl")
    ]
    copies, plain = (run(at, 2, tmp_path / str(index)) for index, at in enumerate(made))
    for by_copies, by_gloo in zip(copies, plain, strict=True):
        for what in ("losses", "norms", "parameters"):
            assert by_copies[what] == by_gloo[what], what


def test_float32_is_fetched_and_sent_as_it_is(tmp_path: Path) -> None:
    both = [of({"shard": 2}, collectives, precision="fp32") for collectives in ("copy_engine", "nccl")]
    copies, plain = (run(at, 2, tmp_path / str(index)) for index, at in enumerate(both))
    assert copies[0]["losses"] == plain[0]["losses"]
    assert copies[0]["parameters"] == plain[0]["parameters"]


def test_a_block_that_is_asked_for_too_early_is_refused(tmp_path: Path) -> None:
    (tmp_path / "early").mkdir()
    for said in pool(2).run(tasks.out_of_order, of({"shard": 2}, "copy_engine"), str(tmp_path / "early")):
        assert "needs blocks that compute one after another" in said
        assert "take nccl" in said


@pytest.mark.parametrize("options", [{"shard": 4}, {"replicate": 4}], ids=["shards", "replicas"])
def test_more_ranks_sum_in_their_order(options: dict[str, Any], tmp_path: Path) -> None:
    """Of four ranks the order of a float32 sum shows in the last bits, and a wrong row in the first."""
    copies = run(of(options, "copy_engine"), 4, tmp_path / "copies")
    plain = run(of(options, "nccl"), 4, tmp_path / "plain")
    for by_copies, by_gloo in zip(copies, plain, strict=True):
        assert by_copies["losses"] == pytest.approx(by_gloo["losses"], rel=1e-4)
        assert by_copies["norms"][:1] == pytest.approx(by_gloo["norms"][:1], rel=1e-6)
        assert by_copies["norms"] == pytest.approx(by_gloo["norms"], rel=1e-2)


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("micro", [None, 1], ids=["one micro-batch", "several"])
def test_what_is_sent_is_recorded_and_is_the_closed_form(micro: int | None, kept: int, tmp_path: Path) -> None:
    at = of({"shard": 2, "kept_blocks": kept}, "copy_engine", micro_batch_size=micro)
    model, step = shapes(at)
    for rank in run(at, 2, tmp_path / "copies"):
        assert difference(rank["totals"], step_traffic(model, at.parallelism, step)) == {}


def test_memory_that_peers_do_not_share_changes_the_losses(tmp_path: Path) -> None:
    """The fault that the comparison above is for."""
    right = run(of({"shard": 2}, "copy_engine"), 2, tmp_path / "right")
    wrong = run(of({"shard": 2}, "copy_engine"), 2, tmp_path / "wrong", "ForgetfulMemory")
    first = WARM_UP_STEPS
    assert right[0]["losses"][:first] == wrong[0]["losses"][:first]
    assert right[0]["losses"][first] != wrong[0]["losses"][first], "from here on the copies are in use"


def test_the_wrong_device_and_offload_are_refused() -> None:
    both = ParallelismConfig(dp_shard_size=2, data_collectives="copy_engine", cpu_offload=True)
    assert "cpu_offload=true" in both.refuse(llama(), training())[0]
    unknown = ParallelismConfig(dp_shard_size=2, data_collectives="rdma")
    assert unknown.refuse(llama(), training()) == ["data_collectives 'rdma' is not known; known: nccl, copy_engine"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_the_same_with_and_without(tmp_path: Path) -> None:
    from tests.parity.gpus import on_ranks

    both = [of({"shard": 2}, "copy_engine"), of({"shard": 2}, "nccl")]
    copies, plain = on_ranks(tasks.on_gpu, both, 2)
    assert copies[0] == pytest.approx(plain[0], rel=1e-6)


@pytest.mark.parametrize("options", [{"shard": 2}, {"replicate": 2}, {"shard": 2, "tp": 2}], ids=["fsdp", "ddp", "tp"])
def test_norms_that_come_with_the_sums_are_those_of_the_gradients(options: dict[str, Any], tmp_path: Path) -> None:
    """As on a GPU, where the sums are compiled; under tp the gradients of norms are completed after they are summed."""
    ranks = 4 if "tp" in options else 2
    (tmp_path / "fused").mkdir()
    plain = run(of(options, "copy_engine"), ranks, tmp_path / "plain")
    fused = pool(ranks).run(tasks.trained, of(options, "copy_engine"), str(tmp_path / "fused"), "FileMemory", "fused")
    for by_kernels, by_passes in zip(fused, plain, strict=True):
        first = WARM_UP_STEPS  # later ones differ by what rounding the first made of the weights
        assert by_kernels["norms"][first] == pytest.approx(by_passes["norms"][first], rel=1e-6)
        assert by_kernels["norms"] == pytest.approx(by_passes["norms"], rel=1e-2)
