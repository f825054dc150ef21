"""A suite's points and includes: what a command line does to them, and what none of them may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndbench.matrix.expand import Matrix, expand
from tests.matrix.conftest import Write, matrix_of, names

LAYOUT = "layouts: {8: [fsdp8]}\n"
POINTS = LAYOUT + "points:\n  long: {training.steps: 16}\n  plain: {}\n"


def steps_of(matrix: Matrix) -> dict[str, int]:
    return {cell.name: cell.config.training.steps for cell in matrix.cells}


def test_a_value_that_points_have_picks_them(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(user, tmp_path, POINTS + "  short: {training.steps: 6}\n", "training.steps=16")
    assert steps_of(matrix) == {"fsdp8-long": 16, "fsdp8-plain": 16}
    assert matrix.excluded == [("fsdp8-short", "the command line asks for training.steps=16")]


def test_a_value_that_no_point_has_goes_to_all_of_them(user: Write, tmp_path: Path) -> None:
    """Before, it left out every point that sets the key."""
    matrix = matrix_of(user, tmp_path, POINTS, "training.steps=8")
    assert steps_of(matrix) == {"fsdp8-long": 8, "fsdp8-plain": 8}
    assert not matrix.excluded


def test_a_group_and_a_world_size_always_pick(user: Write, tmp_path: Path) -> None:
    text = "points:\n  a: {model: llama_tiny, world_size: 2}\n  b: {world_size: 4}\nlayouts: {2: ddp2, 4: ddp4}\n"
    assert names(matrix_of(user, tmp_path, text, "model=qwen3_tiny")) == ["ddp4-b"]
    assert names(matrix_of(user, tmp_path, text, "world_size=2")) == ["ddp2-a"]


def test_values_are_compared_as_what_they_are(user: Write, tmp_path: Path) -> None:
    """YAML reads ``off`` as false; the command line has the text."""
    text = "points: {a: {gate.mode: off}, b: {gate.mode: auto}, c: {gate.mode: \"= 'off'\"}}\n" + LAYOUT
    assert names(matrix_of(user, tmp_path, text, "gate.mode=off")) == ["fsdp8-a"]


def test_an_include_takes_what_no_point_has_and_is_named_by_it(user: Write, tmp_path: Path) -> None:
    text = LAYOUT + "include: [{parallelism: ddp, training.steps: 4}]\n"
    assert steps_of(matrix_of(user, tmp_path, text, "training.steps=5")) == {"fsdp8": 5, "ddp8-steps5": 5}
    text += "points: {six: {training.steps: 6}}\n"
    assert steps_of(matrix_of(user, tmp_path, text, "training.steps=6")) == {"fsdp8-six": 6}
    assert steps_of(matrix_of(user, tmp_path, text, "training.steps=4")) == {"ddp8-steps4": 4}


def test_an_axis_key_picks_includes(user: Write, tmp_path: Path) -> None:
    text = LAYOUT + "axes: {training.steps: [6, 8]}\ninclude: [{parallelism: ddp, training.steps: 4}]\n"
    assert steps_of(matrix_of(user, tmp_path, text, "training.steps=5")) == {"fsdp8-steps5": 5}


def test_a_sweep_is_the_cells_of_each_of_its_values(user: Write, tmp_path: Path) -> None:
    """Before, the cell had the point's steps under the sweep's name, and then no point any but its own."""
    short = POINTS.replace("plain: {}", "short: {training.steps: 6}")
    matrix = matrix_of(user, tmp_path, short, "training.steps=8,16", sweep=True)
    assert steps_of(matrix) == {"fsdp8-long-steps8": 8, "fsdp8-short-steps8": 8, "fsdp8-long-steps16": 16}
    assert matrix.excluded == [("fsdp8-short-steps16", "the command line asks for training.steps=16")]
    matrix = matrix_of(user, tmp_path, POINTS, "training.steps=8,12", sweep=True)
    assert set(steps_of(matrix).values()) == {8, 12}
    assert len(matrix.cells) == 4


def test_a_point_cannot_set_what_an_axis_varies(user: Write, tmp_path: Path) -> None:
    user("suites/x.yaml", POINTS + "axes: {training.steps: [8, 12]}\n")
    with pytest.raises(ValueError, match=r"x\.yaml: point long sets training\.steps, over which axes go already"):
        expand(["suite=x"], tmp_path, here=False)


BATCH = "settings: {all: {training.global_batch_size: '= 2 * dp_replicate * dp_shard'}}\n"


def test_a_computed_value_sees_the_degrees_that_a_group_leaves_open(user: Write, tmp_path: Path) -> None:
    """Before, the batch was -2, or -4 with tp: an error."""
    text = BATCH + "axes: {parallelism: [fsdp, fsdp_tp, hsdp]}\nexclude: [\"layout == 'fsdp8'\"]\n"
    cells = matrix_of(user, tmp_path, text).cells
    batches = {cell.name: cell.config.training.global_batch_size for cell in cells}
    assert batches == {"fsdp4_tp2": 8, "hsdp2x4": 16}


def test_degrees_that_stand_for_no_layout_refuse_their_cell_alone(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(user, tmp_path, BATCH + "axes: {parallelism.dp_shard_size: [-1], parallelism.tp_size: [2, 3]}\n")
    assert names(matrix) == ["fsdp4_tp2"]
    assert "world_size 8 is not a multiple" in matrix.skipped[0][1]


def test_a_computed_degree_comes_before_the_others(user: Write, tmp_path: Path) -> None:
    text = "settings: {all: {parallelism: fsdp, training.steps: '= 2 + dp_shard', parallelism.tp_size: '= %s'}}\n"
    [cell] = matrix_of(user, tmp_path, text % "world_size // 4").cells
    assert (cell.name, cell.config.training.steps) == ("fsdp4_tp2", 6)
    with pytest.raises(
        ValueError, match=r"x\.yaml: parallelism\.tp_size: .* reads parallelism\.dp_shard_size, which is"
    ):
        matrix_of(user, tmp_path, text % "dp_shard")


def test_a_world_size_that_chooses_layouts_is_not_computed(user: Write, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.yaml: world_size: '= 2 \* 4' is computed, but chooses the layouts"):
        matrix_of(user, tmp_path, LAYOUT + "settings: {all: {world_size: '= 2 * 4'}}\n")


def test_a_computed_value_cannot_read_another(user: Write, tmp_path: Path) -> None:
    """It would see that one's default or its value, by the order of the file."""
    computed = '{training.steps: "= training.global_batch_size", training.global_batch_size: "= 8 * tp"}'
    user("suites/x.yaml", f"settings: {{all: {computed}}}\nlayouts: {{8: [fsdp8]}}\n")
    with pytest.raises(ValueError, match=r"training\.steps: '.*' reads training\.global_batch_size, which is computed"):
        expand(["suite=x"], tmp_path, here=False)
