"""Bad files are one line and exit 2; what is written is a suite of the same cell."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ndbench.importing.translate import import_file
from tests.cli.conftest import Command
from tests.importing.conftest import Write

AXOLOTL = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\n"
ACCELERATE = "distributed_type: FSDP\nnum_processes: 8\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a mapping of keys to values"),
        ("- a\n- b\n", "is not a mapping of keys to values"),
        ("a: [1\n", "is not YAML that can be read"),
        ("a: 1\n---\nb: 2\n", "is not YAML that can be read"),
        ("base_model: !!python/object/apply:os.system ['touch stolen']\n", "is not YAML that can be read"),
        ("a: " + "[" * 5000, "is not YAML that can be read"),
        ("when: 2026-99-99\n", "is not YAML that can be read"),
        ("[training]\nsteps = 10\n", "is TOML: only Accelerate and Axolotl files are read"),
        ("trainer: mine\n", "neither an Accelerate configuration"),
        ("base_model: x\nnum_processes: 2\n", "as much an Accelerate configuration"),
        (AXOLOTL + "micro_batch_size: two\n", "micro_batch_size is two, expected a whole number of at least 1"),
        (AXOLOTL + "micro_batch_size: 0\n", "micro_batch_size is 0, expected"),
        (AXOLOTL + "micro_batch_size: 1.5\n", "micro_batch_size is 1.5, expected"),
        (AXOLOTL + "micro_batch_size: 1e99\n", "micro_batch_size is 1e99, expected"),
        (AXOLOTL + "learning_rate: .nan\n", "learning_rate is nan, expected a number"),
        (AXOLOTL + "learning_rate: [1]\n", "learning_rate is [1 items], expected a number"),
        (AXOLOTL + "gradient_checkpointing: maybe\n", "gradient_checkpointing is maybe, expected true or false"),
        (AXOLOTL + 'output_dir: "a\\nb"\n', "output_dir is a b, expected one line of text"),
        (AXOLOTL + "warmup_ratio: 3\n", "warmup_ratio is 3.0, expected a part between 0 and 1"),
        (AXOLOTL + "batch_size: 5\nmicro_batch_size: 2\n", "batch_size 5 is not a multiple of micro_batch_size 2"),
        (AXOLOTL + "fsdp: [sideways]\n", "fsdp names sideways"),
        (AXOLOTL + "tensor_parallel_size: 3\n", "32 attention heads do not divide by tp 3"),
        (ACCELERATE + "mixed_precision: int4\n", "mixed_precision is int4, expected no, fp16, bf16 or fp8"),
        (ACCELERATE + "fsdp_config: {fsdp_sharding_strategy: HALF}\n", "is HALF, expected one of FULL_SHARD"),
        (ACCELERATE + "parallelism_config: {parallelism_config_dp_shard_size: 4}\n", "= 4 processes, but there are 8"),
        (ACCELERATE + "parallelism_config: {parallelism_config_tp_size: 3}\n", "= 3 processes, but there are 8"),
        ("distributed_type: WARP\nnum_processes: 2\n", "distributed_type is WARP"),
        ("distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 7}\n", "zero_stage is 7"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_2(ndbench: Command, write: Write, text: str, said: str) -> None:
    path = write(text)
    result = ndbench("import", path)
    assert result.code == 2, result.err
    assert said in result.err
    assert result.err.count("\n") == 1, result.err
    assert result.out == ""
    assert not Path("stolen").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere.yaml"], "nowhere.yaml cannot be read: No such file"),
        (["."], "cannot be read: Is a directory"),
        (["binary.yaml"], "binary.yaml cannot be read"),
        (["large.yaml"], "that is no configuration"),
        (["model=x"], "FILE is needed"),
        ([], "0 words given"),
        (["good.yaml", "other.yaml"], "'other.yaml' is one file too many"),
        (["good.yaml", "suite=smoke"], "suite= and deletions cannot be given"),
        (["good.yaml", "training.stepz=1"], "there is no key 'training.stepz'"),
        (["good.yaml", "--world-size", "0"], "at least 1 is expected"),
        (["good.yaml", "--output", "mine/axolotl.yaml"], "a suite is found as FOLDER/suites/NAME.yaml"),
    ],
)
def test_a_bad_command_is_one_line_and_exit_2(ndbench: Command, argv: list[str], said: str) -> None:
    Path("good.yaml").write_text(AXOLOTL)
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00base_model: x")
    Path("large.yaml").write_text("#" * (2**20 + 1))
    result = ndbench("import", *argv)
    assert result.code == 2, result.err
    assert said in result.err
    assert result.err.count("\n") == 1


def test_a_key_given_twice_is_said(write: Write) -> None:
    text = AXOLOTL + "sequence_len: 1024\nfsdp_config: {offload_params: true, offload_params: false}\n"
    imported = import_file(write(text))
    assert "training.sequence_length=1024" in imported.overrides
    assert [note.split()[0] for note in imported.notes] == ["sequence_len", "fsdp_config.offload_params"]


def test_a_file_that_refers_to_itself_over_and_over_is_read_in_no_time(ndbench: Command, write: Write) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 60)]
    result = ndbench("import", write(AXOLOTL + "\n".join(lines)))
    assert result.code == 0
    assert "a59: [9 items]" in result.out


def test_the_written_suite_is_the_same_cell_and_is_never_replaced(ndbench: Command, write: Write) -> None:
    path = write(AXOLOTL + "datasets: []\nadapter: lora\ntensor_parallel_size: 2\n")
    written = ndbench("import", path, "--output", "mine", "training.seed=3")
    assert written.code == 0, written.err
    assert "ndbench suite=config --config-dir mine" in written.out
    suite = Path("mine/suites/config.yaml").read_text()
    assert "#   adapter: ndbench trains all parameters" in suite

    line = next(line for line in written.out.splitlines() if line.startswith("ndbench show "))
    as_line = json.loads(ndbench(*shlex.split(line)[1:], "hardware=h100_x8", "--json").out)
    as_suite = json.loads(ndbench("show", "suite=config", "--config-dir", "mine", "hardware=h100_x8", "--json").out)
    assert [cell["cell_id"] for cell in as_suite["cells"]] == [cell["cell_id"] for cell in as_line["cells"]]

    again = ndbench("import", path, "--output", "mine/suites/config.yaml")
    assert again.code == 2
    assert "is there already" in again.err
    assert Path("mine/suites/config.yaml").read_text() == suite


def test_json_has_every_key(ndbench: Command, write: Write) -> None:
    found = json.loads(ndbench("import", write(ACCELERATE + "odd: 1\n"), "--json").out)
    assert found["tool"] == "Accelerate"
    assert {key["key"] for key in found["keys"]} >= {"distributed_type", "num_processes", "odd"}
    assert found["cells"] == ["fsdp8"]
    assert found["command"] == shlex.join(["ndbench", *found["overrides"]])


def test_nothing_heavy_is_loaded(write: Write) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from ndbench.cli import main; main(['import', sys.argv[1], '--json']);"
        "sys.exit(', '.join({'torch', 'transformers', 'pandas', 'scipy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code, write(ACCELERATE)], check=True, timeout=60, stdout=subprocess.DEVNULL)
