"""Techniques change memory and speed, never the numbers: accumulation, checkpointing, chunks, offload, tp's options."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo.testing

from tests.parity import ranks
from tests.parity.cases import case, layout, llama, training
from tests.parity.compare import assert_parity, assert_small, errors
from tests.parity.pool import pool

FSDP_TP = layout(1, 2, 1, 2)
FSDP_CP = layout(1, 2, 2, 1)
HSDP_TP = layout(2, 2, 1, 2)
CP_TP = layout(1, 1, 2, 2)


@pytest.mark.parametrize("parallelism", [layout(2), FSDP_TP, FSDP_CP, HSDP_TP], ids=lambda each: each.layout)
def test_micro_batches_are_the_same_step_as_one_batch(parallelism: Any) -> None:
    assert_parity(case(parallelism, training=training(micro_batch_size=1)))


@contextmanager
def traced_only() -> Iterator[None]:
    """torch.compile's tracing and autograd partitioning, without the code generator, which takes half a minute here."""
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=COUNTED)):
        yield
    torch._dynamo.reset()


class Counter(torch._dynamo.testing.CompileCounterWithBackend):
    """The options are the code generator's."""

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor], **_: Any) -> Any:
        return super().__call__(gm, example_inputs)


COUNTED = Counter("aot_eager")


def graphs() -> int:
    return COUNTED.frame_count


@pytest.mark.parametrize("parallelism", [layout(1, 1, 1, 2), layout(1, 1, 2)], ids=lambda each: each.layout)
def test_compiled_blocks_keep_the_numbers(parallelism: Any) -> None:
    ranks_of_it = pool(parallelism.world_size)
    before = ranks_of_it.run(graphs)
    here = case(parallelism, llama(num_hidden_layers=1), training=training(compile=True), tensors=False)
    assert_small(here, errors(here, traced_only))
    assert all(now > then for now, then in zip(ranks_of_it.run(graphs), before, strict=True)), "nothing was compiled"


@pytest.mark.parametrize(
    "parallelism",
    [
        layout(),
        layout(1, 2),
        layout(1, 1, 1, 2),
        layout(1, 1, 1, 2, sequence_parallel=False),
        layout(1, 1, 2),
        layout(1, 1, 2, cp_method="ulysses"),
        FSDP_TP,
        FSDP_CP,
    ],
    ids=lambda each: f"{each.layout}_{each.cp_method}_{each.sequence_parallel}",
)
@pytest.mark.parametrize("mode", ["full", "attention"])
def test_compiled_blocks_that_are_recomputed_keep_the_numbers(parallelism: Any, mode: str) -> None:
    steps = training(compile=True, activation_checkpointing=mode)
    here = case(parallelism, llama(num_hidden_layers=1), training=steps, tensors=False)
    assert_small(here, errors(here, traced_only))


@pytest.mark.parametrize("mode", ["full", "selective", "attention"])
@pytest.mark.parametrize("parallelism", [FSDP_TP, FSDP_CP, CP_TP], ids=lambda each: each.layout)
def test_activation_checkpointing_keeps_the_numbers(parallelism: Any, mode: str) -> None:
    assert_parity(case(parallelism, training=training(activation_checkpointing=mode)))


@pytest.mark.parametrize("parallelism", [layout(1, 2), FSDP_TP, FSDP_CP, CP_TP], ids=lambda each: each.layout)
def test_a_chunked_loss_keeps_the_numbers(parallelism: Any) -> None:
    """Chunks of 7 tokens divide nothing here."""
    assert_parity(case(parallelism, training=training(loss_chunk_size=7)))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_cpu_offload_keeps_the_numbers(optimizer: str) -> None:
    steps = training(optimizer=optimizer, learning_rate=1e-3)
    parallelism = layout(2, 2, 1, 2, cpu_offload=True)
    assert_parity(case(parallelism, training=steps, tensors=optimizer == "sgd"))


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": False},
        {"loss_parallel": False},
        {"sequence_parallel": False, "loss_parallel": False},
        {"reshard_after_forward": False},
    ],
    ids=lambda options: "_".join(options),
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_options_of_fsdp_and_tp_keep_the_numbers(options: dict[str, bool], tied: bool) -> None:
    assert_parity(case(layout(1, 2, 1, 2, **options), llama(tie_word_embeddings=tied)))


@pytest.mark.parametrize(
    "parallelism", [layout(1, 2), layout(1, 1, 1, 2), FSDP_TP, FSDP_CP, CP_TP], ids=lambda each: each.layout
)
def test_tied_embeddings_stay_one_parameter(parallelism: Any) -> None:
    assert_parity(case(parallelism, llama(tie_word_embeddings=True)))


@pytest.mark.parametrize("parallelism", [FSDP_TP, FSDP_CP, CP_TP], ids=lambda each: each.layout)
def test_packed_documents_are_apart(parallelism: Any) -> None:
    assert_parity(case(parallelism, documents=True))


@pytest.mark.parametrize("limit", [None, 1e-2, 1e6])
def test_clipping_is_by_the_global_norm(limit: float | None) -> None:
    assert_parity(case(layout(2, 2, 1, 2), training=training(max_grad_norm=limit)))


@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("parallelism", [layout(2, 2, 1, 2), FSDP_CP, CP_TP], ids=lambda each: each.layout)
def test_clipping_is_by_value_too(parallelism: Any, offload: bool) -> None:
    """After the norm; at this limit half of the elements are clamped."""
    steps = training(max_grad_value=1e-3, max_grad_norm=None if offload else 1.0)
    assert_parity(case(replace(parallelism, cpu_offload=offload), training=steps))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("parallelism", [layout(2), FSDP_TP, FSDP_CP, HSDP_TP], ids=lambda each: each.layout)
def test_the_learning_rate_moves_once_an_optimizer_step(parallelism: Any, schedule: str) -> None:
    """Two micro-steps each: a rate that moved with them, or with the ranks, gives other weights."""
    moving = training(micro_batch_size=1, schedule=schedule, warmup_steps=1, steps=4, min_learning_rate_ratio=0.1)
    assert_parity(case(parallelism, training=moving))


def test_dims_that_do_not_divide_by_the_shard_count() -> None:
    assert_parity(case(layout(1, 8), llama(hidden_size=40, intermediate_size=50, head_dim=6)))


@pytest.mark.parametrize(
    "parallelism",
    [layout(), layout(1, 1, 1, 2), layout(2), layout(1, 4), FSDP_TP, FSDP_CP, HSDP_TP],
    ids=lambda each: each.layout,
)
def test_bf16_is_near_float32(parallelism: Any) -> None:
    """Weights at an ordinary scale: bf16 has 8 bits, so a bound on it says something at 0.02 only."""
    at = case(parallelism, llama(initializer_range=0.02), training=training(precision="bf16"), weight_jitter=0.02)
    found = errors(replace(at, steps=1))
    assert found["loss"][0] < 3e-4
    assert found["norm"][0] < 3e-3
    assert found["gradients"][0] < 3e-2


@pytest.mark.parametrize("optimizer", ["torch.optim.Adamax", "tests.parity.optimizers.NormedSGD"])
def test_any_torch_optimizer_is_the_same_in_every_layout(optimizer: str) -> None:
    """One that works element by element, and one that needs the norm of whole parameters."""
    steps = training(optimizer=optimizer, learning_rate=1e-2)
    one, other = (
        pool(each.world_size).run(ranks.train, case(each, training=steps, tensors=False, silent=1))[0]["loss"]
        for each in (layout(2), FSDP_TP)
    )
    assert one == pytest.approx(other, rel=1e-4)
