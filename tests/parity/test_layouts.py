"""Every layout is one process: loss, gradient norm, every gradient, and the weights after SGD steps, in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ndbench.parallel.config import ParallelismConfig
from tests.parity import ranks, reference
from tests.parity.cases import HSDP_TP, all_layouts, case, layout, training
from tests.parity.compare import assert_parity, errors
from tests.parity.pool import pool


def name(value: object) -> str | None:
    return f"{value.world_size}-{value.layout}" if isinstance(value, ParallelismConfig) else None


def test_there_are_34_layouts_at_2_4_and_8_ranks() -> None:
    assert len(all_layouts()) == 34


@pytest.mark.parametrize("parallelism", all_layouts(), ids=name)
def test_a_layout_is_one_process(parallelism: ParallelismConfig) -> None:
    assert_parity(case(parallelism))


@pytest.mark.parametrize("parallelism", HSDP_TP, ids=name)
def test_five_adamw_steps_are_those_of_one_process(parallelism: ParallelismConfig) -> None:
    adamw = training(optimizer="adamw", learning_rate=1e-3, weight_decay=0.1)
    assert_parity(case(parallelism, training=adamw, steps=5, tensors=False))


def test_a_single_rank_is_one_process() -> None:
    assert_parity(case(layout()))


def test_loss_and_norm_are_bitwise_equal_on_every_rank() -> None:
    results = pool(8).run(ranks.train, case(layout(2, 2, 1, 2)))
    assert all(each["loss"] == results[0]["loss"] and each["norm"] == results[0]["norm"] for each in results)


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against another seed's run every kind of error is large."""
    here = case(layout(1, 2))
    other = reference.train(replace(here, training=training(seed=1)))
    monkeypatch.setattr(reference, "train", lambda *_: other)
    found = errors(here)
    assert set(found) == {"loss", "norm", "tokens", "gradients", "weights"}
    assert all(found[kind][0] > 1e-3 for kind in set(found) - {"tokens"})
