"""Accelerate's keys: layouts, versions of FSDP, DeepSpeed's stages, precisions, machines."""

from __future__ import annotations

from typing import Any

import pytest

from ndbench.importing.findings import LOST, TRANSLATED, UNDERSTOOD
from ndbench.importing.translate import Imported, import_file
from ndbench.matrix.keys import get_value
from tests.importing.conftest import Write, config_of

MESH = "parallelism_config: {"
NESTED = "parallelism_config.parallelism_config_"


def _status(imported: Imported) -> dict[str, str]:
    return {finding.key: finding.status for finding in imported.findings}


@pytest.mark.parametrize(
    ("text", "layout", "expected"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 4", "ddp4", {}),
        ("distributed_type: 'NO'", "single", {"training.precision": "fp32"}),
        ("distributed_type: MULTI_CPU\nnum_processes: 2", "ddp2", {"hardware.device": "cpu"}),
        ("distributed_type: FSDP\nnum_processes: 4", "fsdp4", {}),
        ("distributed_type: FSDP\nnum_processes: -1", "fsdp8", {}),
        (f"distributed_type: FSDP\n{MESH}parallelism_config_dp_shard_size: 4}}", "fsdp4", {}),
        ("distributed_type: FSDP\nnum_processes: 8\nparallelism_config_tp_size: 2\n"
         "parallelism_config_dp_shard_size: 4", "fsdp4_tp2", {}),
        (f"distributed_type: FSDP\nnum_processes: 8\n{MESH}parallelism_config_cp_size: 8}}", "cp8", {}),
        (f"distributed_type: MULTI_GPU\nnum_processes: 8\n{MESH}parallelism_config_dp_replicate_size: 4, "
         "parallelism_config_tp_size: 2}", "ddp4_tp2", {}),
        ("distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\n"
         "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}", "hsdp2x4", {"parallelism.reshard_after_forward": True}),
        ("distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}", "fsdp4",
         {"parallelism.reshard_after_forward": True}),
        ("distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_sharding_strategy: 2}", "fsdp4",
         {"parallelism.reshard_after_forward": False}),
        ("distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}", "fsdp4",
         {"parallelism.reshard_after_forward": False}),
        ("distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}", "ddp4", {}),
        ("distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_offload_params: 'true'}", "fsdp4",
         {"parallelism.cpu_offload": True}),
        ("distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 2, gradient_clipping: 0.5, "
         "gradient_accumulation_steps: 3}", "fsdp4",
         {"parallelism.reshard_after_forward": False, "training.max_grad_norm": 0.5, "training.global_batch_size": 12,
          "training.micro_batch_size": 1}),
        ("distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 0}", "ddp4", {}),
        ("distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3, "
         "offload_param_device: cpu, offload_optimizer_device: cpu}\n"
         f"{MESH}parallelism_config_sp_size: 2, parallelism_config_dp_shard_size: 2, "
         "parallelism_config_sp_backend: deepspeed, parallelism_config_sp_seq_length: 256}", "fsdp2_cp2",
         {"parallelism.cpu_offload": True, "parallelism.cp_method": "ulysses", "training.sequence_length": 256}),
        ("distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config: {megatron_lm_tp_degree: 2, "
         "megatron_lm_pp_degree: 1, megatron_lm_recompute_activations: true, megatron_lm_sequence_parallelism: true}",
         "ddp4_tp2", {"training.activation_checkpointing": "selective", "parallelism.sequence_parallel": True}),
        ("distributed_type: TP\nnum_processes: 2\ntp_config: {tp_size: 2}", "tp2",
         {"parallelism.sequence_parallel": False}),
        ("distributed_type: FSDP\nnum_processes: 2\ndynamo_config: {dynamo_backend: INDUCTOR}", "fsdp2",
         {"training.compile": True}),
        ("distributed_type: FSDP\nnum_processes: 24", "fsdp24", {"training.global_batch_size": 24}),
    ],
)  # fmt: skip
def test_layouts_and_options(write: Write, text: str, layout: str, expected: dict[str, Any]) -> None:
    imported = import_file(write(text), ["training.sequence_length=256"] if "seq_length" not in text else [])
    config = config_of(imported)
    assert config.parallelism.layout == layout
    for key, value in expected.items():
        assert get_value(config, key) == value, key
    assert "not a key" not in str(imported.findings)


@pytest.mark.parametrize(
    ("written", "precision", "status"),
    [("bf16", "bf16", TRANSLATED), ("'no'", "fp32", TRANSLATED), ("no", "fp32", TRANSLATED), ("fp16", "bf16", LOST)],
)
def test_precisions(write: Write, written: str, precision: str, status: str) -> None:
    imported = import_file(write(f"distributed_type: FSDP\nmixed_precision: {written}"))
    assert f"training.precision={precision}" in imported.overrides
    assert _status(imported)["mixed_precision"] == status


def test_what_one_machine_cannot_do_is_said(write: Write) -> None:
    text = (
        "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nmain_process_ip: 10.0.0.1\n"
        "fsdp_config: {fsdp_min_num_params: 100, fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_no_such: 1}\nodd: 3\n"
        "tpu_env: []\n"
    )
    imported = import_file(write(text))
    status = _status(imported)
    assert status["num_machines"] == status["fsdp_config.fsdp_auto_wrap_policy"] == LOST
    assert status["fsdp_config.fsdp_min_num_params"] == status["odd"] == status["fsdp_config.fsdp_no_such"] == LOST
    assert status["tpu_env"] == status["main_process_ip"] == UNDERSTOOD
    (odd,) = [finding for finding in imported.findings if finding.key == "odd"]
    assert odd.why == "not a key of Accelerate that is known here"


def test_what_the_script_holds_is_asked_for_until_it_is_given(write: Write) -> None:
    path = write("distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16")
    assert "are in your script" in str(import_file(path).notes)
    given = import_file(path, ["model=llama_8b", "training.precision=fp32"])
    assert not given.notes
    assert given.overrides[-2:] == ("model=llama_8b", "training.precision=fp32")
    assert "training.precision=bf16" not in given.overrides
