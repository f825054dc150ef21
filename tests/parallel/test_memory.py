"""Peak memory falls as it should at one global batch: live tensors of the fullest rank, counted exactly, on CPU."""

from __future__ import annotations

from typing import Any

import pytest

from ndbench.config import ModelConfig
from ndbench.parallel.traffic import block_shard, root_shard
from tests.parallel import traffic_tasks
from tests.parity.cases import case, layout, llama, training
from tests.parity.pool import pool

DEEP = llama(vocab_size=512, num_hidden_layers=4, intermediate_size=192)
WIDE_HEAD = llama(vocab_size=4096, num_hidden_layers=1)
STATE = 12
"""Bytes an element of the parameters: float32 weight, and AdamW's two moments."""


def tracked(parallelism: Any, model: ModelConfig = DEEP, **changes: Any) -> tuple[int, int]:
    """Bytes before and at most during a step, of the rank that needs most."""
    fields = {"global_batch_size": 4, "sequence_length": 128, "optimizer": "adamw", "learning_rate": 1e-3}
    at = case(parallelism, model, training=training(**(fields | changes)))
    results = pool(parallelism.world_size).run(traffic_tasks.tracked, at)
    return max(before for before, _ in results), max(peak for _, peak in results)


def peak(*args: Any, **changes: Any) -> int:
    return tracked(*args, **changes)[1]


@pytest.mark.parametrize(
    "parallelism",
    [
        layout(4),
        layout(1, 4),
        layout(2, 2),
        layout(1, 1, 1, 4),
        layout(1, 1, 4),
        layout(1, 2, 1, 2),
        layout(2, 2, 1, 2),
    ],
    ids=lambda each: each.layout,
)
def test_weights_and_optimizer_are_the_closed_form(parallelism: Any) -> None:
    """12 bytes an element of the rank's shards; what is left is the batch and small constants."""
    at = case(parallelism, DEEP)
    shape, _ = traffic_tasks.shapes(at)
    elements = shape.num_hidden_layers * block_shard(shape, parallelism) + root_shard(shape, parallelism)
    rest = tracked(parallelism)[0] - STATE * elements
    assert 0 < rest < 16 * 2**10


@pytest.mark.parametrize("parallelism", [layout(), layout(2)], ids=lambda each: each.layout)
def test_bf16_copies_of_what_nothing_shards_are_two_bytes_more(parallelism: Any) -> None:
    shape, _ = traffic_tasks.shapes(case(parallelism, DEEP))
    elements = shape.num_hidden_layers * block_shard(shape, parallelism) + root_shard(shape, parallelism)
    rest = tracked(parallelism, precision="bf16")[0] - (STATE + 2) * elements
    assert 0 < rest < 16 * 2**10


def test_fsdp_needs_less_than_hsdp_and_that_less_than_ddp() -> None:
    """Before the step by the number of shards exactly (but for the batch), at the peak by what a step adds."""
    ddp, hsdp, fsdp = (tracked(each) for each in (layout(4), layout(2, 2), layout(1, 4)))
    assert hsdp[0] < 0.52 * ddp[0]
    assert fsdp[0] < 0.27 * ddp[0]
    assert hsdp[1] < 0.85 * ddp[1]
    assert fsdp[1] < 0.75 * ddp[1]
    assert fsdp[1] < hsdp[1]


def test_resharding_after_forward_saves_the_gathered_blocks() -> None:
    """Kept, all blocks are whole at once; freed, a block and the next one that is gathered ahead."""
    kept, freed = peak(layout(1, 4, reshard_after_forward=False)), peak(layout(1, 4))
    shape, _ = traffic_tasks.shapes(case(layout(), DEEP))
    block = 4 * block_shard(shape, layout())
    assert kept - freed > (shape.num_hidden_layers - 2) * block


@pytest.mark.parametrize(
    "parallelism", [layout(1, 2), layout(1, 1, 2), layout(1, 2, 1, 2)], ids=lambda each: each.layout
)
def test_the_less_recomputation_keeps_the_less_it_needs(parallelism: Any) -> None:
    none, selective, attention, full = (
        peak(parallelism, activation_checkpointing=mode) for mode in ("none", "selective", "attention", "full")
    )
    assert full < 0.75 * none
    assert full < attention < selective < none


def test_a_chunked_loss_needs_less_than_a_plain_one_and_smaller_chunks_less() -> None:
    """Logits of 256 tokens and 4096 words in float32 take 4 MiB, and a plain loss holds several of them."""
    for parallelism in (layout(1, 2), layout(1, 1, 1, 2)):
        plain, coarse, fine = (peak(parallelism, WIDE_HEAD, loss_chunk_size=chunk) for chunk in (None, 64, 16))
        assert coarse < 0.7 * plain
        assert fine < coarse


def test_each_of_tp_and_cp_shards_activations() -> None:
    alone = peak(layout())
    assert peak(layout(1, 1, 1, 4)) < 0.5 * alone
    assert peak(layout(1, 1, 4)) < 0.5 * alone
