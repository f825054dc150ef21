"""A repeat that is not steady, or throttled, never passes in silence; far beyond the limits it is invalid."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndbench.measure import throttling
from ndbench.measure.throttling import ThrottleMeter, cpu_reading, gpu_reading
from ndbench.measure.validity import why_invalid
from ndbench.results.schema import Record, metric
from tests.compare.helpers import baseline_of, decide, only
from tests.records import repeats

SESSIONS = [repeats()] * 3


def doubtful(seconds: float = 0.1, steady: bool = False, drift: float = 0.2, throttled: float = 0.0) -> list[Record]:
    records = repeats(seconds=seconds)
    records[1]["steps"]["steady"] = steady
    records[1]["metrics"] |= {
        "step_drift": metric(drift, "1", "none"),
        "throttled_share": metric(throttled, "1", "lower"),
    }
    return records


def test_a_repeat_that_is_not_steady_is_no_pass_and_the_report_says_why() -> None:
    cell = only(decide(doubtful(), baseline_of(*SESSIONS)))
    assert only(decide(repeats(), baseline_of(*SESSIONS))).verdict == "pass"
    assert cell.verdict == "inconclusive"
    assert "1 of 3 repeats was not steady (step time changed by up to +20% over the timed steps)" in cell.reasons[0]
    assert "more training.steps" in cell.reasons[0]


def test_it_is_no_improvement_either_but_a_regression_stays_one() -> None:
    baseline = baseline_of(*SESSIONS)
    assert only(decide(repeats(seconds=0.02), baseline)).verdict == "improved"
    assert only(decide(doubtful(seconds=0.02), baseline)).verdict == "inconclusive"
    slow = only(decide(doubtful(seconds=0.5), baseline))
    assert slow.verdict == "regressed"
    assert any("not steady" in note for note in slow.notes)


def test_without_a_baseline_it_is_said_all_the_same() -> None:
    cell = only(decide(doubtful(), None))
    assert cell.verdict == "no_baseline"
    assert any("not steady" in note for note in cell.notes)


def test_a_throttled_repeat_is_no_pass() -> None:
    cell = only(decide(doubtful(steady=True, throttled=0.04), baseline_of(*SESSIONS)))
    assert cell.verdict == "inconclusive"
    assert "1 of 3 repeats was throttled, for up to 4.0% of the time: let it cool down" in cell.reasons[0]
    assert only(decide(doubtful(steady=True, throttled=0.004), baseline_of(*SESSIONS))).verdict == "pass"


def fault(device: str = "cuda", steady: bool | None = False, drift: float = 0.0, **changed: float) -> str | None:
    values = {"timed_steps": 20, "throttled": 0.0} | changed
    return why_invalid(device, steady=steady, drift=drift, **values)  # type: ignore[arg-type]


def test_beyond_the_limits_a_repeat_is_invalid() -> None:
    assert fault(drift=0.09) is None
    assert "step time changed by +12% over the 20 timed steps (limit 10%)" in (fault(drift=0.12) or "")
    assert fault(drift=-0.12) is not None, "getting faster: warm-up was too short"
    assert fault("cpu", drift=0.9) is None
    assert fault("cpu", drift=1.1) is not None
    assert fault("cpu", drift=-0.55) is not None
    assert fault(drift=0.5, steady=True) is None, "as noisy as that is steady"
    assert fault(drift=0.5, steady=None) is None, "taking turns, nobody is asked"
    assert fault(drift=0.5, timed_steps=7) is None
    assert "throttled for 12% of the launch" in (fault(steady=True, throttled=0.12) or "")
    assert fault(steady=True, throttled=0.09) is None


def test_throttling_is_the_growth_of_the_drivers_counters_on_the_devices_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(throttling.time, "monotonic", lambda: next(clock))
    answers = iter(["GPU-a, 5, 7000000, 0\nGPU-b, 0, 0, 0", "GPU-a, 5, 8000000, 0\nGPU-b, 9000000, 0, 0"])
    tool = "ndbench.measure.devices.run_tool"
    monkeypatch.setattr(tool, lambda *command, **_: next(answers))
    meter = ThrottleMeter("cuda", ["GPU-a"])
    assert meter.share() == pytest.approx(0.1), "GPU-b is another run's"
    monkeypatch.setattr(tool, lambda *command, **_: "GPU-a, [N/A], [N/A], [N/A]")
    assert gpu_reading() == {}


def test_a_machine_that_does_not_count_throttling_says_null(tmp_path: Path) -> None:
    assert cpu_reading(tmp_path) == {}
    assert ThrottleMeter("cpu", read=dict).share() is None
    counter = tmp_path / "devices/system/cpu/cpu3/thermal_throttle/package_throttle_total_time_ms"
    counter.parent.mkdir(parents=True)
    counter.write_text("1500\n")
    assert cpu_reading(tmp_path) == {"cpu3": 1.5}


def test_a_figure_of_one_timed_step_is_marked_as_no_measurement() -> None:
    head = repeats(first_timed=11)
    text = "not a measurement: 1 timed step of training.steps=12"
    assert text in only(decide(head, None)).notes
    cell = only(decide(head, baseline_of(*SESSIONS)))
    assert cell.verdict == "inconclusive"
    assert cell.reasons[0].startswith(text)
    assert "more training.steps" in cell.reasons[0]
    assert only(decide(repeats(first_timed=10), baseline_of(*SESSIONS))).verdict == "pass"
