"""A checkpoint of any layout, world size and mode loads into any other: bitwise, and the next loss is the same."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.parallel.config import ParallelismConfig
from tests.parity.cases import Case, case, layout, llama, training
from tests.parity.pool import pool
from tests.state import ranks
from tests.state.whole import assemble, assert_same

ADAMW = training(optimizer="adamw", learning_rate=1e-2, weight_decay=0.1)
EIGHT_HEADS = llama(num_key_value_heads=8)
"""An odd vocabulary: 131 rows over 8, 4, 3 x 2 ... ranks leave uneven and empty shards."""
TIED = llama(num_key_value_heads=8, tie_word_embeddings=True)

ONE, DDP, FSDP, HSDP = layout(), layout(2), layout(1, 8), layout(2, 4)
TP2, TP4, TP8, CP2, CP4 = layout(tp=2), layout(tp=4), layout(tp=8), layout(cp=2), layout(cp=4)
HSDP_TP, FSDP_CP, CP_TP, ALL = layout(2, 2, 1, 2), layout(1, 4, 2), layout(1, 1, 4, 2), layout(1, 2, 2, 2)
OFFLOAD = layout(1, 2, 1, 2, cpu_offload=True)

PAIRS = [
    (HSDP_TP, "sharded", FSDP),
    (HSDP_TP, "sharded", HSDP_TP),
    (HSDP_TP, "sharded", ONE),
    (TP8, "sharded", FSDP_CP),
    (TP8, "sharded", DDP),
    (TP4, "async", ALL),
    (TP4, "async", TP4),
    (CP4, "async", DDP),
    (CP4, "async", TP2),
    (ALL, "full", CP2),
    (ALL, "full", HSDP),
    (FSDP, "async", CP_TP),
    (OFFLOAD, "sharded", TP2),
    (OFFLOAD, "sharded", OFFLOAD),
    (ONE, "full", OFFLOAD),
    (ONE, "full", FSDP),
]


def of(parallelism: ParallelismConfig, model: ModelConfig = EIGHT_HEADS, steps: TrainingConfig = ADAMW) -> Case:
    return case(parallelism, model, training=steps, silent=0)


@functools.cache
def saved(key: str) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint after two steps; ``key`` is an index of PAIRS, so that a save serves all pairs that begin so."""
    parallelism, mode, _ = PAIRS[int(key)]
    folder = Path(tempfile.mkdtemp(dir=_ROOT[0]))
    return folder, pool(parallelism.world_size).run(ranks.save, of(parallelism), folder, mode, 2)


_ROOT: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def _root(tmp_path_factory: pytest.TempPathFactory) -> None:
    _ROOT[:] = [tmp_path_factory.mktemp("checkpoints")]


def first_pair(index: int) -> str:
    return str(next(i for i, pair in enumerate(PAIRS) if pair[:2] == PAIRS[index][:2]))


def check(before: list[dict[str, Any]], after: list[dict[str, Any]], bitwise_loss: bool) -> None:
    assert_same(assemble([each["held"] for each in before]), assemble([each["held"] for each in after]))
    assert after[0]["progress"]["step"] == 2
    for rank in after:
        assert rank["loss"] == after[0]["loss"]
    expected, loss = before[0]["loss"][0], after[0]["loss"][0]
    assert loss == expected if bitwise_loss else abs(loss - expected) <= 1e-6 * expected


@pytest.mark.parametrize(
    "index", range(len(PAIRS)), ids=[f"{a.world_size}-{a.layout}-{m}-to-{b.world_size}-{b.layout}" for a, m, b in PAIRS]
)
def test_state_is_bitwise_equal_and_the_next_loss_is_the_same(index: int) -> None:
    one, _, other = PAIRS[index]
    folder, before = saved(first_pair(index))
    after = pool(other.world_size).run(ranks.load, of(other), folder)
    check(before, after, bitwise_loss=one == other)
    assert after[0]["groups"][0]["betas"] == tuple(ADAMW.betas)


