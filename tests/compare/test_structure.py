from __future__ import annotations

import copy
from typing import Any

import pytest

from ndbench.compare.structure import collective_changes, judge, judge_tokens
from ndbench.results.schema import Record
from tests.compare.helpers import baseline_of, decide, only
from tests.records import a_record, repeats


def entry(
    op: str = "all_gather", axis: str = "fsdp", count: int = 2, size: float = 2048, *where: str
) -> dict[str, Any]:
    return {"op": op, "axis": axis, "count": count, "bytes": size, "where": list(where or ("model.layers.0",))}


def test_the_same_table_in_another_order_and_split_is_no_change() -> None:
    before = [entry(count=2, size=20), entry("all_reduce", "tp")]
    after = [entry("all_reduce", "tp"), entry(count=1, size=10), entry(count=1, size=10)]
    assert collective_changes(before, after) == []


def test_a_stray_all_gather_is_named_with_its_axis_count_bytes_and_module() -> None:
    before = [entry("all_reduce", "tp", 4, 4096)]
    after = [*before, entry("all_gather", "fsdp", 1, 1024, "model.layers.1.mlp")]
    assert collective_changes(before, after) == [
        "1 more all_gather over fsdp (0 → 1, 0 B → 1.00 KiB a rank), new in model.layers.1.mlp"
    ]


def test_a_missing_collective_is_named() -> None:
    assert collective_changes([entry("reduce_scatter", "dp_shard", 2)], []) == [
        "2 fewer reduce_scatter over dp_shard (2 → 0, 2.00 KiB → 0 B a rank), gone from model.layers.0"
    ]


def test_one_more_in_a_known_place_names_the_place() -> None:
    before = [entry("all_gather", "fsdp", 2, 20, "a"), entry("all_gather", "fsdp", 2, 20, "b")]
    after = [entry("all_gather", "fsdp", 2, 20, "a"), entry("all_gather", "fsdp", 3, 30, "b")]
    assert collective_changes(before, after) == ["1 more all_gather over fsdp (4 → 5, 40 B → 50 B a rank), in b"]


def test_other_bytes_and_another_place_are_changes_too() -> None:
    assert collective_changes([entry(size=10)], [entry(size=20)]) == [
        "all_gather over fsdp: 10 B → 20 B a rank in the same 2, in model.layers.0"
    ]
    assert collective_changes([entry()], [entry("all_gather", "fsdp", 2, 2048, "elsewhere")]) == [
        "all_gather over fsdp: issued elsewhere, new in elsewhere, gone from model.layers.0"
    ]


@pytest.mark.parametrize(
    ("field", "value", "verdict", "said"),
    [
        ("flops", 2e9, "regressed", "model FLOPs of a step 1000000000.0 → 2000000000.0"),
        ("graph_breaks", 1, "regressed", "graph breaks 0 → 1"),
        ("recompiles", 3, "regressed", "recompiles 0 → 3"),
    ],
)
def test_flops_breaks_and_recompiles_gate_exactly(field: str, value: float, verdict: str, said: str) -> None:
    head = a_record()
    head["structure"][field] = value
    decided = judge([head], repeats())
    assert decided is not None
    assert decided.verdict == verdict
    assert said in decided.reason
    mirrored = judge(repeats(), [head])
    assert mirrored is not None
    assert mirrored.verdict == ("regressed" if field == "flops" else "improved")


def test_structure_recorded_in_any_one_repeat_is_enough_and_in_none_is_said() -> None:
    head: list[Record] = repeats()
    head[0]["structure"] = head[1]["structure"] = None
    decided = judge(head, repeats())
    assert decided is not None
    assert decided.verdict == "pass"
    head[2]["structure"] = None
    undecided = judge(head, repeats())
    assert undecided is not None
    assert (undecided.verdict, undecided.reason) == ("incomparable", "the structure was not recorded in this run")
    assert judge(head, head) is None


def test_structure_gates_on_another_machine_and_exits_1() -> None:
    stray = copy.deepcopy(a_record()["structure"]["collectives"])
    stray.append({"op": "all_gather", "axis": "tp", "count": 1, "bytes": 64, "where": ["model.layers.1.mlp"]})
    head = repeats(collectives=stray, hardware={"model": "another CPU"})
    comparison = decide(head, baseline_of(repeats()))
    assert comparison.exit_code == 1
    assert "1 more all_gather over tp" in only(comparison).reasons[0]
    assert "model.layers.1.mlp" in only(comparison).reasons[0]


def test_a_wrong_token_count_is_a_regression() -> None:
    def verdict(**tokens: Any) -> str:
        head = a_record(tokens={"per_step": 2048, "valid": [2048] * 12} | tokens)
        decided = judge_tokens([head], repeats())
        assert decided is not None
        return f"{decided.verdict}: {decided.reason}"

    assert verdict() == "pass: 2048 tokens a step"
    assert (
        verdict(per_step=None)
        == "inconclusive: the baseline counts 2048 tokens a step, this run none: it must say them"
    )
    assert verdict(per_step=4096) == "regressed: a step counts 4096 tokens, the baseline's 2048"
    assert verdict(valid=[2048] * 5 + [2047] * 7) == "regressed: step 5 counts 2047 valid tokens, the baseline's 2048"
    assert verdict(valid=[2048] * 11).startswith("regressed: step 11 counts 11 steps")
