"""The line for training that is printed is one that ``ndbench train`` takes, whatever the file leaves out."""

from __future__ import annotations

import json
import re
import shlex
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ndbench.importing.findings import LOST, UNDERSTOOD
from ndbench.importing.translate import import_file
from ndbench.run.train import output_folder, the_cell
from tests.cli.conftest import Command
from tests.importing.conftest import Write

BASE = "base_model: some/model\nmicro_batch_size: 1\nsequence_len: 64\n"
OWN = ("model=llama_tiny", "training.precision=fp32", "training.compile=false", "hardware=cpu")

KEYS = {
    "save_steps": [100, 0.25, 0],
    "output_dir": ["./out"],
    "save_total_limit": [3],
    "saves_per_epoch": [2],
    "eval_steps": [50, 0.1],
    "val_set_size": [0, 0.05, 200, 0.0],
    "test_datasets": [["x"]],
    "evals_per_epoch": [1],
    "max_steps": [20, 1000],
    "num_epochs": [3],
    "warmup_steps": [0, 10, 100],
    "warmup_ratio": [0.1],
    "lr_scheduler": ["cosine", "warmup_stable_decay"],
    "lr_scheduler_kwargs": [{"num_decay_steps": 15}, {"num_decay_steps": 200}, {"min_lr": 1e-6}],
    "optimizer": ["sgd", "adamw_bnb_8bit"],
    "learning_rate": [1e-4],
    "max_grad_norm": [0, 1.0],
    "gradient_checkpointing": [True],
    "activation_offloading": [True],
}
some_keys = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in KEYS.items()})


@settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.generate],  # an example takes a second: what fails is small enough to read
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(keys=some_keys)
def test_train_takes_the_line_that_is_printed(
    keys: dict[str, object], write: Write, ndbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndbench.run.train.ask_engines", lambda cells: (cells, []))  # asks transformers
    path = write(BASE + "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    found = ndbench("import", path, *OWN, "--world-size", "1", "--json")
    assert found.code == 0, found.err
    said = json.loads(found.out)
    assert said["train_refused"] is None  # Axolotl takes all of these
    if said["train_command"] is not None:
        output_folder(the_cell(shlex.split(said["train_command"])[2:], None))


def test_axolotls_own_output_folder_is_taken_where_the_file_saves(write: Write) -> None:
    imported = import_file(write(BASE + "save_steps: 100\n"), OWN, 1)
    assert {"checkpoint.every=100", "checkpoint.dir=./model-out"} <= set(imported.train_overrides)
    assert not any("checkpoint" in word for word in imported.overrides)
    imported = import_file(write(BASE + "save_steps: 100\noutput_dir: mine\n"), OWN, 1)
    assert "checkpoint.dir=mine" in imported.train_overrides
    imported = import_file(write(BASE + "max_steps: 100\n"), OWN, 1)
    assert not any("checkpoint" in word for word in imported.train_overrides)


def test_nothing_is_evaluated_where_the_file_holds_nothing_out(write: Write) -> None:
    for text in ("eval_steps: 50\n", "eval_steps: 50\nval_set_size: 0.0\n"):
        imported = import_file(write(BASE + text), OWN, 1)
        assert not any(word.startswith("evaluation.every") for word in imported.train_overrides)
        assert any(word.startswith("evaluation.fraction=0") for word in imported.train_overrides)
    for text in ("eval_steps: 50\nval_set_size: 0.1\n", "eval_steps: 50\ntest_datasets: [x]\n"):
        assert "evaluation.every=50" in import_file(write(BASE + text), OWN, 1).train_overrides


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["engine=command", "engine.command=true"], "train is the bundled engine's: engine=command"),
        (["checkpoint.dir=null"], "checkpoint.every=100 needs checkpoint.dir=FOLDER"),
        (["checkpoint.keep=-1"], "checkpoint.keep=-1 must be at least"),
    ],
)
def test_where_overrides_of_the_users_are_refused_the_reason_stands_for_the_line(
    ndbench: Command, write: Write, words: list[str], said: str
) -> None:
    path = write(BASE + "save_steps: 100\n")
    found = ndbench("import", path, *OWN, *words, "--world-size", "1")
    if found.code == 0:
        assert "train with it" not in found.out
        assert said in found.out
    else:
        assert said in found.err