@pytest.mark.parametrize(("one", "other"), [(HSDP_TP, TP2), (TP4, FSDP)], ids=["hsdp_tp-to-tp", "tp-to-fsdp"])
def test_a_tied_parameter_is_stored_once_and_stays_tied(
    one: ParallelismConfig, other: ParallelismConfig, tmp_path: Path
) -> None:
    before = pool(one.world_size).run(ranks.save, of(one, TIED), tmp_path, "sharded", 2)
    after = pool(other.world_size).run(ranks.load, of(other, TIED), tmp_path)
    check(before, after, bitwise_loss=False)
    assert not any(name.startswith("lm_head") for each in before for name in each["held"])


@pytest.mark.parametrize(
    ("one", "mode", "other"),
    [
        (layout(2, 2), "sharded", FSDP),
        (FSDP, "async", TP2),
        (ONE, "full", layout(1, 2, 2)),
        (layout(1, 2, 2), "sharded", layout(1, 2, 2)),
    ],
    ids=["hsdp-to-fsdp", "fsdp-to-tp", "one-to-fsdp_cp", "fsdp_cp-to-itself"],
)
def test_an_embedding_whose_rows_are_exchanged(
    one: ParallelismConfig, mode: str, other: ParallelismConfig, tmp_path: Path
) -> None:
    """FSDP does not know of its weight; what is stored is the same."""
    large = llama(num_key_value_heads=8, vocab_size=4099)
    before = pool(one.world_size).run(ranks.save, of(one, large), tmp_path, mode, 2)
    after = pool(other.world_size).run(ranks.load, of(other, large), tmp_path)
    check(before, after, bitwise_loss=one == other)


def test_an_optimizer_that_never_stepped_comes_back_so(tmp_path: Path) -> None:
    """Into one that has stepped: what it had is gone."""
    before = pool(4).run(ranks.save, of(OFFLOAD), tmp_path, "sharded", 0)
    after = pool(2).run(ranks.load, of(TP2), tmp_path, 1)
    assert_same(assemble([each["held"] for each in before]), assemble([each["held"] for each in after]))
    assert not any("/" in name for name in after[0]["held"])
    assert after[0]["loss"][0] == pytest.approx(before[0]["loss"][0], rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_with_and_without_momentum(momentum: float, tmp_path: Path) -> None:
    steps = training(momentum=momentum)
    before = pool(4).run(ranks.save, of(TP4, steps=steps), tmp_path, "async", 2)
    after = pool(2).run(ranks.load, of(DDP, steps=steps), tmp_path)
    check(before, after, bitwise_loss=False)


def test_an_optimizer_that_holds_distributed_parameters(tmp_path: Path) -> None:
    steps = training(optimizer="tests.state.ranks.OwnAdamW", learning_rate=1e-2)
    before = pool(4).run(ranks.save, of(OFFLOAD, steps=steps), tmp_path, "sharded", 2)
    after = pool(2).run(ranks.load, of(TP2, steps=steps), tmp_path)
    check(before, after, bitwise_loss=False)
    assert sum("exp_avg" in name for name in after[0]["held"]) == 2 * 21


def test_an_evaluation_before_it_changes_nothing(tmp_path: Path) -> None:
    """It leaves the root's parameters gathered."""
    before = pool(8).run(ranks.save, of(FSDP_CP), tmp_path, "sharded", 2, True)
    after = pool(2).run(ranks.load, of(CP2), tmp_path)
    check(before, after, bitwise_loss=False)


def test_random_numbers_go_on(tmp_path: Path) -> None:
    for rank in pool(4).run(ranks.random_numbers, of(OFFLOAD), tmp_path):
        first, again = rank[0]
        assert first == again


def test_the_comparison_can_fail() -> None:
    """One flipped bit of one moment."""
    _, before = saved("0")
    whole = assemble([each["held"] for each in before])
    name = next(each for each in whole if each.endswith("exp_avg_sq"))
    other = {**whole, name: whole[name].clone()}  # type: ignore[union-attr]
    other[name].view(torch.int32)[0] += 1  # type: ignore[union-attr]
    with pytest.raises(AssertionError):
        assert_same(whole, other)
