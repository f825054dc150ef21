"""The fingerprint: equal on the same machine, different on another, and silent about what it should not say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ndbench.config import Cell, Config, HardwareConfig
from ndbench.measure import fingerprint as module
from ndbench.measure.fingerprint import fingerprint, topology

NVLINK = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tSYS\t0-47
GPU1\tNV18\t X \tNV18\tSYS\t0-47
GPU2\tNV18\tNV18\t X \tSYS\t0-47

Legend:
  X    = Self
"""
MIXED = NVLINK.replace("GPU0\t X \tNV18\tNV18", "GPU0\t X \tNV18\tSYS")


def cpu_cell(world: int = 8, redact: list[str] | None = None) -> Cell:
    config = Config(hardware=HardwareConfig(device_count=8), world_size=world)
    config.fingerprint.redact = redact or []
    return Cell(name="ddp", suite="s", config=config)


def test_a_cpu_is_known_by_its_model_and_the_ranks() -> None:
    hardware = fingerprint(cpu_cell())["hardware"]
    assert hardware["device"] == "cpu"
    assert hardware["ranks"] == 8
    assert hardware["name"]


def test_the_same_machine_has_the_same_hardware_and_software() -> None:
    first, second = fingerprint(cpu_cell()), fingerprint(cpu_cell())
    assert first["hardware"] == second["hardware"]
    assert first["software"] == second["software"]


def test_another_number_of_ranks_is_other_hardware() -> None:
    assert fingerprint(cpu_cell(8))["hardware"] != fingerprint(cpu_cell(4))["hardware"]


def test_it_is_plain_json_and_reads_back_equal() -> None:
    found = fingerprint(cpu_cell())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_versions_are_those_of_the_installed_packages() -> None:
    import torch
    import transformers

    software = fingerprint(cpu_cell())["software"]
    assert software["torch"] == torch.__version__
    assert software["torch_commit"] == torch.version.git_version
    assert software["cuda"] == torch.version.cuda
    assert software["transformers"] == transformers.__version__


def test_redacted_keys_keep_their_place_and_lose_their_value() -> None:
    found = fingerprint(cpu_cell(redact=["host", "kernel"]))["informational"]
    assert found["host"] == "redacted"
    assert found["kernel"] == "redacted"
    assert fingerprint(cpu_cell())["informational"]["host"] != "redacted"


def test_only_listed_environment_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MY_NCCL_ALGO", "no")
    environment = fingerprint(cpu_cell())["informational"]["environment"]
    assert environment["NCCL_ALGO"] == "Ring"
    assert not {"WANDB_API_KEY", "HF_TOKEN", "MY_NCCL_ALGO"} & set(environment)
    assert "secret" not in json.dumps(environment)


def smi(monkeypatch: pytest.MonkeyPatch, limit: str = "700.00", clock: str = "1980") -> None:
    rows: dict[str, dict[str, str]] = {
        "power.limit": {"index": "0", "power.limit": limit},
        "driver_version": {"driver_version": "580.65"},
        "clocks.sm": {
            "uuid": "GPU-a",
            "clocks.sm": clock,
            "clocks.mem": "3201",
            "temperature.gpu": "31",
            "memory.used": "4",
            "utilization.gpu": "0",
        },
    }

    def query(*fields: str, query: str = "gpu") -> list[dict[str, str]]:
        if query == "compute-apps":
            row = {"gpu_uuid": "GPU-a", "pid": "77", "used_memory": "1024"}
            return [row, dict(row), {**row, "gpu_uuid": "GPU-other"}]  # compute and graphics lists name it twice
        return next(([row] for key, row in rows.items() if key in fields), [])

    device: dict[str, Any] = {"index": 0, "uuid": "GPU-a", "name": "NVIDIA H200", "memory_bytes": 143771 * 2**20}
    monkeypatch.setattr(module, "nvidia_query", query)
    monkeypatch.setattr(module, "visible_devices", lambda: [device])


def test_clocks_and_temperature_never_enter_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = HardwareConfig(name="h200", device="cuda", device_count=1)
    smi(monkeypatch)
    cool = fingerprint(h200)
    smi(monkeypatch, clock="1200")
    assert fingerprint(h200)["hardware"] == cool["hardware"]
    assert cool["hardware"] == {
        "device": "cuda",
        "name": "NVIDIA H200",
        "count": 1,
        "memory_bytes": 143771 * 2**20,
        "topology": None,
        "power_limit_watts": 700,
    }
    assert cool["software"]["driver"] == "580.65"
    assert cool["informational"]["clocks_mhz"] == [1980]


def test_another_power_limit_is_other_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = HardwareConfig(name="h200", device="cuda", device_count=1)
    smi(monkeypatch)
    full = fingerprint(h200)["hardware"]
    smi(monkeypatch, limit="500.00")
    assert fingerprint(h200)["hardware"] != full


def test_a_gpu_cell_without_a_visible_gpu_gets_no_cpu_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_devices", list)
    with pytest.raises(ValueError, match="hardware=h200 is measured on GPUs, and none is visible"):
        fingerprint(HardwareConfig(name="h200", device="cuda", device_count=1))


def test_a_co_tenant_is_counted_once_and_only_on_our_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    smi(monkeypatch)
    found = fingerprint(HardwareConfig(name="h200", device="cuda", device_count=1))
    assert found["informational"]["co_tenants"] == 1


def test_the_topology_is_one_word_where_all_pairs_are_alike() -> None:
    assert topology([0, 1, 2], NVLINK) == "NV18"
    assert topology([0, 1], MIXED) == "NV18"
    assert topology([0, 1, 2], MIXED) == "NV18 SYS; NV18"
    assert topology([0], NVLINK) is None
    assert topology([0, 5], NVLINK) is None
    assert topology([0, 1], "") is None
