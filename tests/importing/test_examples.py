"""Each example configuration gives overrides that compose, run as a dry plan, and say what the file says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from ndbench.importing.findings import LOST
from ndbench.importing.reading import flattened
from ndbench.importing.translate import Imported, import_file
from ndbench.matrix.keys import get_value, typed
from ndbench.matrix.overrides import parse_overrides
from ndbench.matrix.sources import find_sources
from tests.cli.conftest import Command
from tests.importing.conftest import config_of

FOLDER = Path(__file__).parents[2] / "examples" / "import"
FILES = sorted(FOLDER.glob("*.yaml"))

EXPECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "accelerate_fsdp": ("fsdp8", {"training.precision": "bf16", "parallelism.reshard_after_forward": True}),
    "accelerate_hsdp_tp": ("hsdp2x2_tp2", {"parallelism.reshard_after_forward": False}),
    "accelerate_fsdp_tp_cp": (
        "fsdp2_cp2_tp2",
        {"parallelism.cp_method": "ring", "training.activation_checkpointing": "full"},
    ),
    "axolotl_fsdp": (
        "fsdp8",
        {
            "model.name": "llama_8b",
            "training.sequence_length": 4096,
            "training.micro_batch_size": 2,
            "training.global_batch_size": 2 * 4 * 8,
            "training.learning_rate": 2e-5,
            "training.weight_decay": 0.0,
            "training.betas": [0.9, 0.999],
            "training.schedule": "cosine",
            "training.warmup_steps": 20,
            "training.activation_checkpointing": "full",
            "training.loss_chunk_size": None,
        },
    ),
    "axolotl_hsdp_tp": (
        "hsdp2x2_tp2",
        {
            "model.name": "llama_8b",
            "training.global_batch_size": 1 * 2 * 4,
            "training.schedule": "constant",
            "training.warmup_steps": 3,
            "parallelism.sequence_parallel": False,
            "parallelism.loss_parallel": False,
        },
    ),
    "axolotl_fsdp_tp_cp": (
        "fsdp2_cp2_tp2",
        {
            "model.name": "qwen3_8b",
            "training.sequence_length": 8192,
            "training.global_batch_size": 1 * 1 * 2,
            "training.loss_chunk_size": 2048,
            "training.schedule": "linear",
            "parallelism.loss_parallel": True,
        },
    ),
}


def test_both_tools_have_an_example_of_each_layout() -> None:
    assert {path.stem for path in FILES} == set(EXPECTED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_printed_line_is_a_dry_plan_of_the_same_run(path: Path, ndbench: Command) -> None:
    printed = ndbench("import", str(path))
    assert (printed.code, printed.err) == (0, "")
    lines = [line for line in printed.out.splitlines() if line.startswith("ndbench ")]
    line = next(line for line in lines if line.startswith("ndbench show "))
    assert line.replace("ndbench show ", "ndbench ") in lines  # the same words measure it

    shown = ndbench(*shlex.split(line)[1:], "hardware=h100_x8", "--json")
    assert shown.code == 0, shown.err
    (cell,) = json.loads(shown.out)["cells"]
    assert (cell["layout"], cell["world_size"]) == (EXPECTED[path.stem][0], 8)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_run_has_what_every_finding_says(path: Path) -> None:
    imported = import_file(path)
    config = config_of(imported)
    for key, value in EXPECTED[path.stem][1].items():
        assert get_value(config, key) == value, key
    for finding in imported.findings:
        for word in finding.overrides:
            key, _, text = word.partition("=")
            if "." in key and word not in imported.train_overrides:
                assert get_value(config, key) == typed(key, yaml.safe_load(text)), word


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_of_the_file_is_accounted_for_once(path: Path) -> None:
    keys = list(flattened(yaml.safe_load(path.read_text())))
    assert _of_the_file(import_file(path)) == sorted(keys)


def _of_the_file(imported: Imported) -> list[str]:
    return sorted(finding.key for finding in imported.findings if finding.status != "assumed")


def test_no_reason_is_missing_where_something_is_lost() -> None:
    for path in FILES:
        for finding in import_file(path).findings:
            assert finding.why or finding.status != LOST, finding


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem.startswith("axolotl")], ids=lambda path: path.stem
)
def test_the_line_for_training_has_only_keys_that_there_are(path: Path) -> None:
    line = import_file(path).train_command
    assert line.startswith("ndbench train ")
    request = parse_overrides(shlex.split(line)[2:], find_sources())
    assert request.values["checkpoint.dir"].startswith("./outputs/")
    assert request.values["evaluation.fraction"] == 0.02


def test_a_run_of_several_steps_is_another_line_for_training() -> None:
    imported = import_file(FOLDER / "axolotl_hsdp_tp.yaml")
    assert {"training.steps=1000", "training.warmup_steps=100", "checkpoint.every=250"} <= set(imported.train_overrides)
    assert "training.warmup_steps=3" in imported.overrides
    assert len({word.partition("=")[0] for word in imported.train_overrides}) == len(imported.train_overrides)
    assert import_file(FOLDER / "accelerate_fsdp.yaml").train_command == ""
