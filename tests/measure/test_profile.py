"""Every moment of a profiled step is computing, copying, exposed communication or idle: by hand and by property."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndbench.measure.profile import STEP, breakdown, kernels, length, read_trace, subtract, union


def event(name: str, category: str, start: float, duration: float, thread: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": thread}


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

GPU_STEP = [
    event(STEP, "user_annotation", 1000, 1000),
    event("gemm", "kernel", 900, 200),  # 100 us of it lie before the step
    event("gemm", "kernel", 1200, 300),
    event(NCCL, "kernel", 1400, 200, thread=20),  # 100 us beside the gemm, 100 exposed
    event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 1550, 100, thread=21),  # 50 us beside the collective
    event("Memset (Device)", "gpu_memset", 1250, 10),  # beside the gemm
    event("aten::mm", "cpu_op", 1000, 900),  # the host's time is not the device's
    event("ndbench.step", "gpu_user_annotation", 1100, 500),
    {"ph": "i", "cat": "kernel", "name": "instant", "ts": 1900},
]


def test_a_gpu_step_counts_every_moment_once() -> None:
    found = breakdown(GPU_STEP)
    assert found.step == pytest.approx(1000e-6)
    assert found.compute == pytest.approx(400e-6)
    assert found.copy == pytest.approx(100e-6), "a copy that runs beside communication is work: it hides it"
    assert found.exposed_communication == pytest.approx(50e-6)
    assert found.idle == pytest.approx(450e-6)
    assert found.communication == pytest.approx(200e-6), "hidden or not"


def test_the_longest_kernels_come_first_and_only_what_lies_in_the_step_counts() -> None:
    assert [(k["name"], round(k["seconds"] * 1e6), k["calls"]) for k in kernels(GPU_STEP, 2)] == [
        ("gemm", 400, 2),
        (NCCL, 200, 1),
    ]


def test_on_a_cpu_operators_are_the_kernels_and_gloo_spans_the_communication() -> None:
    found = breakdown(
        [
            event(STEP, "user_annotation", 0, 100),
            event("aten::linear", "cpu_op", 0, 40),
            event("aten::mm", "cpu_op", 5, 30),  # called by the one above
            event("aten::copy_", "cpu_op", 36, 4),  # so is this
            event("c10d::allreduce_", "cpu_op", 40, 5),  # only starts the work
            event("gloo:all_reduce", "user_annotation", 41, 50, thread=9),
            event("aten::mul", "cpu_op", 45, 20),
        ]
    )
    assert found.compute == pytest.approx(56e-6)
    assert found.copy == pytest.approx(4e-6)
    assert found.exposed_communication == pytest.approx((4 + 26) * 1e-6)
    assert found.idle == pytest.approx((1 + 9) * 1e-6)


@pytest.mark.parametrize("ranges", [0, 2])
def test_a_trace_without_its_one_step_is_refused_with_the_count(ranges: int) -> None:
    with pytest.raises(ValueError, match=f"holds {ranges} ranges named {STEP}"):
        breakdown([event(STEP, "user_annotation", 10 * i, 5) for i in range(ranges)])


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=12)


@given(SPANS, SPANS)
def test_intervals_agree_with_counting_moments(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def moments(spans: list[tuple[int, int]]) -> set[int]:
        return {moment for start, end in spans for moment in range(start, end)}

    assert length(union(one)) == len(moments(one))
    assert length(subtract(union(one), union(other))) == len(moments(one) - moments(other))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from(["gemm", NCCL, "Memcpy DtoD"]), st.integers(0, 90), st.integers(0, 30))))
def test_the_parts_always_add_up_to_the_step(spans: list[tuple[str, int, int]]) -> None:
    events = [event(n, "gpu_memcpy" if "Mem" in n else "kernel", start, long) for n, start, long in spans]
    found = breakdown([event(STEP, "user_annotation", 10, 70), *events])
    parts = (found.compute, found.copy, found.exposed_communication, found.idle)
    assert sum(parts) == pytest.approx(found.step)
    assert min(parts) >= -1e-12
    assert found.exposed_communication <= found.communication + 1e-12


def test_a_gzipped_trace_reads_as_a_plain_one(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": GPU_STEP})
    (tmp_path / "a.json").write_text(text)
    with gzip.open(tmp_path / "b.json.gz", "wt") as stream:
        stream.write(text)
    assert read_trace(tmp_path / "a.json") == read_trace(tmp_path / "b.json.gz") == GPU_STEP
