"""A repeat's checkpoints are measured outside its steps: the slowest rank, exact bytes, nothing left behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ndbench.config import Cell
from ndbench.matrix.expand import expand
from ndbench.run.checkpointing import other_layout
from ndbench.run.record import _checkpoint_metrics
from tests.parity.pool import pool
from tests.run import checkpoint_ranks

NAMES = {"save_seconds", "stall_seconds", "load_seconds", "reshard_seconds", "bytes"}


def cells(size: int) -> dict[str, Cell]:
    """The suite's cells on that many CPU ranks, of a smaller model."""
    small = ["model.hidden_size=64", "model.intermediate_size=96", "hardware=cpu", f"world_size={size}"]
    return {cell.name: cell for cell in expand(["suite=checkpoint", *small]).cells}


def test_the_suite_measures_every_kind_of_layout() -> None:
    assert list(cells(8)) == ["ddp8", "fsdp8", "hsdp2x4", "fsdp4_tp2", "fsdp4_cp2"]
    assert all(cell.config.measure.checkpoint for cell in cells(8).values())


@pytest.mark.parametrize(
    ("size", "name", "other"),
    [
        (8, "ddp8", "fsdp4_tp2"),
        (8, "fsdp4_tp2", "fsdp8"),
        (2, "tp2", "fsdp2"),
        (2, "fsdp2", "tp2"),
        (1, "single", None),
    ],
)
def test_a_checkpoint_is_loaded_into_another_layout(size: int, name: str, other: str | None) -> None:
    found = other_layout(cells(size)[name])
    assert (found.parallelism.layout if found is not None else None) == other


def test_figures_are_those_of_the_slowest_rank_and_nothing_is_left(tmp_path: Path) -> None:
    (first, there), (second, _) = pool(2).run(checkpoint_ranks.measured, cells(2)["fsdp2"], tmp_path)
    assert first == second
    assert set(first) == NAMES
    assert all(value > 0 for value in first.values())
    assert len(there) == 1  # one checkpoint at a time
    assert list(tmp_path.iterdir()) == []
    elements = 2 * 256 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64
    assert 0 < first["bytes"] - 3 * 4 * elements < 40_000  # weights and two moments, and the headers
    metrics = _checkpoint_metrics(first)
    assert {name.removeprefix("checkpoint_"): item["value"] for name, item in metrics.items()} == first
    assert {item["direction"] for item in metrics.values()} == {"lower"}


def test_they_are_written_where_the_user_says(tmp_path: Path) -> None:
    cell = cells(1)["single"]
    config = dataclasses.replace(
        cell.config, checkpoint=dataclasses.replace(cell.config.checkpoint, dir=str(tmp_path / "disk"))
    )
    (answer,) = pool(1).run(checkpoint_ranks.measured, dataclasses.replace(cell, config=config), tmp_path)
    figures, there = answer
    assert [path.rpartition("/")[0] for path in there] == [f"disk/.measured-{tmp_path.name}"]
    assert list((tmp_path / "disk").iterdir()) == []
    metric = _checkpoint_metrics(figures)["checkpoint_reshard_seconds"]
    assert (metric["value"], metric["reason"]) == (None, "there is no other layout of this many ranks")


def test_an_engine_without_state_has_no_figures_and_says_why(tmp_path: Path) -> None:
    (figures,) = pool(1).run(checkpoint_ranks.without_state, cells(1)["single"], tmp_path)
    reasons = {item["reason"] for item in _checkpoint_metrics(figures).values()}
    assert reasons == {"engine ndbench does not hand out its training state"}
