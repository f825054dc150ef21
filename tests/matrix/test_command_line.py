"""Overrides: every key works, every mistake is one readable line, and the command line wins over the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndbench.config import Cell
from ndbench.matrix.expand import expand
from tests.matrix.conftest import Write, names


def single(*overrides: str) -> Cell:
    matrix = expand([*overrides], here=False)
    assert len(matrix.cells) == 1
    return matrix.cells[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("modle=llama_tiny", "there is no key 'modle' (did you mean model"),
        ("training.stps=3", "there is no key 'training.stps' (did you mean training.steps"),
        ("model.hidden_size.x=3", "'model.hidden_size' is a single value, it has no 'x'"),
        ("model=lama_tiny", "model=lama_tiny is not known (did you mean llama_tiny"),
        ("suite=hsdp_pt", "suite=hsdp_pt is not known (did you mean hsdp_tp?)"),
        ("hardware=h100_x0", "hardware=h100_x0 is not known"),
        ("hardware=h999", "hardware=h999 is not known"),
        ("engine=nbench", "engine=nbench is not known (did you mean ndbench?)"),
        ("parallelism=[ddp,fsdp]", "parallelism is a group, choose one of cp, ddp"),
        ("training.steps=many", "training.steps=many is not a whole number"),
        ("training.steps=2.5", "training.steps=2.5 is not a whole number"),
        ("training.steps=true", "training.steps=true is not a whole number"),
        ("training.steps=null", "training.steps=null is not a whole number"),
        ("training.steps=0", "training.steps=0 must be at least 1"),
        ("training.compile=1", "training.compile=1 is not true or false"),
        ("training.learning_rate=nan", "training.learning_rate=nan is not a number"),
        ("model.hf.rope_theta=inf", "model.hf.rope_theta=inf is not a finite number"),
        ("model.hf={a: [1, nan]}", "is not a mapping"),
        ("training.precision=fp23", "training.precision=fp23 is not one of fp32, bf16, fp8 (did you mean fp32?)"),
        ("gate.mode=required", "gate.mode=required is not one of auto, require, off (did you mean require?)"),
        ("data.valid_fraction=2", "data.valid_fraction=2.0 must be at most 1"),
        ("model.tp_plan=plan.yaml", "model.tp_plan=plan.yaml is not a mapping or null"),
        ("training.steps", "'training.steps' is not KEY=VALUE"),
        ("~training.steps=3", "keys cannot be deleted"),
        ("training.steps=1,2", "names several values: sweep over them with -m (--multirun)"),
        ("data.files=a,b", "names several values: write a list as data.files=[a,b]"),
        ("training.steps={", "cannot be read"),
        ("shard=5/4", "shard=5/4 is not K/N"),
        ("shard=half", "shard=half is not K/N"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(override: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        expand([override, "world_size=8"])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_three_way_tensor_parallel_on_four_heads_names_the_numbers() -> None:
    with pytest.raises(ValueError, match="4 attention heads do not divide by tp 3"):
        expand(["model.num_attention_heads=4", "model.head_dim=16", "parallelism.tp_size=3", "world_size=3"])


def test_heads_are_named_even_when_the_world_does_not_divide_either() -> None:
    with pytest.raises(ValueError, match=r"world_size 8 is not a multiple.*8 attention heads do not divide by tp 3"):
        expand(["parallelism.tp_size=3", "world_size=8"])


def test_a_product_that_is_not_the_world_size_names_every_degree() -> None:
    degrees = ["parallelism.dp_replicate_size=2", "parallelism.dp_shard_size=2", "parallelism.tp_size=3"]
    with pytest.raises(ValueError, match=r"dp_replicate 2 x dp_shard 2 x cp 1 x tp 3 = 12 .*world_size is 8"):
        expand([*degrees, "hardware=cpu"])


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("world_size=4", "world_size", 4),
        ("training.steps=20", "training.steps", 20),
        ("training.global_batch_size=32", "training.global_batch_size", 32),
        ("training.micro_batch_size=2", "training.micro_batch_size", 2),
        ("training.sequence_length=64", "training.sequence_length", 64),
        ("training.precision=bf16", "training.precision", "bf16"),
        ("training.optimizer=sgd", "training.optimizer", "sgd"),
        ("training.learning_rate=1e-3", "training.learning_rate", 1e-3),
        ("training.betas=[0.9,0.99]", "training.betas", [0.9, 0.99]),
        ("measure.repeats=7", "measure.repeats", 7),
        ("measure.warmup=3", "measure.warmup", 3),
        ("measure.profile=true", "measure.profile", True),
        ("measure.handicap=2.0", "measure.handicap", 2.0),
        ("measure.handicap_cells=fsdp8,ddp*", "measure.handicap_cells", "fsdp8,ddp*"),
        ("measure.budget=20m", "measure.budget", "20m"),
        ("gate.mode=off", "gate.mode", "off"),
        ("gate.mode=require", "gate.mode", "require"),
        ("gate.min_effect=0.02", "gate.min_effect", 0.02),
        ("gate.alpha=0.05", "gate.alpha", 0.05),
        ("gate.resolve=0.1", "gate.resolve", 0.1),
        ("baseline=git:HEAD", "baseline", "git:HEAD"),
        ("baseline=/a b/c=d", "baseline", "/a b/c=d"),
        ("results.dir=/tmp/a=b, c", "results.dir", "/tmp/a=b, c"),
        ("data=source", "data.name", "source"),
        ("tracker=none", "tracker.name", "none"),
        ("launcher=local", "launcher.name", "local"),
        ("engine=command", "engine.name", "command"),
        ("engine.command=python3 -c 'x=1, 2'", "engine.command", "python3 -c 'x=1, 2'"),
        ("model.hf.rope_theta=5.0", "model.hf", {"rope_theta": 5.0}),
        ("+model.hf.rope_theta=5.0", "model.hf", {"rope_theta": 5.0}),
        ("parallelism=hsdp", "parallelism.dp_replicate_size", 2),
        ("fingerprint.redact=[host]", "fingerprint.redact", ["host"]),
    ],
)
def test_an_override_reaches_the_cell(override: str, path: str, value: object) -> None:
    extra = ["engine.command=true"] if override == "engine=command" else []
    found: object = single(override, *extra, "hardware=cpu").config
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_every_default_of_a_cell_is_filled() -> None:
    config = single("parallelism=hsdp_tp", "hardware=cpu").config
    assert config.parallelism.sizes == {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
    assert (config.world_size, config.hardware.device_count) == (8, 8)
    assert (config.training.micro_batch_size, config.model.head_dim) == (4, 8)
    assert (config.measure.repeats, config.gate.min_effect, config.gate.resolve) == (3, 0.05, None)
    gpu = single("parallelism=hsdp_tp", "hardware=h100_x8").config
    assert (gpu.measure.repeats, gpu.gate.min_effect, gpu.gate.resolve) == (5, 0.01, None)


def test_degrees_that_are_all_given_make_the_world() -> None:
    assert single("parallelism=single", "hardware=cpu").world_size == 1
    assert single("parallelism.dp_shard_size=2", "parallelism.tp_size=2", "hardware=cpu").name == "fsdp2_tp2"


def test_equivalent_overrides_make_the_same_cell() -> None:
    by_group = single("parallelism=hsdp_tp", "hardware=cpu")
    by_keys = single("parallelism.tp_size=2", "hardware=cpu", "parallelism.dp_replicate_size=2", "world_size=8")
    assert by_group.cell_id == by_keys.cell_id
    assert by_group.cell_id != single("parallelism=hsdp_tp", "hardware=cpu", "training.steps=99").cell_id


def test_the_machine_is_no_part_of_a_cells_identity() -> None:
    assert single("hardware=h100_x8").cell_id == single("hardware=cpu").cell_id


def test_without_a_gpu_auto_is_eight_cpu_ranks() -> None:
    config = single("hardware=auto").config
    assert (config.hardware.name, config.world_size) == ("cpu", 8)


def test_the_command_line_wins_over_a_suites_settings() -> None:
    matrix = expand(["suite=hsdp_tp", "hardware=cpu", "training.steps=5", "data=source", "model=qwen3_tiny"])
    assert {cell.config.training.steps for cell in matrix.cells} == {5}
    assert {cell.config.data.name for cell in matrix.cells} == {"source"}
    assert {cell.config.model.name for cell in matrix.cells} == {"qwen3_tiny"}


def test_a_group_of_the_command_line_takes_the_suites_keys_of_that_group_with_it() -> None:
    matrix = expand(["suite=hsdp_tp", "hardware=h100_x8", "training=default"], here=False)
    assert {cell.config.training.global_batch_size for cell in matrix.cells} == {16}


def test_a_degree_of_the_command_line_picks_the_layouts_that_have_it() -> None:
    matrix = expand(["suite=hsdp_tp", "hardware=cpu", "parallelism.tp_size=2"])
    assert names(matrix) == ["fsdp4_tp2", "ddp4_tp2", "hsdp2x2_tp2"]
    assert ("ddp8", "the command line asks for parallelism.tp_size=2") in matrix.excluded


def test_a_layout_of_the_command_line_picks_that_layout() -> None:
    assert names(expand(["suite=hsdp_tp", "hardware=cpu", "parallelism=hsdp_tp"])) == ["hsdp2x2_tp2"]


def test_a_degree_that_no_layout_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no cell of suite hsdp_tp fits: .*tp_size=3; its cells: ddp8, fsdp8"):
        expand(["suite=hsdp_tp", "hardware=cpu", "parallelism.tp_size=3"])


def test_a_sweep_is_one_matrix_with_readable_names() -> None:
    matrix = expand(["training.precision=fp32,bf16", "parallelism=ddp,fsdp", "hardware=cpu"], sweep=True)
    assert names(matrix) == ["ddp8-fp32", "fsdp8-fp32", "ddp8-bf16", "fsdp8-bf16"]


def test_a_sweep_over_a_range_and_within_a_suite() -> None:
    matrix = expand(["suite=smoke", "hardware=cpu", "training.sequence_length=range(64,193,64)"], sweep=True)
    assert names(matrix)[:2] == ["ddp2-seq64", "fsdp2-seq64"]
    assert len(matrix.cells) == 6


def test_a_sweep_says_which_of_its_cells_are_refused() -> None:
    matrix = expand(["parallelism.tp_size=1,2,3", "hardware=cpu"], sweep=True)
    assert names(matrix) == ["fsdp8", "fsdp4_tp2"]
    assert "tp 3" in matrix.skipped[0][1]


def test_a_swept_layout_in_a_suite_of_layouts_is_refused() -> None:
    with pytest.raises(ValueError, match="suite hsdp_tp names its layouts"):
        expand(["suite=hsdp_tp", "parallelism=ddp,fsdp", "hardware=cpu"], sweep=True)


def test_layouts_that_are_the_same_on_one_rank_are_one_cell() -> None:
    matrix = expand(["parallelism=ddp,fsdp", "world_size=1", "hardware=cpu"], sweep=True)
    assert names(matrix) == ["single"]


def test_a_cell_too_large_for_the_device_is_skipped_with_the_bytes() -> None:
    matrix = expand(["model=llama_70b", "hardware=h100_x8", "parallelism=ddp", "training=gpu"], here=False)
    assert not matrix.cells
    assert "GiB a device, h100 has 79.6 GiB" in matrix.skipped[0][1]


def test_a_suite_takes_the_largest_model_whose_cells_all_fit(user: Write, tmp_path: Path) -> None:
    user(
        "suites/fit.yaml",
        "settings: {cuda: {model: [llama_70b, llama_8b, llama_1b], training: gpu}}\nfactorise: [dp_shard]\n",
    )
    assert expand(["suite=fit", "hardware=h200_x8"], tmp_path, here=False).config.model.name == "llama_8b"
    assert expand(["suite=fit", "hardware=h200_x1"], tmp_path, here=False).config.model.name == "llama_1b"


def test_gpus_that_are_not_here_are_said_when_it_is_to_run_here() -> None:
    matrix = expand(["suite=hsdp_tp", "hardware=h100_x8"], here=True)
    assert not matrix.cells
    assert {reason for _, reason in matrix.skipped} == {"needs 8 h100 devices, this machine shows 0"}


def test_more_ranks_than_devices_is_skipped_with_both_numbers() -> None:
    matrix = expand(["hardware=h100_x8", "world_size=16"], here=False)
    assert [reason for _, reason in matrix.skipped] == ["needs 16 devices, h100 has 8"]


def test_an_engine_of_the_users_refuses_by_its_own_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_engine_module.py").write_text(
        "class Mine:\n"
        "    def refuse(self, cell):\n"
        "        return 'only tp 1' if cell.parallelism.tp_size > 1 else None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cell = single("engine=my_engine_module:Mine", "hardware=cpu")
    assert cell.config.engine.name == "Mine"
    with pytest.raises(ValueError, match="only tp 1"):
        expand(["engine.target=my_engine_module:Mine", "parallelism=fsdp_tp", "hardware=cpu"])


def test_a_warm_up_that_leaves_no_timed_step_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"measure.warmup 5 leaves no timed step of training.steps 5"):
        expand(["measure.warmup=5", "training.steps=5"])


def test_a_blank_command_is_refused_like_none() -> None:
    with pytest.raises(ValueError, match=r"needs engine.command"):
        expand(["engine=command", "engine.command='  '", "world_size=1"])


def test_threads_of_a_rank_are_those_the_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ndbench.measure.fingerprint.usable_cpus", lambda: 6)
    (cell,) = expand(["world_size=2", "parallelism=fsdp"]).cells
    assert cell.config.launcher.omp_num_threads == 3


def test_cells_of_all_sizes_have_one_folder_of_baselines() -> None:
    cells = expand(["world_size=4,16", "parallelism=fsdp"], sweep=True).cells
    assert {cell.config.hardware.device_count for cell in cells} == {8}


def test_a_list_is_advised_only_where_it_is_taken() -> None:
    for override in ("training.precision=fp32,bf16", "model=llama_tiny,qwen3_tiny", "training.steps=1,2"):
        with pytest.raises(ValueError) as refused:
            expand([override, "world_size=8"])
        assert "write a list" not in str(refused.value)
    (cell,) = expand(["data.files=[a,b]", "world_size=1", "parallelism=single"]).cells
    assert cell.config.data.files == ["a", "b"]
    (cell,) = expand(["data.files=corpus", "world_size=1", "parallelism=single"]).cells
    assert cell.config.data.files == ["corpus"]
