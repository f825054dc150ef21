"""What a suite file means: axes, points, rules and names; and that a mistake in one is a line that names the file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ndbench.matrix.expand import expand
from ndbench.matrix.names import cell_name, token
from ndbench.matrix.points import PointMaker
from ndbench.results.store import check_name
from tests.matrix.conftest import Write, matrix_of, names

EIGHT = "layouts: {8: [ddp8, fsdp8, hsdp2x4, hsdp4x2, fsdp4_tp2, fsdp2_tp4, ddp4_tp2, hsdp2x2_tp2]}\n"


def test_axes_multiply_and_only_what_varies_is_in_a_name(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(
        user,
        tmp_path,
        "axes:\n  training.precision: [fp32, bf16]\n  model: [llama_tiny, qwen3_tiny]\n  training.optimizer: [sgd]\n"
        "layouts: {2: [ddp2, tp2]}\nsettings: {all: {world_size: 2}}\n",
    )
    assert len(matrix.cells) == 8
    assert names(matrix)[:2] == ["ddp2-fp32-llama_tiny", "tp2-fp32-llama_tiny"]
    assert [cell.config.training.precision for cell in matrix.cells] == ["fp32"] * 4 + ["bf16"] * 4
    assert {cell.config.training.optimizer for cell in matrix.cells} == {"sgd"}
    assert matrix.cells[-1].config.model.name == "qwen3_tiny"
    assert matrix.cells[-1].config.training.precision == "bf16"


@pytest.mark.parametrize(
    ("text", "hardware", "said"),
    [
        (
            "layouts: {2: [ddp2, tp2], 1: single}\n",
            "cpu",
            "suite x has layouts for world sizes 1, 2: 2 of 8 devices are used; layouts of 1 device are left out: "
            "single",
        ),
        (
            "layouts: {2: [ddp2], 1: [single], 8: [ddp8, fsdp8, hsdp2x4, hsdp4x2, tp8, cp8]}\n",
            "h100_x4",
            "suite x has layouts for world sizes 1, 2, 8: 2 of 4 devices are used; layouts of 1 device are left out: "
            "single; of 8 devices: ddp8, fsdp8, hsdp2x4, hsdp4x2 and 2 more",
        ),
        (
            "points: {all: {}, one: {world_size: 1}}\nlayouts: {2: [ddp2], 1: [single]}\n",
            "cpu",
            "suite x has layouts for world sizes 1, 2: 2 of 8 devices are used",
        ),
    ],
)
def test_layouts_of_other_world_sizes_are_left_out_by_name(
    user: Write, tmp_path: Path, text: str, hardware: str, said: str
) -> None:
    user("suites/x.yaml", text)
    assert expand(["suite=x", f"hardware={hardware}"], tmp_path, here=False).warnings == [said]


def test_one_layout_alone_needs_no_brackets(user: Write, tmp_path: Path) -> None:
    assert names(matrix_of(user, tmp_path, "layouts: {8: fsdp8}\n")) == ["fsdp8"]


def test_an_axis_fixed_by_the_command_line_keeps_the_names(user: Write, tmp_path: Path) -> None:
    text = "axes: {training.precision: [fp32, bf16]}\nlayouts: {8: [ddp8]}\n"
    whole = {cell.name: cell.cell_id for cell in matrix_of(user, tmp_path, text).cells}
    part = matrix_of(user, tmp_path, text, "training.precision=bf16")
    assert {cell.name: cell.cell_id for cell in part.cells} == {"ddp8-bf16": whole["ddp8-bf16"]}


def test_points_are_named_combinations(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(
        user,
        tmp_path,
        "points:\n  plain: {training.compile: false}\n  lean:\n    training: {activation_checkpointing: full}\n"
        "    parallelism.reshard_after_forward: true\nlayouts: {8: [fsdp8]}\n",
    )
    assert names(matrix) == ["fsdp8-plain", "fsdp8-lean"]
    assert matrix.cells[1].config.training.activation_checkpointing == "full"


def test_groups_may_be_axes_and_points(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(user, tmp_path, "axes: {parallelism: [ddp, fsdp], data: [markov, source]}\n")
    assert names(matrix) == ["ddp8-markov", "ddp8-source", "fsdp8-markov", "fsdp8-source"]


def test_a_cell_that_an_exclude_matches_is_left_out_with_the_rule(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(user, tmp_path, EIGHT + 'exclude: ["tp > 1 and dp_replicate > 1"]\n')
    assert len(matrix.cells) == 6
    assert matrix.excluded == [
        ("ddp4_tp2", "tp > 1 and dp_replicate > 1"),
        ("hsdp2x2_tp2", "tp > 1 and dp_replicate > 1"),
    ]


def test_a_rule_sees_the_resolved_cell(user: Write, tmp_path: Path) -> None:
    text = "factorise: [dp_shard, tp]\nexclude: ['tp > model.num_key_value_heads', 'model.head_dim * 8 != 64']\n"
    matrix = matrix_of(user, tmp_path, text)
    assert names(matrix) == ["fsdp2_tp4", "fsdp4_tp2", "fsdp8"]
    assert matrix.excluded == [("tp8", "tp > model.num_key_value_heads")]


def test_no_exclude_touches_what_an_include_names(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(user, tmp_path, EIGHT + 'exclude: ["tp > 1"]\ninclude: ["layout == \'hsdp2x2_tp2\'"]\n')
    assert names(matrix) == ["ddp8", "fsdp8", "hsdp2x4", "hsdp4x2", "hsdp2x2_tp2"]


def test_an_include_mapping_is_a_further_cell_that_no_exclude_touches(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(
        user,
        tmp_path,
        'layouts: {8: [ddp8, fsdp4_tp2]}\nexclude: ["tp > 1"]\n'
        "include: [{parallelism: hsdp_tp, training.precision: bf16}]\n",
    )
    assert names(matrix) == ["ddp8", "hsdp2x2_tp2-bf16"]


def test_an_exclude_mapping_matches_all_of_its_keys(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(
        user,
        tmp_path,
        "axes: {training.precision: [fp32, bf16]}\nlayouts: {8: [ddp8, tp2_x]}\n".replace(", tp2_x", ", fsdp8")
        + "exclude: [{training.precision: bf16, parallelism.dp_shard_size: 8}]\n",
    )
    assert names(matrix) == ["ddp8-fp32", "fsdp8-fp32", "ddp8-bf16"]
    assert matrix.excluded == [("fsdp8-bf16", "training.precision=bf16, parallelism.dp_shard_size=8")]


def test_an_include_cannot_make_a_refused_cell_run(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(user, tmp_path, "layouts: {8: [ddp8, tp8]}\ninclude: ['tp == 8']\n")
    assert names(matrix) == ["ddp8"]
    assert matrix.skipped[0][1] == "4 kv heads do not divide by tp 8"


def test_settings_of_the_device_win_over_those_of_all(user: Write, tmp_path: Path) -> None:
    user(
        "suites/x.yaml",
        "settings:\n  all: {training.steps: 5, world_size: 2}\n  cpu: {training: {steps: 7}}\n"
        "gate: {mode: off}\nlayouts: {2: [ddp2]}\n",
    )
    config = expand(["suite=x", "hardware=cpu"], tmp_path).config
    assert (config.training.steps, config.gate.mode) == (7, "off")
    assert expand(["suite=x", "hardware=h100_x2"], tmp_path, here=False).config.training.steps == 5


def test_a_computed_setting_follows_the_world(user: Write, tmp_path: Path) -> None:
    text = 'settings: {all: {training.global_batch_size: "= 4 * world_size"}}\naxes: {world_size: [2, 4]}\n'
    matrix = matrix_of(user, tmp_path, text)
    assert [cell.config.training.global_batch_size for cell in matrix.cells] == [8, 16]
    assert (
        matrix_of(user, tmp_path, text, "training.global_batch_size=12").cells[0].config.training.global_batch_size
        == 12
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exlude: []\n", "there is no 'exlude' in a suite (did you mean exclude"),
        ("axes: {training.stps: [1]}\n", "there is no key 'training.stps' (did you mean training.steps"),
        ("axes: {training.steps: [1, many]}\n", "training.steps=many is not a whole number"),
        ("axes: {training.steps: 3}\n", "axes.training.steps is not a list"),
        ("axes: {training.steps: []}\n", "axes.training.steps is not a list"),
        ("axes: {model: [lama_tiny]}\n", "model=lama_tiny is not known (did you mean llama_tiny"),
        ("points: {a: 3}\n", "points.a is not a mapping"),
        ("layouts: {8: [dp8]}\n", "'dp8' is not a layout"),
        ("layouts: {8: [ddp4]}\n", "layout ddp4 is 4 ranks, it stands under world size 8"),
        ("factorise: [dp, tp]\n", "factorise names 'dp'"),
        ("factorise: [tp]\nlayouts: {8: [ddp8]}\n", "layouts or factorise, not both"),
        ("settings: {gpu: {training.steps: 3}}\n", "settings.gpu is not one of all, cpu, cuda"),
        ("settings: {all: {suite: smoke}}\n", "a suite cannot name a suite"),
        ("settings: {all: {hardware: h100_x2}}\n", "settings: hardware is no setting: hardware is found, or named on"),
        ("settings: {cuda: {hardware: {device_count: 2}}}\n", "settings: hardware.device_count is no setting"),
        ("axes: {model: [llama_tiny, '= 3 * tp']}\n", "model: '= 3 * tp' is computed, which names no file"),
        ("settings: {all: {data: '= 3'}}\n", "only keys can be, a group cannot"),
        ("exclude: ['tp > modle.x']\n", "expression 'tp > modle.x' cannot be used"),
        ("exclude: ['tp >']\n", "expression 'tp >' cannot be used"),
        ("exclude: ['__import__(\"os\")']\n", "cannot be used"),
        ("exclude: [3]\n", "rule 3 is neither an expression nor a mapping"),
        (
            "exclude: ['training.micro_batch_size > null']\n",
            "expression 'training.micro_batch_size > null' has no value",
        ),
        ('settings: {all: {training.steps: "= 2 * wurld"}}\n', "names 'wurld'"),
        ("- a\n- b\n", "is not a mapping"),
        ("axes: {\n", "cannot be read"),
        ("axes: 3\n", "x.yaml"),
    ],
)
def test_a_mistake_in_a_suite_names_the_file(user: Write, tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        matrix_of(user, tmp_path, text)
    assert said in str(refused.value)
    assert str(tmp_path / "suites" / "x.yaml") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_suites_mistake_does_not_stop_this_one(user: Write, tmp_path: Path) -> None:
    user("suites/broken.yaml", "axes: {\n")
    assert len(expand(["suite=smoke", "hardware=cpu"], tmp_path).cells) == 2


def test_everything_excluded_is_a_matrix_without_cells(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(user, tmp_path, EIGHT + "exclude: ['true']\n")
    assert not matrix.cells
    assert len(matrix.excluded) == 8


def test_names_are_unique_and_can_be_file_names(user: Write, tmp_path: Path) -> None:
    matrix = matrix_of(
        user,
        tmp_path,
        "axes:\n  training.learning_rate: [1.0e-3, 3.0e-4]\n  training.compile: [false, true]\n"
        "  training.micro_batch_size: [null, 1]\n  training.betas: [[0.9, 0.95], [0.9, 0.99]]\n"
        "  training.activation_checkpointing: [none, full]\n  parallelism.sequence_parallel: [true, false]\n"
        "layouts: {8: [ddp4_tp2]}\n",
    )
    assert len(set(names(matrix))) == len(matrix.cells) == 64
    assert all(check_name(name) == name for name in names(matrix))
    assert names(matrix)[0].startswith("ddp4_tp2-lr0.001-no_compile-micronull-betas_")


def test_points_with_the_same_name_get_their_identity_in_it(user: Write, tmp_path: Path) -> None:
    include = "include: [{parallelism: ddp, training.steps: 4, training.optimizer: sgd}]\n"
    matrix = matrix_of(user, tmp_path, "axes: {parallelism.reshard_after_forward: [true]}\n" + include)
    assert len(set(names(matrix))) == 2
    doubled = "points: {a b: {training.steps: 4}, a/b: {training.steps: 5}}\nlayouts: {8: [ddp8]}\n"
    found = names(matrix_of(user, tmp_path, doubled))
    assert len(set(found)) == 2
    assert all(name.startswith("ddp8-a_b-") for name in found)


def test_a_long_name_is_cut_and_stays_unique() -> None:
    long = [token("data.tokenizer", "a" * 120 + end) for end in "xy"]
    names = {cell_name("fsdp8", [part]) for part in long}
    assert len(names) == 2
    assert all(len(name) <= 100 for name in names)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (
            "axes:\n  training.seed: [MANY]\n  data.seed: [MANY]\n",
            [],
            "suite x has more than 10000 cells: 1000 of training.seed x 1000 of data.seed",
        ),
        (
            "axes:\n  training.seed: [MANY]\npoints: {a: {}, b: {}}\n" + EIGHT,
            [],
            "suite x has more than 10000 cells: 1000 of training.seed x 2 points x the layouts",
        ),
        (
            EIGHT,
            ["training.seed=range(20000)"],
            "suite x has more than 10000 cells: 20000 of training.seed x the layouts",
        ),
    ],
)
def test_too_many_cells_are_refused_before_one_is_made(
    user: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str], said: str
) -> None:
    def made(*_: object) -> None:
        raise AssertionError("a cell is made")

    monkeypatch.setattr(PointMaker, "_point", made)
    with pytest.raises(ValueError) as refused:
        matrix_of(user, tmp_path, text.replace("[MANY]", str([*range(1000)])), *words, sweep=True)
    assert str(refused.value) == said


def test_an_axis_that_the_command_line_fixes_is_one_value_of_many(user: Write, tmp_path: Path) -> None:
    text = f"axes: {{training.seed: {[*range(200)]}, data.seed: {[*range(200)]}}}\n"
    assert len(matrix_of(user, tmp_path, text, "training.seed=7", "data.seed=8").cells) == 1


def test_six_hundred_cells_expand_in_under_three_seconds(user: Write, tmp_path: Path) -> None:
    user(
        "suites/big.yaml",
        "axes:\n  training.sequence_length: [128, 256, 512, 1024, 2048]\n  training.precision: [fp32, bf16]\n"
        "  training.optimizer: [adamw, sgd]\n  training.compile: [false, true]\n  model: [llama_tiny, qwen3_tiny]\n"
        + EIGHT
        + 'exclude: ["tp > model.num_key_value_heads and training.sequence_length > 100"]\n',
    )
    began = time.process_time()  # the processor's time: the machine may be shared
    matrix = expand(["suite=big", "hardware=cpu"], tmp_path)
    assert len(matrix.cells) == 640
    assert time.process_time() - began < 3.0
