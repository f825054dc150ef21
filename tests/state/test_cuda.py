"""On GPUs over NCCL: every mode and layout, host memory staged and offloaded, and from GPUs to a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ndbench.parallel.config import ParallelismConfig
from tests.parity.cases import Case, case, layout, llama, training
from tests.parity.gpus import on_ranks
from tests.parity.pool import pool
from tests.state import ranks
from tests.state.whole import assemble, assert_same

GPUS = min(2, torch.cuda.device_count())
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")

SIZE = max(GPUS, 1)
FSDP, TP, CP, OFFLOAD = layout(1, SIZE), layout(tp=SIZE), layout(cp=SIZE), layout(1, SIZE, cpu_offload=True)
DDP = layout(SIZE)
PAIRS = [
    (FSDP, "sharded", TP),
    (TP, "async", FSDP),
    (TP, "async", TP),
    (CP, "full", OFFLOAD),
    (OFFLOAD, "hf", CP),
    (OFFLOAD, "async", OFFLOAD),
    (DDP, "sharded", TP),
    (TP, "full", DDP),
]


@dataclass(frozen=True)
class Pair:
    one: Case
    mode: str
    other: Case
    folder: Path


def of(parallelism: ParallelismConfig) -> Case:
    adamw = training(optimizer="adamw", learning_rate=1e-2, weight_decay=0.1)
    return case(parallelism, llama(num_key_value_heads=8), training=adamw, silent=0)


def there_and_back(pair: Pair, device: str) -> dict[str, Any]:
    """On every rank; an error is an answer, so that the other pairs are still run."""
    try:
        before = ranks.save(pair.one, pair.folder, pair.mode, 2, device=device)
        return {
            "before": before,
            "after": ranks.load(pair.other, pair.folder, 1, device=device),
            "backend": dist.get_backend(),
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Pair, list[dict[str, Any]]]]:
    root = tmp_path_factory.mktemp("cuda")
    pairs = [Pair(of(one), mode, of(other), root / str(index)) for index, (one, mode, other) in enumerate(PAIRS)]
    return list(zip(pairs, on_ranks(there_and_back, pairs, GPUS, timeout=150.0), strict=False))


@pytest.mark.timeout(250)
@pytest.mark.parametrize("index", range(len(PAIRS)), ids=[f"{a.layout}-{m}-{b.layout}" for a, m, b in PAIRS])
def test_state_is_bitwise_equal_and_the_next_loss_is_the_same(
    index: int, found: list[tuple[Pair, list[dict[str, Any]]]]
) -> None:
    assert index < len(found), "the ranks were killed at their time limit before this pair"
    pair, results = found[index]
    assert not [each["error"] for each in results if "error" in each]
    assert {each["backend"] for each in results} == {"nccl"}
    whole = assemble([each["before"]["held"] for each in results])
    assert_same(whole, assemble([each["after"]["held"] for each in results]))
    expected, loss = results[0]["before"]["loss"][0], results[0]["after"]["loss"][0]
    assert loss == expected if pair.one == pair.other else loss == pytest.approx(expected, rel=1e-6)
    on_cpu = pool(1).run(ranks.load, of(layout()), pair.folder)
    assert_same(whole, assemble([each["held"] for each in on_cpu]))
    assert on_cpu[0]["loss"][0] == pytest.approx(expected, rel=1e-5)
