"""What each mode of activation checkpointing computes again, in kernels that ran: eager, compiled, under each axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ndbench.parallel import kept
from ndbench.parallel.checkpointing import apply_checkpointing
from ndbench.parallel.config import ParallelismConfig
from tests.parallel import checkpointing_tasks
from tests.parity.cases import case, layout, training
from tests.parity.pool import pool

LAYOUTS = [layout(), layout(1, 2), layout(1, 1, 1, 2), layout(1, 1, 2), layout(1, 1, 2, cp_method="ulysses")]


LAYERS = 2


def runs(parallelism: Any, mode: str, backend: str | None = None) -> dict[str, int]:
    """Kernels of one step on a rank, the same on every other; and the graphs that were compiled."""
    steps = training(activation_checkpointing=mode, compile=backend is not None)
    first, *others = pool(parallelism.world_size).run(
        checkpointing_tasks.kernels, case(parallelism, training=steps), backend
    )
    assert all(each == first for each in others)
    found: dict[str, int] = first
    return found


@pytest.mark.parametrize(
    ("parallelism", "backend"),
    [
        *((each, None) for each in LAYOUTS),
        *((each, "aot_eager") for each in LAYOUTS if each.tp_size * each.cp_size > 1),
    ],
    ids=lambda each: f"{each.layout}_{each.cp_method}" if isinstance(each, ParallelismConfig) else each or "eager",
)
def test_attention_is_computed_again_in_full_mode_only_and_matmuls_where_they_are_not_kept(
    parallelism: Any, backend: str | None
) -> None:
    none, full, selective, attention = (
        runs(parallelism, mode, backend) for mode in ("none", "full", "selective", "attention")
    )
    assert none["attention"] > 0
    assert full["attention"] == 2 * none["attention"]
    assert full["matmul"] > none["matmul"]
    assert (selective["attention"], selective["matmul"]) == (none["attention"], none["matmul"])
    assert attention["attention"] == none["attention"]
    assert attention["matmul"] > none["matmul"]
    if backend is not None and torch.__version__ < "2.13":
        return  # its compiled graphs leave out a few products of Ulysses that nobody reads
    assert attention["matmul"] == full["matmul"]
    # Recomputation ends before a block's last product; only a graph after the ring's break runs to its end.
    broken = backend is not None and parallelism.cp_size > 1 and parallelism.cp_method == "ring"
    assert full["matmul"] == runs(parallelism, "full")["matmul"] + (LAYERS if broken else 0)


@pytest.mark.parametrize("mode", ["full", "attention"])
def test_recomputed_blocks_are_compiled_on_both_sides_of_the_ring(mode: str) -> None:
    """A checkpoint with a break in it is not traced at all, and would leave its block uncompiled in silence."""
    parallelism = layout(1, 1, 2)
    found, none = (runs(parallelism, each, "aot_eager") for each in (mode, "none"))
    assert found["graphs"] == none["graphs"] > 1 + LAYERS


@pytest.mark.parametrize("mode", ["full", "selective", "attention"])
def test_recomputed_blocks_under_tp_are_compiled_whole(mode: str) -> None:
    """Modules of tp set an attribute of their own in forward, which a traced checkpoint must allow."""
    parallelism = layout(1, 1, 1, 2)
    found, none = (runs(parallelism, each, "aot_eager") for each in (mode, "none"))
    assert found["graphs"] == none["graphs"] > 1


@pytest.mark.parametrize("mode", ["full", "attention"])
def test_modes_know_their_names(mode: str) -> None:
    block = torch.nn.Linear(2, 2)
    before = block.forward
    apply_checkpointing([block], mode)
    assert block.forward != before
    with pytest.raises(ValueError, match="known are none, full, selective, attention"):
        apply_checkpointing([block], "atention")


def test_what_forward_keeps_is_recalled_in_order_and_once() -> None:
    forward, again = kept.contexts()
    one, two = torch.ones(2, requires_grad=True) * 2, torch.ones(3)
    kept.keep(one)
    assert kept.recalled() is None, "no forward is there"
    with forward:
        kept.keep(one)
        kept.keep(two, one)
        assert kept.recalled() is None
    with again:
        kept.keep(two)  # a recomputation has nobody to keep it for
        (first,) = kept.recalled() or ()
        assert first.data_ptr() == one.data_ptr()
        assert first.grad_fn is None
        assert [len(each) for each in kept.recalled() or ()] == [3, 2]
        with pytest.raises(RuntimeError, match="a second time"):
            kept.recalled()
    assert kept.recalled() is None


def test_blocks_inside_of_each_other_keep_apart() -> None:
    (outer, outer_again), (inner, inner_again) = kept.contexts(), kept.contexts()
    with outer:
        with inner:
            kept.keep(torch.zeros(1))
        kept.keep(torch.zeros(2))
    for context, length in ((outer_again, 2), (inner_again, 1)):
        with context:
            (found,) = kept.recalled() or ()
            assert len(found) == length
