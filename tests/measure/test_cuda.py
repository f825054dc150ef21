"""Measuring on a GPU: events, busy kernels, allocator peaks. Skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch

from ndbench.config import HardwareConfig
from ndbench.measure.devices import detect, visible_devices
from ndbench.measure.doctor import examine
from ndbench.measure.fingerprint import fingerprint
from ndbench.measure.memory import MemoryMeter, TrackedMemory
from ndbench.measure.pace import judge_pace, measure_pace
from ndbench.measure.timing import Handicap, StepClock, burn
from ndbench.measure.yardstick import run_yardstick
from ndbench.report.doctor import shipped_hardware

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

MIB = 2**20


@pytest.fixture
def work() -> torch.Tensor:
    return torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)


def step(work: torch.Tensor) -> None:
    for _ in range(40):
        torch.mm(work, work)


def test_marking_a_boundary_does_not_wait_for_the_device(work: torch.Tensor) -> None:
    clock = StepClock("cuda")
    step(work)
    torch.cuda.synchronize()
    clock.start()
    began = time.perf_counter()
    for _ in range(5):
        burn(0.05, "cuda")
        clock.tick()
    queued = time.perf_counter() - began
    seconds = clock.seconds()
    assert queued < 0.05
    assert len(seconds) == 5
    assert all(0.045 < value < 0.06 for value in seconds[1:])


def test_event_times_are_those_of_the_wall(work: torch.Tensor) -> None:
    step(work)
    torch.cuda.synchronize()
    clock = StepClock("cuda")
    began = time.perf_counter()
    clock.start()
    for _ in range(20):
        step(work)
        clock.tick()
    seconds = clock.seconds()
    assert sum(seconds) == pytest.approx(time.perf_counter() - began, rel=0.03)


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.1])
def test_a_burn_takes_the_time_it_was_given(seconds: float) -> None:
    """To a seventh (the kernel counts cycles, the clock moves with the load), and a launch's half millisecond."""
    burn(0.02, "cuda")  # calibrates
    clock = StepClock("cuda")
    clock.start()
    for _ in range(5):
        burn(seconds, "cuda")
        clock.tick()
    assert median(clock.seconds()) == pytest.approx(seconds, rel=0.15, abs=5e-4)


@pytest.mark.parametrize("factor", [0.02, 0.5, 2.0])
def test_a_handicap_lengthens_the_step_by_its_factor(factor: float) -> None:
    """The step is a copy: a matmul at the power limit runs faster while the device also rests."""
    source = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def run(handicap: Handicap | None) -> float:
        clock = StepClock("cuda")
        clock.start()
        for _ in range(24):
            for _ in range(100):
                target.copy_(source)
            if handicap is not None:
                handicap.after_step()
            clock.tick()
        return median(clock.seconds()[4:])

    run(None)
    bare = [run(None) for _ in range(3)]
    handicapped = [run(Handicap(factor, "cuda")) for _ in range(3)]
    assert median(handicapped) / median(bare) - 1 == pytest.approx(factor, rel=0.15, abs=0.005)


def test_the_allocators_peak_is_that_of_the_step_after_a_reset() -> None:
    meter = MemoryMeter("cuda")
    kept = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    del kept
    meter.reset()
    before = torch.cuda.memory_allocated()
    step_tensor = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    reading = meter.reading()
    assert step_tensor.numel() == 4 * MIB
    assert reading["allocated"] == before + 4 * MIB
    assert reading["reserved"] is not None
    assert reading["device_used"] is not None
    assert reading["device_used"] > reading["reserved"] >= reading["allocated"]


def test_the_tracked_peak_is_near_the_allocators() -> None:
    def run() -> tuple[int, int]:
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))] * 4
        model = torch.nn.Sequential(*blocks).cuda()
        x = torch.randn(2048, 1024, device="cuda")
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with TrackedMemory([model, x]) as memory:
            start = memory.current
            model(x).square().mean().backward()
        return memory.peak - start, torch.cuda.max_memory_allocated() - base

    run()
    (tracked, allocated), again = run(), run()
    assert again[0] == tracked
    assert tracked == pytest.approx(allocated, rel=0.05)


def test_the_yardstick_of_one_gpu_is_plausible() -> None:
    result = run_yardstick("cuda")
    assert result["matmul_seconds"] is not None
    assert result["copy_seconds"] is not None
    assert 1e-4 < result["matmul_seconds"] < 0.1
    assert 1e-5 < result["copy_seconds"] < 0.1


def test_fresh_processes_give_the_same_pace() -> None:
    first, second = measure_pace("cuda", 1), measure_pace("cuda", 1)
    assert judge_pace(second, first, "cuda")[0].level == "ok"


def test_this_gpu_has_a_stable_fingerprint_taken_without_initialising_it() -> None:
    code = (
        "import json, sys; from ndbench.config import HardwareConfig;"
        "from ndbench.measure.fingerprint import fingerprint;"
        "found = fingerprint(HardwareConfig(device='cuda'));"
        "assert 'torch' not in sys.modules; print(json.dumps(found['hardware'], sort_keys=True))"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1
    hardware = fingerprint(HardwareConfig(device="cuda"))["hardware"]
    assert hardware["count"] == len(visible_devices())
    assert hardware["memory_bytes"] > 2**30
    assert hardware["power_limit_watts"] is None or hardware["power_limit_watts"] > 50


def test_this_gpu_finds_a_hardware_file_and_the_doctor_knows_it(tmp_path: Path) -> None:
    files = shipped_hardware()
    assert detect(files) in files
    findings = {finding.subject: finding for finding in examine(tmp_path, files)}
    assert findings["devices"].level == "ok"
    assert findings["driver"].level in ("ok", "warn")
