from __future__ import annotations

import pytest

from ndbench.compare.memory import judge, said_bytes
from ndbench.results.schema import metric
from tests.compare.helpers import baseline_of, decide, only
from tests.records import MIB, a_record, repeats

GIB = 1024 * MIB


def verdict_of(head: int, *baseline: int) -> str:
    verdict = judge(repeats(peak=head, device="cuda"), [repeats(peak=peak, device="cuda") for peak in baseline])
    assert verdict is not None
    return verdict.verdict


def test_identical_bytes_are_never_flagged() -> None:
    assert verdict_of(100 * MIB, 100 * MIB) == "pass"
    assert verdict_of(0, 0) == "pass"


def test_the_tolerance_is_one_mebibyte_or_a_thousandth() -> None:
    assert verdict_of(101 * MIB, 100 * MIB) == "pass"
    assert verdict_of(101 * MIB + 1, 100 * MIB) == "regressed"
    assert verdict_of(10 * GIB + 10 * MIB, 10 * GIB) == "pass"
    assert verdict_of(10 * GIB + 11 * MIB, 10 * GIB) == "regressed"


def test_the_worst_repeat_of_the_head_counts() -> None:
    head = [*repeats(count=2, peak=100 * MIB, device="cuda"), a_record(repeat=2, peak=150 * MIB, device="cuda")]
    verdict = judge(head, [repeats(peak=100 * MIB, device="cuda")])
    assert verdict is not None
    assert verdict.verdict == "regressed"


def test_less_memory_is_improved() -> None:
    assert verdict_of(90 * MIB, 100 * MIB) == "improved"
    assert verdict_of(99 * MIB, 100 * MIB) == "pass"


def test_a_spread_between_repeats_widens_the_tolerance() -> None:
    session = [a_record(repeat=n, peak=peak, device="cuda") for n, peak in enumerate((100 * MIB, 110 * MIB, 104 * MIB))]
    for extra, expected in ((9 * MIB, "pass"), (11 * MIB, "regressed")):
        verdict = judge(repeats(peak=110 * MIB + extra, device="cuda"), [session])
        assert verdict is not None
        assert verdict.verdict == expected


def test_an_accepted_change_of_level_is_no_spread() -> None:
    assert verdict_of(100 * MIB, 100 * MIB, 100 * MIB, 100 * MIB, 80 * MIB, 80 * MIB) == "regressed"


def test_memory_that_varies_from_session_to_session_is_given_room() -> None:
    assert verdict_of(112 * MIB, 100 * MIB, 110 * MIB, 101 * MIB, 109 * MIB) == "pass"


def test_the_worst_rank_is_named() -> None:
    leaky = a_record(peak=120 * MIB, device="cuda")
    leaky["memory"]["allocated"] = [100 * MIB] * 5 + [120 * MIB] + [100 * MIB] * 2
    verdict = judge([leaky], [repeats(peak=100 * MIB, device="cuda")])
    assert verdict is not None
    assert "most on rank 5 (+20.00 MiB)" in verdict.reason


def test_one_side_without_a_measurement_is_incomparable_and_both_are_silent() -> None:
    none = a_record(memory={"allocated": None, "reserved": None, "device": None, "rss": None}, metrics={})
    one = judge([none], [repeats()])
    assert one is not None
    assert one.verdict == "incomparable"
    assert judge([none], [[none]]) is None


def test_only_one_repeat_of_a_cpu_cell_needs_to_have_measured_it() -> None:
    head = repeats(peak=200 * MIB)
    for record in head[1:]:
        record["metrics"]["peak_allocated_bytes"] = metric(None, "bytes", "lower", "no structure step")
    cell = only(decide(head, baseline_of(repeats(peak=100 * MIB))))
    assert cell.verdict == "regressed"
    assert cell.reasons == [
        "peak memory 200.00 MiB against 100.00 MiB (+100.00 MiB), tolerance 1.00 MiB",
    ]


def test_device_memory_needs_equal_hardware_and_tracked_cpu_memory_does_not() -> None:
    other = {"device": "other"}
    cpu = only(decide(repeats(peak=200 * MIB, hardware=other), baseline_of(repeats(peak=100 * MIB))))
    gpu = only(
        decide(
            repeats(peak=200 * MIB, hardware=other, device="cuda"), baseline_of(repeats(peak=100 * MIB, device="cuda"))
        )
    )
    assert (cpu.metric("peak_allocated_bytes").verdict, gpu.metric("peak_allocated_bytes").verdict) == (  # type: ignore[union-attr]
        "regressed",
        "incomparable",
    )


@pytest.mark.parametrize(("value", "said"), [(0, "0 B"), (2048, "2.00 KiB"), (3 * MIB, "3.00 MiB"), (GIB, "1.00 GiB")])
def test_bytes_are_said_in_binary_units(value: int, said: str) -> None:
    assert said_bytes(value) == said
