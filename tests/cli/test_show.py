"""``show`` tells what a matrix would be, here and on other machines, and runs nothing; ``list`` what to choose from."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ndbench.matrix.expand import expand
from ndbench.matrix.sources import GROUPS
from ndbench.report.cost import costs
from ndbench.results.store import RunFolder
from tests.cli.conftest import Command
from tests.records import a_record

LAYOUTS_AT_8 = ["ddp8", "fsdp8", "hsdp2x4", "hsdp4x2", "fsdp4_tp2", "fsdp2_tp4", "ddp4_tp2", "hsdp2x2_tp2"]


@pytest.fixture(autouse=True)
def _nothing_runs(no_process: None) -> None:
    pass


def test_every_cell_has_its_layout_size_memory_and_time(ndbench: Command) -> None:
    result = ndbench("show", "suite=hsdp_tp", "--json")
    assert result.code == 0
    shown = json.loads(result.out)
    assert [cell["name"] for cell in shown["cells"]] == LAYOUTS_AT_8
    for cell in shown["cells"]:
        assert (cell["world_size"], cell["model"], cell["repeats"]) == (8, "llama_tiny", 3)
        assert cell["tokens_per_step"] == 16 * 128
        assert cell["memory_bytes_per_rank"] > 0
        assert cell["seconds"] > 0
    assert shown["total_seconds"] == pytest.approx(sum(cell["seconds"] for cell in shown["cells"]))


def test_another_machine_is_shown_from_this_one(ndbench: Command) -> None:
    shown = json.loads(ndbench("show", "suite=hsdp_tp", "hardware=h100_x8", "--json").out)
    assert [cell["name"] for cell in shown["cells"]] == LAYOUTS_AT_8
    assert {cell["model"] for cell in shown["cells"]} <= {"llama_8b", "llama_1b"}
    assert all(1e9 < cell["memory_bytes_per_rank"] < 80 * 2**30 for cell in shown["cells"])
    assert all(cell["seconds_basis"] == "flops" for cell in shown["cells"])


def test_the_table_fits_in_100_columns_and_names_every_cell(ndbench: Command) -> None:
    for argv in (
        ["suite=hsdp_tp"],
        ["suite=layouts"],
        ["suite=scaling", "hardware=h200_x8"],
        ["model=llama_tiny,qwen3_tiny", "training.precision=fp32,bf16", "parallelism=fsdp,ddp", "-m"],
    ):
        result = ndbench("show", *argv)
        assert result.code == 0, result.err
        table = result.out.split("\n\n")[0]
        assert max(len(line) for line in table.splitlines()) <= 100
        shown = json.loads(ndbench("show", *argv, "--json").out)
        assert all(cell["name"] in result.out for cell in shown["cells"])


def test_what_is_left_out_is_named_with_its_reason(ndbench: Command) -> None:
    folder = Path("mine/suites")
    folder.mkdir(parents=True)
    (folder / "narrow.yaml").write_text(
        "axes: {parallelism.tp_size: [1, 2, 4, 8], training.sequence_length: [64, 128]}\n"
        "settings: {all: {world_size: 8, parallelism.dp_shard_size: -1, model: llama_tiny}}\n"
        'exclude: ["tp == 2 and training.sequence_length == 64"]\n'
    )
    argv = ["show", "suite=narrow", "--config-dir", "mine", "cells=*seq128"]
    shown = json.loads(ndbench(*argv, "--json").out)
    assert [entry["reason"] for entry in shown["excluded"]] == ["tp == 2 and training.sequence_length == 64"]
    assert "4 kv heads do not divide by tp 8" in shown["skipped"][0]["reason"]
    assert len(shown["unselected"]) == 3
    text = ndbench(*argv).out
    assert "excluded: 1 cell" in text
    assert "4 kv heads do not divide by tp 8" in text
    assert "not selected: 3 cells" in text


def test_a_matrix_without_a_runnable_cell_is_exit_3(ndbench: Command) -> None:
    result = ndbench("show", "suite=hsdp_tp", "hardware=l40s_x1", "model=llama_70b")
    assert result.code == 3
    assert "cannot run: 1 cell" in result.out


def test_time_comes_from_stored_repeats_of_the_same_cell(tmp_path: Path) -> None:
    cell = expand(["suite=hsdp_tp", "cells=fsdp8", "hardware=cpu"]).cells[0]
    guessed = costs([cell], tmp_path)[cell.name]
    assert guessed.basis == "rule"
    folder = RunFolder.create(tmp_path, "20261130-061500-ab12cd")
    for repeat, end in enumerate(("06:15:10", "06:15:20")):
        folder.write_record(
            a_record(cell.name, cell=cell, repeat=repeat) | {"end": f"2026-11-30T{end}+00:00"}  # from 06:15:00
        )
    timed = costs([cell], tmp_path)[cell.name]
    assert (timed.basis, timed.seconds) == ("stored", 3 * 15.0)

    other = dataclasses.replace(cell.config, training=dataclasses.replace(cell.config.training, steps=1000))
    assert costs([dataclasses.replace(cell, config=other)], tmp_path)[cell.name].basis == "rule"


def test_an_unreadable_record_only_makes_the_estimate_coarser(tmp_path: Path) -> None:
    cell = expand(["suite=hsdp_tp", "cells=fsdp8", "hardware=cpu"]).cells[0]
    folder = RunFolder.create(tmp_path, "20261130-061500-ab12cd")
    for content in ("", "[]", '{"repeats": 3}', '{"repeats": [1]}', '{"cell_id": "x", "cell": {}'):
        folder.record_path(cell.name, 0).write_text(content)
        assert costs([cell], tmp_path)[cell.name].basis == "rule"


def test_500_cells_are_shown_in_under_3_seconds(tmp_path: Path) -> None:
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "many.yaml").write_text(
        "axes:\n"
        "  model: [llama_tiny, qwen3_tiny]\n"
        "  parallelism.tp_size: [1, 2, 4]\n"
        f"  training.sequence_length: {[64 * n for n in range(1, 13)]}\n"
        "  training.precision: [fp32, bf16]\n"
        "  training.global_batch_size: [16, 32, 64, 128]\n"
        "settings: {all: {world_size: 8, parallelism.dp_shard_size: -1}}\n"
    )
    command = [sys.executable, "-m", "ndbench", "show", "suite=many", "--config-dir", str(tmp_path), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120, env=_environment()
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(json.loads(done.stdout)["cells"]) == 2 * 3 * 12 * 2 * 4
    # one thread's CPU time: the wall clock of an idle machine, whatever else runs on this one
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("models", ["llama_tiny", "llama_8b", "qwen3_8b", "mistral_7b"]),
        ("suites", ["smoke", "hsdp_tp", "layouts", "scaling"]),
        ("hardware", ["h100", "h200", "a100", "b200", "l40s", "mi300x", "cpu"]),
        ("parallelism", ["ddp", "fsdp", "hsdp", "fsdp_tp", "hsdp_tp"]),
        ("engines", ["ndbench", "command"]),
        ("training", ["default", "gpu"]),
        ("data", ["markov", "source", "text", "dataset"]),
        ("checkpoint", ["sharded", "async", "full", "hf"]),
        ("tracker", ["none", "wandb"]),
        ("evaluation", ["default"]),
        ("measure", ["default", "quick"]),
        ("gate", ["default", "off", "require"]),
        ("launcher", ["local"]),
    ],
)
def test_what_comes_with_ndbench_is_listed(ndbench: Command, what: str, names: list[str]) -> None:
    entries = json.loads(ndbench("list", what, "--json").out)
    assert set(names) <= {entry["name"] for entry in entries}
    assert not any(entry["yours"] for entry in entries)
    text = ndbench("list", what).out
    assert all(name in text for name in names)
    assert max(len(line) for line in text.splitlines()) <= 100


def test_without_a_word_every_group_is_listed_with_its_choices(ndbench: Command) -> None:
    found = json.loads(ndbench("list", "--json").out)
    assert {entry["name"] for entry in found} == set(GROUPS)
    text = ndbench("list").out
    for entry in found:
        assert f"ndbench list {entry['list']}" in text
        assert ndbench("list", entry["list"]).code == 0
        assert all(name in text for name in entry["choices"])


@pytest.mark.parametrize(
    "argv",
    [
        ["list", "engines"],
        ["list", "training"],
        ["list", "parallelism"],
        ["list", "models"],
        ["show", "suite=smoke"],
        ["show", "-m", "model=llama_8b", "hardware=h100_x8,h200_x8", "training.compile=true,false"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_nothing_is_cut_off_at_any_width(ndbench: Command, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    told = json.loads(ndbench(*argv, "--json").out)
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = ndbench(*argv)
        assert shown.code == 0, shown.err
        assert "…" not in shown.out
        lines = shown.out.splitlines()
        for entry in told if isinstance(told, list) else told["cells"]:
            whole = [str(entry[key]) for key in ("name", "factory", "model", "hardware", "layout") if entry.get(key)]
            assert all(any(text in line for line in lines) for text in whole), whole
        if isinstance(told, dict):
            assert sum(line.rstrip().endswith((" s", " min", " h")) for line in lines) >= len(told["cells"])


def test_a_line_is_longer_than_the_terminal_only_for_a_single_word(
    ndbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for line in ndbench("list", "engines").out.splitlines()[:-3]:
        assert len(line.rstrip()) <= 40 or len(line.split()) == 1, line


@pytest.mark.parametrize("machine", [[], ["hardware=auto"], ["hardware=cpu"]], ids=["unnamed", "auto", "cpu"])
def test_what_this_machine_cannot_hold_is_not_shown_as_a_cell(
    ndbench: Command, monkeypatch: pytest.MonkeyPatch, machine: list[str]
) -> None:
    monkeypatch.setattr("ndbench.matrix.resolve._physical_memory", lambda: 64 * 2**30)
    argv = ["suite=hsdp_tp", "model=qwen3_8b", *machine]
    shown = ndbench("show", *argv, "--json")
    assert shown.code == 3
    would_run = expand(argv)
    assert json.loads(shown.out)["cells"] == [] == would_run.cells
    reasons = {entry["name"]: entry["reason"] for entry in json.loads(shown.out)["skipped"]}
    assert reasons == {cell.name: reason for cell, reason in would_run.skipped}
    assert "GiB for 8 ranks, this machine has 64.0 GiB" in reasons["fsdp8"]
    table = ndbench("show", *argv).out
    assert table.count("A cell fits when its estimate is no more than all of the memory") == 1
    assert " GB" not in table


def test_a_machine_that_is_named_is_planned_for_from_anywhere(ndbench: Command) -> None:
    for argv in (["hardware=h100_x8"], ["hardware=h100_x8,h200_x8", "-m"]):
        assert ndbench("show", "model=llama_8b", "training=gpu", "parallelism=fsdp", *argv).code == 0


def test_a_scripts_cell_is_named_after_the_command_and_claims_no_model(ndbench: Command) -> None:
    argv = ["show", "engine=command", "engine.command=true"]
    shown = ndbench(*argv, "world_size=2", "--json")
    (cell,) = json.loads(shown.out)["cells"]
    assert (cell["name"], cell["layout"], cell["memory_bytes_per_rank"]) == ("command_x2", "command_x2", None)
    assert "llama" not in ndbench(*argv, "world_size=2").out
    names = {
        ("world_size=1,2", "-m"): ["command_x1", "command_x2"],
        ("world_size=2", "parallelism=ddp"): ["command_ddp2"],
        ("world_size=2", "parallelism.tp_size=2", "parallelism.dp_shard_size=1"): ["command_tp2"],
        ("suite=smoke",): ["command_ddp2", "command_fsdp2"],
    }
    for words, expected in names.items():
        assert [cell["name"] for cell in json.loads(ndbench(*argv, *words, "--json").out)["cells"]] == expected


def test_the_users_own_files_are_listed_and_marked(ndbench: Command) -> None:
    folder = Path("mine/model")
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text(
        "# The model we ship.\ndefaults: [llama_tiny]\nname: ours\nnum_hidden_layers: 5\n"
    )
    (folder / "broken.yaml").write_text("name: [\n")
    entries = {
        entry["name"]: entry for entry in json.loads(ndbench("list", "models", "--config-dir", "mine", "--json").out)
    }
    assert entries["ours"]["yours"]
    assert (entries["ours"]["num_hidden_layers"], entries["ours"]["hidden_size"]) == (5, 64)
    assert entries["ours"]["about"] == "The model we ship."
    assert entries["broken"]["about"].startswith("cannot be read")
    assert not entries["llama_tiny"]["yours"]
    assert "ours *" in ndbench("list", "models", "--config-dir", "mine").out


def test_a_users_file_named_like_a_shipped_one_is_an_error_that_names_both(ndbench: Command) -> None:
    mine = Path("mine/model/llama_tiny.yaml")
    mine.parent.mkdir(parents=True)
    mine.write_text("name: llama_tiny\n")
    for argv in (["list", "models"], ["show", "suite=smoke"], ["suite=smoke"]):
        result = ndbench(*argv, "--config-dir", "mine")
        assert result.code == 2
        assert str(mine.resolve()) in result.err
        assert str(Path("conf/model/llama_tiny.yaml")) in result.err


def test_what_a_peer_refuses_before_a_run_is_shown_as_not_runnable(ndbench: Command) -> None:
    pytest.importorskip("accelerate", reason="the extra 'accelerate' is not installed")
    shown = json.loads(ndbench("show", "suite=peers", "hardware=cpu", "world_size=2", "--json").out)
    skipped = {cell["name"]: cell["reason"] for cell in shown["skipped"]}
    names = {cell["name"] for cell in shown["cells"]}
    assert {"fsdp2-cpu-accelerate", "tp2-cpu-ndbench"} <= names
    for name in ("tp2-cpu-accelerate", "cp2-cpu-accelerate"):
        assert name not in names
        assert skipped[name].startswith("accelerate: ")


def test_another_engine_is_shown_and_a_script_has_no_model(ndbench: Command) -> None:
    words = ["engine.name=my_loop", "engine.target=examples.own_loop.loop.MyLoop", "parallelism=ddp", "world_size=2"]
    table = ndbench("show", *words).out
    assert [line.split()[:3] for line in table.splitlines()[1:3]] == [
        ["cell", "engine", "model"],
        ["ddp2", "my_loop", "llama_tiny"],
    ]
    assert json.loads(ndbench("show", *words, "--json").out)["cells"][0]["engine"] == "my_loop"
    assert "engine" not in ndbench("show", "suite=hsdp_tp").out.splitlines()[2]
    file = Path(__file__).parents[2] / "examples" / "own_script" / "train.py"
    script = ["engine=command", f"engine.command='python {file}'", "world_size=2"]
    (cell,) = json.loads(ndbench("show", *script, "--json").out)["cells"]
    assert (cell["model"], cell["tokens_per_step"], cell["engine"]) == (None, None, "command")
