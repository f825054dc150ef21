"""Axolotl's keys: degrees and what it infers, batch, memory, optimizer, schedule, models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ndbench.importing.findings import LOST, TRANSLATED, UNDERSTOOD
from ndbench.importing.translate import Imported, import_file
from ndbench.matrix.keys import get_value
from tests.cli.conftest import Command
from tests.importing.conftest import Write, config_of

BASE = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\n"
FSDP = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ndbench.importing.axolotl.visible_devices", list)


def _status(imported: Imported) -> dict[str, str]:
    return {finding.key: finding.status for finding in imported.findings}


@pytest.mark.parametrize(
    ("text", "world", "layout"),
    [
        ("", None, "ddp8"),
        ("", 4, "ddp4"),
        (FSDP, None, "fsdp8"),
        (FSDP, 2, "fsdp2"),
        (FSDP + "tensor_parallel_size: 2\n", None, "fsdp4_tp2"),
        (FSDP + "dp_shard_size: 2\ntensor_parallel_size: 2\n", None, "fsdp2_tp2"),
        (FSDP + "dp_shard_size: 2\ntensor_parallel_size: 2\n", 8, "hsdp2x2_tp2"),
        (FSDP + "dp_shard_size: 2\ndp_replicate_size: 2\ncontext_parallel_size: 2\n", None, "hsdp2x2_cp2"),
        (FSDP + "dp_replicate_size: 2\n", None, "hsdp2x4"),
        (FSDP + "sequence_parallel_degree: 4\n", None, "fsdp2_cp4"),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true}\n", None, "fsdp8"),
        ("fsdp: [no_shard]\n", None, "ddp8"),
        ("deepspeed: deepspeed_configs/zero2.json\n", None, "fsdp8"),
        ("deepspeed: deepspeed_configs/zero0.json\n", None, "ddp8"),
        ("deepspeed: mine.json\n", None, "fsdp8"),
        ("tensor_parallel_size: 2\n", None, "ddp4_tp2"),
    ],
)
def test_degrees_are_those_that_axolotl_would_take(write: Write, text: str, world: int | None, layout: str) -> None:
    imported = import_file(write(BASE + text), world_size=world)
    config = config_of(imported)
    assert config.parallelism.layout == layout
    assert config.training.global_batch_size == config.parallelism.batch_size
    assert "not a key" not in str(imported.findings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gradient_accumulation_steps: 3\nmicro_batch_size: 2\n",
         {"training.global_batch_size": 48, "training.micro_batch_size": 2}),
        ("batch_size: 6\nmicro_batch_size: 2\n", {"training.global_batch_size": 48}),
        ("sequence_len: 1024\n", {"training.sequence_length": 1024}),
        ("", {"training.sequence_length": 512, "training.schedule": "cosine", "training.weight_decay": 0.0,
              "training.optimizer": "adamw", "training.precision": "bf16", "training.max_grad_norm": 1.0}),
        ("learning_rate: 2e-6\nweight_decay: 0.01\nadam_beta2: 0.95\nmax_grad_norm: 0\n",
         {"training.learning_rate": 2e-6, "training.weight_decay": 0.01, "training.betas": [0.9, 0.95],
          "training.max_grad_norm": None}),
        ("optimizer: sgd\nlr_scheduler: linear\nwarmup_steps: 7\n",
         {"training.optimizer": "sgd", "training.schedule": "linear", "training.warmup_steps": 7}),
        ("lr_scheduler: warmup_stable_decay\nwarmup_ratio: 0.1\n",
         {"training.schedule": "wsd", "training.warmup_steps": 3}),
        ("cosine_min_lr_ratio: 0.1\n", {"training.min_learning_rate_ratio": 0.1}),
        ("learning_rate: 0.001\nlr_scheduler: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 0.0001}\n",
         {"training.min_learning_rate_ratio": pytest.approx(0.1)}),
        ("bf16: false\n", {"training.precision": "fp32"}),
        ("bf16: auto\ngradient_checkpointing: true\n",
         {"training.precision": "bf16", "training.activation_checkpointing": "full"}),
        ("gradient_checkpointing: offload\n",
         {"training.activation_checkpointing": "full", "training.activation_offload": True}),
        ("gradient_checkpointing: true\nactivation_offloading: true\n",
         {"training.activation_checkpointing": "full", "training.activation_offload": True}),
        ("gradient_checkpointing: true\nactivation_offloading: legacy\n", {"training.activation_offload": True}),
        ("gradient_checkpointing: true\nactivation_offloading: disk\n", {"training.activation_offload": True}),
        ("gradient_checkpointing: true\nactivation_offloading: false\n", {"training.activation_offload": False}),
        ("activation_offloading: true\n", {"training.activation_offload": False}),
        ("fsdp_config: {activation_checkpointing: true}\ngradient_checkpointing: false\n",
         {"training.activation_checkpointing": "full"}),
        ("torch_compile: auto\n", {"training.compile": True}),
        ("liger_fused_linear_cross_entropy: true\n", {"training.loss_chunk_size": 2048}),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]\n", {"training.loss_chunk_size": None}),
        ("seed: 7\n", {"training.seed": 7}),
        ("fsdp: [full_shard, offload]\n",
         {"parallelism.reshard_after_forward": True, "parallelism.cpu_offload": True}),
        ("fsdp: shard_grad_op auto_wrap\n", {"parallelism.reshard_after_forward": False}),
    ],
)  # fmt: skip
def test_training_keys(write: Write, text: str, expected: dict[str, Any]) -> None:
    imported = import_file(write("base_model: Qwen/Qwen3-8B\n" + text))
    config = config_of(imported)
    for key, value in expected.items():
        assert get_value(config, key) == value, key
    assert "not a key" not in str(imported.findings)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("optimizer: adamw_bnb_8bit", LOST),
        ("optimizer: muon", LOST),
        ("optimizer: adamw_torch", TRANSLATED),
        ("fp16: true", LOST),
        ("bfloat16: true", LOST),
        ("lr_scheduler: rex", LOST),
        ("sample_packing: true", LOST),
        ("adapter: lora", LOST),
        ("load_in_8bit: true", LOST),
        ("load_in_8bit: false", UNDERSTOOD),
        ("train_on_inputs: false", LOST),
        ("gradient_checkpointing: unsloth", LOST),
        ("gradient_checkpointing: offload", TRANSLATED),
        ("activation_offloading: true", LOST),
        ("activation_offloading: false", UNDERSTOOD),
        ("deepspeed: mine.json", LOST),
        ("flash_attention: true", UNDERSTOOD),
        ("eager_attention: true", LOST),
        ("adam_epsilon: 1.0e-8", UNDERSTOOD),
        ("adam_epsilon: 1.0e-6", LOST),
        ("tf32: true", UNDERSTOOD),
        ("max_steps: 500", TRANSLATED),
        ("save_steps: 0.25", LOST),
        ("val_set_size: 500", LOST),
        ("datasets: [{path: x, type: alpaca}]", LOST),
        ("rl: dpo", LOST),
        ("special_tokens:", UNDERSTOOD),
        ("never_heard_of_it: 1", LOST),
    ],
)
def test_what_is_lost_says_so(write: Write, line: str, status: str) -> None:
    imported = import_file(write(f"base_model: Qwen/Qwen3-8B\nsequence_len: 512\n{line}\n"))
    assert _status(imported)[line.partition(":")[0]] == status
    config_of(imported)


def test_an_adapter_is_noted_since_the_run_is_another(write: Write) -> None:
    assert "trains all parameters" in str(import_file(write(BASE + "adapter: qlora\nload_in_4bit: true\n")).notes)


@pytest.mark.parametrize(
    ("name", "model", "also"),
    [
        ("meta-llama/Llama-3.1-8B", "llama_8b", {}),
        ("NousResearch/Meta-Llama-3-8B-Instruct", "llama_8b", {}),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama_70b", {}),
        ("meta-llama/Llama-3.2-1B", "llama_1b", {"model.tie_word_embeddings": True}),
        ("Qwen/Qwen3-8B-Base", "qwen3_8b", {}),
        ("mistralai/Mistral-7B-v0.1", "mistral_7b", {"model.sliding_window": 4096}),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral_7b", {"model.sliding_window": None, "model.vocab_size": 32768}),
    ],
)
def test_known_models(write: Write, name: str, model: str, also: dict[str, Any]) -> None:
    config = config_of(import_file(write(f"base_model: {name}\nsequence_len: 512\n")))
    assert config.model.name == model
    for key, value in also.items():
        assert get_value(config, key) == value


SHAPE = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip


def test_a_model_that_is_not_known_is_not_measured_as_another(
    ndbench: Command, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    path = write(BASE.replace("Qwen/Qwen3-8B", "acme/zebra-3b"))
    refused = ndbench("import", path)
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "acme/zebra-3b is no model that comes with ndbench" in refused.err
    assert "hf download acme/zebra-3b config.json" in refused.err
    assert "model=FOLDER" in refused.out.splitlines()[-1]

    (tmp_path / "zebra").mkdir()
    (tmp_path / "zebra" / "config.json").write_text(json.dumps(SHAPE))
    assert ndbench("import", path, f"model={tmp_path / 'zebra'}").code == 0

    snapshot = tmp_path / "hub/models--acme--zebra-3b/snapshots/0a1b"
    snapshot.mkdir(parents=True)
    os.link(tmp_path / "zebra" / "config.json", snapshot / "config.json")
    found = import_file(path)
    assert f"model.path={snapshot}" in found.overrides
    assert config_of(found).model.hidden_size == 64


def test_a_local_folder_is_found_beside_the_file(write: Write, tmp_path: Path) -> None:
    (tmp_path / "models/mine").mkdir(parents=True)
    (tmp_path / "models/mine/config.json").write_text(json.dumps(SHAPE))
    assert config_of(import_file(write("base_model: models/mine\nsequence_len: 512\n"))).model.name == "mine"


def test_the_training_line_says_what_of_the_file_it_lacks(ndbench: Command, write: Write) -> None:
    path = write(BASE + "output_dir: out\ndatasets: [{path: x, type: alpaca}]\nnum_epochs: 3\nwarmup_steps: 100\n")
    data, steps = import_file(path).train_lacks
    assert "datasets is not translated, the line trains on synthetic tokens: add data=dataset" in data
    assert "num_epochs (3)" in steps
    assert "30 steps, all of them warm-up: add training.steps=N" in steps
    out = ndbench("import", path).out.splitlines()
    at = out.index("train with it:")
    assert out[at + 1 : at + 3] == [f"# {data}", f"# {steps}"]
    assert out[at + 3].startswith("ndbench train ")
    assert import_file(path, ["training.steps=400", "data=source"]).train_lacks == ()
    path = write(BASE + "output_dir: out\nmax_steps: 50\n")
    assert import_file(path).train_lacks == ()


def test_fsdp_beside_deepspeed_is_not_carried_over_for_that_reason(write: Write) -> None:
    text = (
        "deepspeed: zero3.json\nfsdp: [full_shard]\nfsdp_config: {fsdp_offload_params: true, limit_all_gathers: true}\n"
    )
    found = {one.key: one for one in import_file(write(BASE + text)).findings}
    for key in ("fsdp", "fsdp_config.fsdp_offload_params", "fsdp_config.limit_all_gathers"):
        assert found[key].status == LOST
        assert "deepspeed is given too, and wins" in found[key].why
