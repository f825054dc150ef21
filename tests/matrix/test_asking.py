"""Engines are asked about the cells that are selected, and an option that one does not have is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ndbench.config import Cell
from ndbench.engines.protocol import UnknownOptionError, load_engine
from ndbench.matrix import points
from ndbench.matrix.expand import expand

PEERS = ["suite=peers", "hardware=h200", "hardware.device_count=1"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the cells that an engine was asked about."""
    names: list[str] = []

    def refusals(cell: Cell) -> list[str]:
        names.append(cell.name)
        return []

    monkeypatch.setattr(points, "refusals", refusals)
    return names


def test_cells_that_are_left_out_are_not_asked_about(asked: list[str]) -> None:
    matrix = expand([*PEERS, "cells=single-one-ndbench"], here=False)
    assert asked == ["single-one-ndbench"]
    assert [cell.name for cell in matrix.cells] == asked
    assert len(matrix.unselected) >= 2


def test_a_shard_asks_about_its_own(asked: list[str]) -> None:
    every: list[str] = []
    for shard in ("1/3", "2/3", "3/3"):
        asked.clear()
        matrix = expand([*PEERS, f"shard={shard}"], here=False)
        assert matrix.unselected
        assert not set(asked) & {cell.name for cell in matrix.unselected}
        every += [cell.name for cell in matrix.cells]
    assert sorted(every) == sorted(cell.name for cell in expand(PEERS, here=False).cells)
    assert len(set(every)) == len(every) == 3


def test_an_option_that_an_engine_does_not_have_is_one_plain_line() -> None:
    with pytest.raises(UnknownOptionError) as error:
        load_engine("torchtitan", attention="cudnn")
    line = "engine torchtitan has no option 'attention' (engine.options.attention); its options: tp_autocast"
    assert str(error.value) == line
    with pytest.raises(UnknownOptionError, match=r"engine command has no option 'x' .*; it has none"):
        load_engine("command", x=1)
    matrix = expand([*PEERS, "+engine.options.attention=cudnn"], here=False)
    refused = {cell.name: reason for cell, reason in matrix.skipped}
    assert refused["single-one-torchtitan"] == line
    assert "single-one-ndbench" in {cell.name for cell in matrix.cells}
    with pytest.raises(ValueError, match="engine ndbench has no option 'atention'"):
        expand(["model=llama_tiny", "hardware=cpu", "+engine.options.atention=x"])
