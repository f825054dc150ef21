"""Every step sends exactly what the closed form says, by operation and mesh axis, point-to-point included."""

from __future__ import annotations

from typing import Any

import pytest

from ndbench.parallel.traffic import difference, step_traffic
from tests.parallel import traffic_tasks
from tests.parity.cases import Case, all_layouts, case, layout, llama, training
from tests.parity.pool import pool

EVEN = llama(vocab_size=128)


def wrong(at: Case, ranks: int | None = None) -> dict[Any, str]:
    """What differs from the closed form on the first ``ranks`` ranks (all), by rank, operation and axis."""
    model, step = traffic_tasks.shapes(at)
    form = step_traffic(model, at.parallelism, step)
    results = pool(at.parallelism.world_size).run(traffic_tasks.recorded, at)[:ranks]
    return {
        (rank, *key): line
        for rank, each in enumerate(results)
        for key, line in difference(each["totals"], form).items()
    }


@pytest.mark.parametrize("parallelism", all_layouts(), ids=lambda each: f"{each.world_size}-{each.layout}")
def test_a_step_sends_what_the_closed_form_says(parallelism: Any) -> None:
    model = llama(vocab_size=128, num_key_value_heads=8 if parallelism.tp_size == 8 else 4)
    assert wrong(case(parallelism, model)) == {}


@pytest.mark.parametrize(
    "parallelism",
    [
        layout(1, 1, 4, cp_method="ulysses"),
        layout(1, 2, 2, 2, cp_method="ulysses"),
        layout(1, 1, 1, 4, sequence_parallel=False),
        layout(1, 2, 1, 2, sequence_parallel=False, loss_parallel=False),
        layout(2, 2, 1, 2, loss_parallel=False),
        layout(1, 1, 2, 2, sequence_parallel=False),
        layout(1, 4, reshard_after_forward=False),
        layout(2, 2, 1, 2, reshard_after_forward=False),
    ],
    ids=str,
)
def test_so_does_each_option_of_an_axis(parallelism: Any) -> None:
    assert wrong(case(parallelism, EVEN)) == {}


TECHNIQUES: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"precision": "bf16"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "attention"},
    {"loss_chunk_size": 7},
]


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda each: "_".join(map(str, each.values())))
@pytest.mark.parametrize(
    "parallelism",
    [
        layout(2, 2, 1, 2),
        layout(1, 1, 2, 2),
        layout(1, 1, 4),
        layout(1, 2, 2, cp_method="ulysses"),
        layout(1, 2, 1, 2, sequence_parallel=False),
    ],
    ids=lambda each: f"{each.layout}_{each.cp_method}_{each.sequence_parallel}",
)
def test_so_does_each_technique(parallelism: Any, technique: dict[str, Any]) -> None:
    assert wrong(case(parallelism, EVEN, training=training(**technique))) == {}


def test_dims_that_do_not_divide_are_padded_on_the_wire() -> None:
    """Rank 0 has the fullest shards; 131 tokens over tp 2, then 66 rows over 4 ranks."""
    uneven = llama(hidden_size=40, intermediate_size=50, head_dim=6, tie_word_embeddings=True)
    assert wrong(case(layout(1, 4, 1, 2), uneven), ranks=1) == {}
    assert wrong(case(layout(1, 8), uneven), ranks=1) == {}


def test_a_stray_collective_is_one_too_many() -> None:
    at = case(layout(1, 2, 1, 2), EVEN)
    model, step = traffic_tasks.shapes(at)
    form = step_traffic(model, at.parallelism, step)
    for each in pool(4).run(traffic_tasks.recorded, at, "model.layers.1.mlp"):
        assert difference(each["totals"], form) == {
            ("all_gather", "world"): "1 calls of 12 bytes, the closed form says 0 of 0"
        }
        stray = [row for row in each["table"] if (row["op"], row["axis"]) == ("all_gather", "world")]
        assert [row["where"] for row in stray] == [["model.layers.1.mlp"]]


def test_a_gather_more_than_needed_is_seen() -> None:
    """Resharding the root, too, would gather embedding and head a second time."""
    at = case(layout(1, 4), EVEN)
    model, step = traffic_tasks.shapes(at)
    kept = step_traffic(model, layout(1, 4, reshard_after_forward=False), step)
    (first, *_) = pool(4).run(traffic_tasks.recorded, at)
    assert difference(first["totals"], kept).keys() == {("all_gather", "dp_shard")}
