"""A model of the user's own runs under FSDP and under its own tensor-parallel plan, with one process's numbers."""

from __future__ import annotations

import pytest

from ndbench.config import ModelConfig
from ndbench.engines.bundled_refusals import plan_refusals
from ndbench.parallel.config import ParallelismConfig
from tests.parallel.toy import PLAN
from tests.parity import ranks
from tests.parity.cases import case, layout
from tests.parity.compare import assert_parity
from tests.parity.pool import pool

MODEL = ModelConfig(
    model_type=None,
    target="tests.parallel.toy.Toy",
    blocks="layers",
    vocab_size=131,
    tp_plan=PLAN,
    initializer_range=0.2,
)


@pytest.mark.parametrize(
    "parallelism", [layout(1, 2), layout(1, 1, 1, 2), layout(1, 2, 1, 2)], ids=lambda each: each.layout
)
def test_a_users_model_is_one_process(parallelism: ParallelismConfig) -> None:
    assert_parity(case(parallelism, MODEL))


def test_its_blocks_are_units_of_fsdp() -> None:
    assert pool(2).run(ranks.train, case(layout(1, 2), MODEL))[0]["facts"]["blocks"] == 2


def test_a_wrong_path_is_named() -> None:
    wrong = ModelConfig(model_type=None, target="tests.parallel.toy.Missing", tp_plan=PLAN)
    assert "tests.parallel.toy.Missing' cannot be imported" in plan_refusals(wrong, ParallelismConfig(tp_size=2))[0]
