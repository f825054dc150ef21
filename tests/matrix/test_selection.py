"""``cells=`` and ``shard=``: which cells of a suite run, and what is said where none would."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndbench.matrix.expand import expand
from tests.matrix.conftest import Write, matrix_of, names


def test_patterns_select_cells_and_the_rest_is_unselected() -> None:
    matrix = expand(["suite=hsdp_tp", "hardware=cpu", "cells=hsdp*,ddp8"])
    assert names(matrix) == ["ddp8", "hsdp2x4", "hsdp4x2", "hsdp2x2_tp2"]
    assert [cell.name for cell in matrix.unselected] == ["fsdp8", "fsdp4_tp2", "fsdp2_tp4", "ddp4_tp2"]


@pytest.mark.parametrize("pattern", ["nothing*", "hsdp*,typo", ",", " "])
def test_a_pattern_that_finds_nothing_is_refused_with_the_names_there_are(pattern: str) -> None:
    with pytest.raises(ValueError, match="no cell of suite hsdp_tp"):
        expand(["suite=hsdp_tp", "hardware=cpu", f"cells={pattern}"])


def test_a_pattern_of_cells_that_are_left_out_is_refused_with_the_reasons(user: Write, tmp_path: Path) -> None:
    """Before, there was no such cell."""
    words = ["suite=peers", "hardware=h200_x2", "cells=cp2-8b_128k-ndbench", "model=llama_1b"]
    with pytest.raises(ValueError) as refused:
        expand(words, here=False)
    assert str(refused.value) == (
        "cells=cp2-8b_128k-ndbench selects cells that are left out: "
        "cp2-8b_128k-ndbench (the command line asks for model=llama_1b)"
    )


def test_cells_that_are_left_out_are_told_by_rule_where_a_pattern_finds_no_other(user: Write, tmp_path: Path) -> None:
    text = "layouts: {2: [ddp2, fsdp2, tp2, cp2]}\nexclude: ['dp_replicate * dp_shard > 1', 'tp > 1']\n"
    with pytest.raises(ValueError) as refused:
        matrix_of(user, tmp_path, text, "world_size=2", "cells=cp2,[dft]*")
    assert str(refused.value) == (
        "cells=[dft]* selects cells that are left out: ddp2, fsdp2 (dp_replicate * dp_shard > 1); tp2 (tp > 1)"
    )
    assert names(matrix_of(user, tmp_path, text, "world_size=2", "cells=*p2")) == ["cp2"]


def test_shards_hold_every_cell_once() -> None:
    whole = names(expand(["suite=hsdp_tp", "hardware=cpu"]))
    parts = [expand(["suite=hsdp_tp", "hardware=cpu", f"shard={k}/3"]) for k in (1, 2, 3)]
    assert sorted(name for part in parts for name in names(part)) == sorted(whole)
    assert all(len(part.cells) + len(part.unselected) == len(whole) for part in parts)


def test_a_shard_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no cell"):
        expand(["suite=smoke", "hardware=cpu", "shard=3/3"])
