"""Replicas sum their gradients in float32 buckets, in one order on all ranks, whatever backward leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ndbench.parallel.replicate import units_of
from tests.parallel import replicate_tasks
from tests.parity.cases import case, layout, llama, training
from tests.parity.compare import assert_parity
from tests.parity.pool import pool


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_sums_are_those_of_all_ranks_and_a_parameter_that_a_rank_leaves_out_counts_as_zeros(
    low: bool, micro_batches: int
) -> None:
    """Each rank leaves out another block, one is used by none, and a scalar and an odd size are in between."""
    for found in pool(2).run(replicate_tasks.uneven, low, micro_batches):
        assert found["dtypes"] == ["torch.float32"]
        assert found["wrong"] == []
        assert found["unused"] == 0.0
        assert found["left"] == [], "forgotten, nothing is held"


def test_all_reduces_start_while_backward_runs_and_only_in_the_last() -> None:
    for found in pool(2).run(replicate_tasks.started, 3):
        assert found == [0, 0, 3], "buckets under way at the end of each backward"


def test_a_head_is_summed_first_then_blocks_from_the_last_and_the_embedding_at_the_end() -> None:
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(3, 2),
            "blocks": torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2)),
            "norm": torch.nn.RMSNorm(2),
            "head": torch.nn.Linear(2, 3, bias=False),
        }
    )
    names = [name for name, _ in model.named_parameters()]
    units = units_of(list(model.parameters()), model["blocks"])  # type: ignore[arg-type]
    assert [[names[index].rpartition(".")[0] for index in unit] for unit in units] == [
        ["norm", "head"],
        ["blocks.1", "blocks.1"],
        ["blocks.0", "blocks.0"],
        ["embedding"],
    ]


@pytest.mark.parametrize(
    ("parallelism", "changes"),
    [
        (layout(2), {"micro_batch_size": 1, "optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1}),
        (layout(2, 1, 1, 2), {"micro_batch_size": 1}),
        (layout(2, 1, 1, 2), {"max_grad_value": 1e-3, "max_grad_norm": None}),
    ],
    ids=["ddp2_adamw", "ddp2_tp2", "ddp2_tp2_by_value"],
)
def test_replicas_are_one_process(parallelism: Any, changes: dict[str, Any]) -> None:
    at = case(parallelism, llama(tie_word_embeddings=True), training=training(**changes))
    assert_parity(at if at.training.optimizer == "sgd" else case(parallelism, training=at.training, tensors=False))


def test_replicas_of_a_tp_shard_are_known_to_hold_it() -> None:
    """A checkpoint writes a part once and must know who has it."""
    everyone = (0, 1, 2, 3)
    shards = [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert pool(4).run(replicate_tasks.holding) == [[shard, everyone] for shard in shards]
