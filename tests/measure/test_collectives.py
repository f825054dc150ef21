"""The collectives of a step: every kind, in forward and backward, by axis, with the bytes of the closed form."""

from __future__ import annotations

from typing import Any

import pytest

from ndbench.measure.collectives import totals, wire_bytes
from tests.measure import steps
from tests.parity.pool import pool

KIB = 1024


@pytest.fixture(scope="module")
def fsdp_tp() -> list[dict[str, Any]]:
    """FSDP 2 x TP 2 on every rank, with an all-gather planted in one MLP."""
    return pool(4).run(steps.structure, "model.layers.1.mlp")


def rows(table: list[dict[str, Any]], op: str, axis: str) -> dict[str, tuple[int, int]]:
    return {
        ",".join(row["where"]): (row["count"], row["bytes"]) for row in table if (row["op"], row["axis"]) == (op, axis)
    }


def test_each_collective_is_counted_with_the_bytes_of_its_closed_form() -> None:
    """4 ranks, tensors of 4 KiB (of 1 KiB where a rank gives its shard)."""
    for rank, table in enumerate(pool(4).run(steps.bare_collectives)):
        uneven = 2 * KIB if rank in (0, 3) else 4 * KIB  # half to the first rank, half to the last; own part stays
        assert totals(table) == {
            ("all_gather", "world"): (3, 3 * 3 * KIB),
            ("all_reduce", "world"): (2, 2 * 6 * KIB),
            ("all_to_all", "world"): (3, 2 * 3 * KIB + uneven),
            ("barrier", "world"): (1, 0),
            ("broadcast", "world"): (1, 3 * KIB),
            ("recv", "world"): (1, 0),
            ("reduce_scatter", "world"): (2, 2 * 3 * KIB),
            ("send", "world"): (1, 4 * KIB),
        }


def test_a_rerun_gives_the_same_table_on_every_rank(fsdp_tp: list[dict[str, Any]]) -> None:
    first = fsdp_tp[0]["first"]
    for rank in fsdp_tp:
        assert rank["first"] == first
        assert rank["second"] == first


def test_fsdp_gathers_and_scatters_each_block_as_the_formula_says(fsdp_tp: list[dict[str, Any]]) -> None:
    """Forward gathers every block and the root, backward the blocks again; each group's gradients are scattered once.
    A ring over two ranks sends half of the gathered bytes."""
    block = pool(4).run(steps.block_bytes)[0]
    root = 4 * steps.HIDDEN * (2 * steps.VOCAB + 1)
    sums = totals(fsdp_tp[0]["first"])
    assert sums["all_gather", "dp_shard"] == (1 + 2 * steps.LAYERS, (root + 2 * steps.LAYERS * block) // 2)
    assert sums["reduce_scatter", "dp_shard"] == (1 + steps.LAYERS, (root + steps.LAYERS * block) // 2)


def test_gradients_are_scattered_from_the_module_they_belong_to(fsdp_tp: list[dict[str, Any]]) -> None:
    scattered = rows(fsdp_tp[0]["first"], "reduce_scatter", "dp_shard")
    assert {where: count for where, (count, _) in scattered.items()} == {
        "FSDPLlamaForCausalLM": 1,
        "model.layers.0": 1,
        "model.layers.1": 1,
    }


def test_tp_reduces_after_each_rowwise_and_in_backward_of_each_colwise(fsdp_tp: list[dict[str, Any]]) -> None:
    activation = 4 * steps.TOKENS * steps.HIDDEN
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    expected = {f"model.layers.{layer}.{name}": (1, activation) for layer in range(steps.LAYERS) for name in names}
    assert rows(fsdp_tp[0]["first"], "all_reduce", "tp") == expected


def test_a_collective_outside_of_the_model_has_no_module(fsdp_tp: list[dict[str, Any]]) -> None:
    assert rows(fsdp_tp[0]["first"], "all_reduce", "world") == {"": (1, 2 * 3 * 3 * 4 // 4)}


def test_a_stray_all_gather_is_exactly_one_more_and_its_module_is_named(fsdp_tp: list[dict[str, Any]]) -> None:
    first, stray = fsdp_tp[0]["first"], fsdp_tp[0]["stray"]
    assert [row for row in stray if row not in first] == [
        {"op": "all_gather", "axis": "tp", "count": 1, "bytes": 16, "where": ["model.layers.1.mlp"]}
    ]
    assert [row for row in first if row not in stray] == []


def test_the_tracked_peak_under_fsdp_and_tp_is_the_same_twice(fsdp_tp: list[dict[str, Any]]) -> None:
    for rank in fsdp_tp:
        assert rank["peaks"][0] == rank["peaks"][1]
        assert rank["peaks"][0] == fsdp_tp[0]["peaks"][0]


def test_a_collective_inside_an_operator_of_dtensor_is_seen() -> None:
    assert totals(pool(4).run(steps.inside_an_operator)[0]) == {("all_reduce", "tp"): (1, 8 * 8 * 4)}


def test_no_hook_stays_behind(fsdp_tp: list[dict[str, Any]]) -> None:
    assert {rank["hooks_left"] for rank in fsdp_tp} == {0}


def test_an_unknown_operation_has_no_bytes_rather_than_wrong_ones() -> None:
    assert wire_bytes("fused_all_gather_matmul", {"A": None}, 4, 0) == 0


def test_a_buffer_that_a_communication_thread_still_holds_does_not_count_by_chance() -> None:
    for peaks in pool(4).run(steps.late_release, 12):
        assert set(peaks) == {2**18 * 4}
