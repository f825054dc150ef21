"""Which GPUs a process would see, and which hardware file is theirs, from the tools' output alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ndbench.config import HardwareConfig
from ndbench.measure import devices

CONF = Path(__file__).parents[2] / "conf" / "hardware"
FILES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CONF.glob("*.yaml"))}
DATASHEET_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA B200": "b200",
    "NVIDIA L40S": "l40s",
    "AMD Instinct MI300X": "mi300x",
}
SMI = """0, GPU-aaaa-1, NVIDIA H200, 143771
1, GPU-bbbb-2, NVIDIA H200, 143771
2, GPU-bccc-3, NVIDIA H200, 143771
"""


@pytest.fixture
def three_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "run_tool", lambda *command, **_: SMI if command[0] == "nvidia-smi" else None)


def indices(environ: dict[str, str]) -> list[int]:
    return [device["index"] for device in devices.visible_devices(environ)]


@pytest.mark.usefixtures("three_h200")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),
        ("-1", []),
        ("0,-1,1", [0]),
        ("GPU-aaaa", [0]),
        ("GPU-bccc,GPU-aaaa-1", [2, 0]),
        ("GPU-b", []),  # not unique
        ("1,1", [1]),
        (" 1 , 2 ", [1, 2]),
    ],
)
def test_cuda_visible_devices_is_honoured(visible: str | None, expected: list[int]) -> None:
    assert indices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.usefixtures("three_h200")
def test_a_device_has_its_name_and_memory() -> None:
    first = devices.visible_devices({})[0]
    assert first["name"] == "NVIDIA H200"
    assert first["memory_bytes"] == 143771 * 2**20


INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 41
GPU UUID: \t GPU-8efab1ab-4982
Bus Location: \t 0000:00:06.0
"""


def test_gpus_that_no_tool_names_are_read_from_the_kernel_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "run_tool", lambda *command, **_: None)
    monkeypatch.setattr(devices, "_nvml_devices", list)
    monkeypatch.setattr(devices, "PROC", tmp_path)
    assert devices.visible_devices({}) == []
    (tmp_path / "0000:00:06.0").mkdir()
    (tmp_path / "0000:00:06.0" / "information").write_text(INFORMATION)
    (found,) = devices.visible_devices({})
    assert (found["name"], found["uuid"], found["memory_bytes"]) == ("NVIDIA H200", "GPU-8efab1ab-4982", None)
    assert devices.detect(FILES, [found]) == "h200"


def test_gpus_that_nothing_names_are_refused_and_not_taken_for_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "run_tool", lambda *command, **_: None)
    monkeypatch.setattr(devices, "_nvml_devices", list)
    monkeypatch.setattr(devices, "PROC", tmp_path / "proc")
    monkeypatch.setattr(devices, "DEV", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.detect(FILES, []) == "cpu"
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=r"has 2 NVIDIA GPUs .*/nvidia0, .*/nvidia1\) but neither nvidia-smi nor NVML"):
        devices.detect(FILES, [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.detect(FILES, []) == "cpu"


def test_amd_devices_are_read_from_rocm_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    output = (
        '{"card1": {"Card Series": "AMD Instinct MI300X", "VRAM Total Memory (B)": "206141652992", "Unique ID": "0xb"},'
        ' "card0": {"Card Series": "AMD Instinct MI300X", "VRAM Total Memory (B)": "206141652992", "Unique ID": "0xa"},'
        ' "system": {"Driver version": "6.10"}}'
    )
    monkeypatch.setattr(devices, "run_tool", lambda *command, **_: output if command[0] == "rocm-smi" else None)
    monkeypatch.setattr(devices, "_nvml_devices", list)
    assert indices({}) == [0, 1]
    assert indices({"HIP_VISIBLE_DEVICES": "1"}) == [1]
    assert devices.visible_devices({})[0]["memory_bytes"] == 206141652992


def test_a_machine_without_tools_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "run_tool", lambda *command, **_: None)
    monkeypatch.setattr(devices, "_nvml_devices", list)
    assert devices.visible_devices({}) == []


def test_a_tool_that_hangs_is_given_up() -> None:
    assert devices.run_tool(sys.executable, "-c", "import time; time.sleep(30)", timeout=0.2) is None


def test_a_tool_that_fails_or_is_missing_gives_nothing() -> None:
    assert devices.run_tool(sys.executable, "-c", "raise SystemExit(3)") is None
    assert devices.run_tool("no-such-tool-here") is None


def shown(name: str, count: int = 1) -> list[dict[str, Any]]:
    return [{"name": name, "memory_bytes": 1, "index": index, "uuid": str(index)} for index in range(count)]


@pytest.mark.parametrize(("gpu", "expected"), list(DATASHEET_NAMES.items()))
def test_each_gpu_finds_its_own_file(gpu: str, expected: str) -> None:
    assert devices.detect(FILES, shown(gpu, 8)) == expected


@pytest.mark.parametrize(
    "gpu",
    ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA A100-PCIE-40GB", "NVIDIA GeForce RTX 4090"],
)
def test_a_gpu_with_other_peaks_or_none_known_gets_the_file_without_peaks(gpu: str) -> None:
    found = devices.detect(FILES, shown(gpu))
    assert found == "cuda"
    assert not FILES[found].get("peak_flops")


def test_no_gpu_is_a_cpu_machine() -> None:
    assert devices.detect(FILES, []) == "cpu"


def test_a_mixed_machine_is_refused_with_both_names() -> None:
    with pytest.raises(ValueError, match=r"2 kinds \(NVIDIA H100 80GB HBM3, NVIDIA H200\)"):
        devices.detect(FILES, shown("NVIDIA H200") + shown("NVIDIA H100 80GB HBM3"))


def test_two_files_for_one_gpu_are_refused_with_both_names() -> None:
    with pytest.raises(ValueError, match="h200, mine"):
        devices.detect({**FILES, "mine": {"match": "H200"}}, shown("NVIDIA H200"))


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_hardware_file_fits_the_schema_and_names_its_source(name: str) -> None:
    hardware = HardwareConfig(**FILES[name])
    assert hardware.name == name
    if name not in ("cpu", "cuda"):
        assert hardware.source
        assert hardware.match
        re.compile(hardware.match)
        assert hardware.memory_bytes is not None
        assert hardware.memory_bandwidth is not None
        assert hardware.link_bandwidth is not None
        assert hardware.gpus_per_node == 8
        assert {"fp32", "tf32", "bf16", "fp16"} <= set(hardware.peak_flops)
        assert all(isinstance(peak, float) for peak in hardware.peak_flops.values())


@pytest.mark.parametrize("name", ["h100", "h200", "a100", "b200", "l40s", "mi300x"])
def test_peaks_are_dense(name: str) -> None:
    """bf16 is twice tf32 in every dense column (to rounding); one sparse figure among dense ones would break it."""
    peaks = FILES[name]["peak_flops"]
    assert peaks["bf16"] / peaks["tf32"] == pytest.approx(2, rel=0.03)
    assert peaks["fp16"] == peaks["bf16"]
    if "fp8" in peaks:
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.03)


def test_looking_for_devices_imports_no_torch() -> None:
    code = (
        "import sys, ndbench.measure.devices as d, ndbench.measure.fingerprint as f;"
        " from ndbench.config import HardwareConfig;"
        " d.visible_devices(); f.fingerprint(HardwareConfig(device='cpu')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
