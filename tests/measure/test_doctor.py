"""The doctor: each thing that spoils a measurement is found, named with its numbers, and told how to mend it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ndbench.config import HardwareConfig
from ndbench.measure import doctor
from ndbench.measure.doctor import Finding
from ndbench.measure.fingerprint import fingerprint
from ndbench.measure.pace import join_all, judge_pace, measure_pace, ranks_to_try, stored_yardsticks
from ndbench.report.doctor import main, shipped_hardware

GPU: dict[str, Any] = {
    "index": 0,
    "uuid": "GPU-a",
    "name": "NVIDIA H200",
    "memory_bytes": 143771 * 2**20,
    "vendor": "nvidia",
}
TWO = [GPU, {**GPU, "index": 1, "uuid": "GPU-b"}]
CUDA_BUILD = {"torch": "2.13.0", "cuda": "13.0", "driver": "580.65"}


def one(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_it_examines_this_machine_in_a_few_seconds(tmp_path: Path) -> None:
    began = time.perf_counter()
    findings = doctor.examine(tmp_path, shipped_hardware())
    assert time.perf_counter() - began < 10
    assert {"software", "devices", "cpus", "memory", "shm", "memlock"} <= {finding.subject for finding in findings}
    assert all(finding.text and "\n" not in finding.text for finding in findings)


def test_a_start_under_torchrun_or_several_slurm_tasks_is_refused() -> None:
    assert one(doctor.environment({"RANK": "0", "WORLD_SIZE": "8"})).level == "fail"
    assert "--ntasks=1" in one(doctor.environment({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"})).text
    assert doctor.environment({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == []
    assert doctor.environment({}) == []


def test_an_empty_torch_logs_is_found() -> None:
    assert "unset" in one(doctor.environment({"TORCH_LOGS": ""})).text


def test_known_and_unknown_gpus_are_told_apart() -> None:
    files = shipped_hardware()
    assert one(doctor.devices_found(TWO, files)) == Finding(
        "ok", "devices", "2 x NVIDIA H200, 140 GiB each (hardware=h200)"
    )
    unknown = one(doctor.devices_found([{**GPU, "name": "NVIDIA X1"}], files))
    assert unknown.level == "warn"
    assert "hardware/<name>.yaml" in unknown.text


@pytest.mark.parametrize(
    ("facts", "smi", "level", "words"),
    [
        (CUDA_BUILD, "CUDA Version: 13.0", "ok", "CUDA 13.0"),
        (CUDA_BUILD, "CUDA Version: 12.8", "fail", "update the driver"),
        ({**CUDA_BUILD, "cuda": "12.9"}, "CUDA Version: 12.4", "warn", "minor version"),
        ({**CUDA_BUILD, "cuda": "12.6"}, "CUDA Version: 13.0", "ok", "12.6"),
        ({**CUDA_BUILD, "cuda": None}, "CUDA Version: 13.0", "fail", "CPU build"),
        (CUDA_BUILD, None, "warn", "13.0"),
    ],
)
def test_the_driver_must_run_the_build(facts: dict[str, Any], smi: str | None, level: str, words: str) -> None:
    found = one(doctor.driver_and_build(TWO, facts, smi))
    assert found.level == level
    assert words in found.text


@pytest.mark.parametrize(
    ("topology", "level"), [("NV18", "ok"), ("NV12 SYS; NV12", "warn"), ("PIX", "warn"), (None, "warn")]
)
def test_pairs_without_nvlink_are_told(monkeypatch: pytest.MonkeyPatch, topology: str | None, level: str) -> None:
    monkeypatch.setattr(doctor, "topology", lambda _: topology)
    assert one(doctor.links(TWO)).level == level


def test_one_gpu_has_no_links() -> None:
    assert doctor.links([GPU]) == []


def query(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    row = {
        "index": "0",
        "uuid": "GPU-a",
        "memory.used": "5",
        "power.limit": "700.00",
        "power.default_limit": "700.00",
        "clocks.max.sm": "1980",
        "clocks_event_reasons.hw_slowdown": "Not Active",
        "clocks_event_reasons.sw_thermal_slowdown": "Not Active",
        "ecc.errors.uncorrected.volatile.total": "0",
        "mig.mode.current": "Disabled",
    }
    row.update({key.replace("__", "."): value for key, value in values.items()})
    monkeypatch.setattr(doctor, "nvidia_query", lambda *fields, **_: [{field: row[field] for field in fields}])


def test_a_gpu_in_order_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    query(monkeypatch)
    found = one(doctor.power_and_clocks([GPU]))
    assert found.level == "ok"
    assert "700 W" in found.text


@pytest.mark.parametrize(
    ("values", "level", "words"),
    [
        ({"power__limit": "500.00"}, "warn", "500 W (default 700 W)"),
        ({"clocks_event_reasons__hw_slowdown": "Active"}, "fail", "hw_slowdown"),
        ({"clocks_event_reasons__sw_thermal_slowdown": "Active"}, "fail", "sw_thermal_slowdown"),
        ({"ecc__errors__uncorrected__volatile__total": "3"}, "fail", "3 uncorrected"),
        ({"mig__mode__current": "Enabled"}, "warn", "MIG"),
    ],
)
def test_limits_and_slowdowns_are_found(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], level: str, words: str
) -> None:
    query(monkeypatch, **values)
    found = one(doctor.power_and_clocks([GPU]))
    assert found.level == level
    assert words in found.text


def test_fields_that_a_driver_does_not_know_are_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    query(monkeypatch, ecc__errors__uncorrected__volatile__total="[N/A]", mig__mode__current="[N/A]")
    assert one(doctor.power_and_clocks([GPU])).level == "ok"


def test_co_tenants_are_named_even_when_their_process_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "co_tenants", lambda _: [])
    query(monkeypatch)
    assert one(doctor.device_memory([GPU])).level == "ok"
    query(monkeypatch, **{"memory__used": "40960"})
    assert "40.0 GiB held by processes that this container cannot see" in one(doctor.device_memory([GPU])).text
    monkeypatch.setattr(doctor, "co_tenants", lambda _: [{"uuid": "GPU-a", "pid": 77, "memory_bytes": 1}])
    found = one(doctor.device_memory([GPU]))
    assert found.level == "warn"
    assert "processes 77" in found.text


@pytest.mark.parametrize(
    ("gpus", "mib", "level"), [(8, 64, "fail"), (8, 512, "warn"), (8, 8192, "ok"), (0, 64, "ok"), (0, 16, "warn")]
)
def test_a_small_shared_memory_is_told_with_the_docker_flag(gpus: int, mib: int, level: str) -> None:
    found = one(doctor.shared_memory(gpus, mib * 2**20))
    assert found.level == level
    assert level == "ok" or "--shm-size" in found.text


def test_locked_memory_matters_with_infiniband_only() -> None:
    assert one(doctor.locked_memory(8 * 2**20, infiniband=True)).level == "warn"
    assert one(doctor.locked_memory(8 * 2**20, infiniband=False)).level == "ok"
    assert one(doctor.locked_memory(-1, infiniband=True)).level == "ok"


def test_few_cpus_for_many_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_cpus", lambda: 4)
    monkeypatch.setattr(doctor, "running", lambda: 0)
    assert one(doctor.processors(gpus=8)).level == "warn"
    assert one(doctor.processors(gpus=2)).level == "ok"


@pytest.mark.parametrize(
    ("load", "running", "said"),
    [
        (7.2, 0, None),  # of a run that has ended
        (0.1, 3, "3 other processes now on 4 CPUs: times will be noisy"),
        (3.5, None, "load average 3.5 on 4 CPUs: times will be noisy"),
        (0.1, None, None),
    ],
)
def test_what_runs_now_is_told_and_not_what_ran_before(
    monkeypatch: pytest.MonkeyPatch, load: float, running: float | None, said: str | None
) -> None:
    monkeypatch.setattr(doctor, "usable_cpus", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(doctor, "running", lambda: running)
    cpus, *warned = doctor.processors(gpus=0)
    assert cpus.text.endswith(f"load average {load}")
    assert [(finding.level, finding.text) for finding in warned] == ([("warn", said)] if said else [])


def test_the_one_that_counts_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["1/84", "9/84", "3/84", "3/84", "2/84", "none"])
    monkeypatch.setattr(Path, "read_text", lambda *_: f"7.20 6.16 8.99 {next(answers)} 31092\n")
    assert doctor.running() == 2
    assert doctor.running() is None


def test_an_unwritable_results_folder_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert one(doctor.folders(tmp_path / "not" / "yet", {})).level == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    found = doctor.folders(tmp_path, {})
    assert [finding.level for finding in found] == ["fail"]
    assert str(tmp_path) in found[0].text


def record(hardware: dict[str, Any], matmul: float, copy: float = 1.0) -> dict[str, Any]:
    yardstick = {"matmul_seconds": matmul, "copy_seconds": copy, "all_reduce_seconds": None}
    return {"fingerprint": {"hardware": hardware}, "yardstick": {"before": yardstick, "after": yardstick}}


def test_a_slow_node_is_not_one_to_gate_on_and_the_gpu_is_named() -> None:
    stored = stored_yardsticks([record({"name": "H200"}, matmul) for matmul in (0.99, 1.0, 1.01)], {"name": "H200"})
    found = one(judge_pace([{"matmul_seconds": 1.0}, {"matmul_seconds": 1.07}], stored, "cuda"))
    assert found.level == "fail"
    assert "GPU 1: matmul 7% slow" in found.text
    assert "not a node to gate on" in found.text


def test_a_node_like_its_kind_is_ok_and_says_by_how_much_it_differs() -> None:
    stored = stored_yardsticks([record({"name": "H200"}, 1.0)], {"name": "H200"})
    found = one(judge_pace([{"matmul_seconds": 1.02, "copy_seconds": 0.99}], stored, "cuda"))
    assert found.level == "ok"
    assert "matmul +2%, copy -1%" in found.text


def test_shared_cores_are_given_more_room() -> None:
    stored = stored_yardsticks([record({"name": "cpu"}, 1.0)], {"name": "cpu"})
    assert one(judge_pace([{"matmul_seconds": 1.2}], stored, "cpu")).level == "ok"
    assert one(judge_pace([{"matmul_seconds": 1.5}], stored, "cpu")).level == "warn"


def test_other_hardware_is_not_compared_with() -> None:
    records = [record({"name": "H100"}, 0.1), {"fingerprint": None, "yardstick": None}]
    assert stored_yardsticks(records, {"name": "H200"}) == []
    assert "none is stored" in one(judge_pace([{"matmul_seconds": 1.0}], [], "cuda")).text


def test_cpu_ranks_follow_the_stored_results() -> None:
    stored = [{"fingerprint": {"hardware": {"device": "cpu", "ranks": ranks}}} for ranks in (4, 8, 4)]
    assert ranks_to_try(0, stored) == 4
    assert ranks_to_try(2, stored) == 2


def test_the_yardstick_runs_on_fresh_ranks() -> None:
    ranks = measure_pace("cpu", 2)
    assert len(ranks) == 2
    for rank in ranks:
        assert all(seconds is not None and 0 < seconds < 1 for seconds in rank.values())
        assert set(rank) == {"matmul_seconds", "copy_seconds", "all_reduce_seconds"}


def test_the_command_prints_every_finding_and_ends_with_0_on_a_machine_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(tmp_path, yardstick=False) == 0
    assert "Ready to measure" in capsys.readouterr().out


def test_the_command_ends_with_3_when_something_must_be_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_LOGS", "")
    assert main(tmp_path, yardstick=False) == 3
    assert "FAIL" in capsys.readouterr().out
    assert main(tmp_path, as_json=True, yardstick=False) == 3
    assert '"level": "fail"' in capsys.readouterr().out


def test_cores_are_those_that_the_container_may_use() -> None:
    assert 1 <= fingerprint(HardwareConfig(device_count=8))["hardware"]["cores"] <= (os.cpu_count() or 1)


def test_slowdowns_are_read_from_an_older_driver_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(*fields: str, **_: Any) -> list[dict[str, str]]:
        if any(field.startswith("clocks_event_reasons") for field in fields):
            return []
        return [{**dict.fromkeys(fields, "Not Active"), "index": "0", "clocks_throttle_reasons.hw_slowdown": "Active"}]

    monkeypatch.setattr(doctor, "nvidia_query", old)
    assert doctor.slowdowns() == [("0", "hw_slowdown")]


def test_ranks_are_waited_for_so_long_together_not_each() -> None:
    class Hanging:
        asked: ClassVar[list[float]] = []

        def join(self, timeout: float) -> None:
            self.asked.append(timeout)
            time.sleep(timeout)

    began = time.monotonic()
    join_all([Hanging() for _ in range(8)], 0.1)
    assert time.monotonic() - began < 0.5
    assert sum(Hanging.asked) < 0.11
