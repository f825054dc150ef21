"""Expressions of a suite: what they mean, and that nothing else gets through."""

from __future__ import annotations

import re

import pytest

from ndbench.config import Config, HardwareConfig, ModelConfig
from ndbench.matrix.expressions import parse_expression
from ndbench.parallel.config import ParallelismConfig

CELL = Config(
    model=ModelConfig(num_attention_heads=8, num_key_value_heads=4, sliding_window=None),
    hardware=HardwareConfig(name="h100", gpus_per_node=8),
    parallelism=ParallelismConfig(dp_replicate_size=2, dp_shard_size=1, cp_size=1, tp_size=8),
    world_size=16,
)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("tp > model.num_key_value_heads", True),
        ("tp > 4 and not cp > 1", True),
        ("cp * tp > hardware.gpus_per_node or dp_shard == 2", False),
        ("1 < dp_replicate <= 2", True),
        ("1 < dp_replicate < 2", False),
        ("layout in ['ddp2_tp8', 'fsdp8']", True),
        ("training.optimizer not in ('sgd',)", True),
        ("model.sliding_window is null", True),
        ("model.sliding_window is not None", False),
        ("training.compile == false", True),
        ("world_size % (dp_replicate * tp) == 0", True),
        ("world_size // 3 == 5 and -tp < 0", True),
        ("model.name == 'llama_tiny'", True),
        ("tp == (8 if cp == 1 else 4)", True),
        ("tp == (8 if cp > 1 else 4)", False),
        ("(cp > 1 or tp > 1) and not model.sliding_window is not null", True),
    ],
)
def test_an_expression_means_what_it_says(text: str, truth: bool) -> None:
    assert parse_expression(text, "suites/x.yaml").holds(CELL) is truth


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('x')",
        "tp.__class__",
        "model.__dict__",
        "[tp for tp in (1, 2)]",
        "(lambda: 1)()",
        "model['name']",
        "9 ** 9 ** 9",
        "f'{tp}'",
        "tp := 3",
        "tp if open('x') else 1",
        "tp >",
        "tp == 1; cp == 2",
        "",
        "b'x' == tp",
    ],
)
def test_anything_but_a_plain_comparison_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"suites/x\.yaml: expression '"):
        parse_expression(text, "suites/x.yaml")


def test_an_unknown_name_is_refused_with_a_close_one() -> None:
    with pytest.raises(ValueError, match=r"modle\.num_key_value_heads.*did you mean model\.num_key_value_heads"):
        parse_expression("tp > modle.num_key_value_heads", "suites/x.yaml")


def test_an_unknown_name_is_found_even_where_it_would_never_be_looked_up() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        parse_expression("tp > 100 and nonsense == 1", "suites/x.yaml")


def test_a_comparison_with_null_names_file_expression_and_value() -> None:
    rule = parse_expression("model.sliding_window > 3", "suites/x.yaml")
    with pytest.raises(ValueError, match=r"suites/x\.yaml.*model\.sliding_window > 3.*model\.sliding_window is None"):
        rule.holds(CELL)


def test_an_expression_that_is_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="is 8, not true or false"):
        parse_expression("tp", "suites/x.yaml").holds(CELL)


def test_deep_nesting_is_refused_not_a_crash() -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        parse_expression("(" * 900 + "tp" + ")" * 900, "suites/x.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 if tp else 2", "has no value where tp is 8: 8 is neither true nor false"),
        ("tp and cp > 1", "has no value where cp is 1, tp is 8: 8 is neither true nor false"),
        ("not null", "has no value: None is neither true nor false"),
        ("1 if layout else 2", "has no value where layout is ddp2_tp8: 'ddp2_tp8' is neither"),
        (f"{'9' * 400} / 2 > tp", "integer division result too large for a float"),
    ],
)
def test_what_has_no_value_is_told_with_what_it_read(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_expression(text, "suites/x.yaml").value(CELL)