def test_an_override_that_wins_is_named_beside_the_key(write: Write) -> None:
    text = "base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 2\nlearning_rate: 1e-4\n"
    words = ["model=llama_tiny", "training.micro_batch_size=1"]
    found = {one.key: one for one in import_file(write(text), words).findings}
    assert (found["base_model"].status, found["base_model"].overrides) == (UNDERSTOOD, ())
    assert found["base_model"].why == "yours wins: model=llama_tiny"
    assert found["micro_batch_size"].why == "yours wins: training.micro_batch_size=1"
    assert found["learning_rate"].overrides == ("training.learning_rate=0.0001",)
    unknown = {one.key: one for one in import_file(write(BASE), ["model.path=FOLDER"]).findings}
    assert unknown["base_model"].why == "yours wins: model.path=FOLDER"


def test_an_unknown_key_is_told_the_one_that_was_meant(write: Write) -> None:
    text = BASE + "sequence_length: 5\nlerning_rate: 1\nnum_epoch: 3\nwholly_other: 1\n"
    why = {one.key: one.why for one in import_file(write(text), OWN, 1).findings if one.status == LOST}
    assert why["lerning_rate"].endswith("(did you mean learning_rate?)")
    assert why["num_epoch"].endswith("(did you mean num_epochs?)")
    assert why["wholly_other"] == "not a key of Axolotl that is known here"
    text = "compute_environment: X\ndistributed_type: FSDP\nnum_proceses: 2\nfsdp_config: {fsdp_versoin: 2}\n"
    why = {one.key: one.why for one in import_file(write(text), OWN, 2).findings if one.status == LOST}
    assert why["num_proceses"].endswith("(did you mean num_processes?)")
    assert why["fsdp_config.fsdp_versoin"].endswith("(did you mean fsdp_config.fsdp_version?)")


def test_no_key_advises_what_another_key_of_the_file_has_set(write: Write) -> None:
    keys = ("num_epochs", "saves_per_epoch", "save_strategy", "evals_per_epoch")
    text = "num_epochs: 3\nsaves_per_epoch: 2\nsave_strategy: steps\nevals_per_epoch: 1\n"
    set_here = "max_steps: 100\nsave_steps: 10\neval_steps: 10\nval_set_size: 0.1\n"
    found = {one.key: one for one in import_file(write(BASE + text + set_here), OWN, 1).findings}
    assert [found[key].status for key in keys] == [UNDERSTOOD] * 4
    assert not any(re.search(r"training\.steps|checkpoint\.|evaluation\.", found[key].why) for key in keys)
    found = {one.key: one for one in import_file(write(BASE + text), OWN, 1).findings}
    assert [found[key].status for key in keys] == [LOST] * 4


@pytest.mark.parametrize(
    "line",
    ["key_{0}: {0}\n", "fsdp_key_{0}: {0}\n", "fsdp_{0}: {0}\nfsdp_{0}: {0}\n"],
    ids=["plain", "section", "twice"],
)
def test_four_times_as_many_keys_take_about_four_times_as_long(write: Write, line: str) -> None:
    head = "compute_environment: X\ndistributed_type: FSDP\nnum_processes: 2\n"

    def seconds(count: int) -> float:
        path = write(head + "".join(line.format(index) for index in range(count)))
        began = time.process_time()
        import_file(path, ["model=llama_tiny"])
        return time.process_time() - began

    assert min(seconds(8000) for _ in range(2)) < 8 * max(seconds(2000) for _ in range(2))
