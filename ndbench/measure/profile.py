"""Where the time of one step goes: a trace of it, and its breakdown as plain arithmetic of intervals.

The step is profiled by itself, never inside the timed window: a profiler slows what it watches. The parsing functions
take a trace's events as data and need no torch; they know nothing of engines or records.

Every moment of the window (the range :data:`STEP`, which starts and ends with an idle device) is counted once:

======================  ==============================================================================================
compute                 some kernel runs that is neither communication nor a copy
copy                    otherwise, some memory copy or fill runs
exposed communication   otherwise, some communication runs: nothing hides it
idle                    nothing runs
======================  ==============================================================================================

On a CUDA device the kernels of all streams count. On a CPU the operators of all threads stand for kernels, and gloo's
own spans, from the call to its end, for communication.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STEP = "ndbench.step"
"""Name of the range that encloses the step in its trace."""

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

_COMMUNICATION_KERNEL = re.compile(r"nccl|rccl|(one|two)_shot_all_reduce|multimem_|Memcpy PtoP", re.IGNORECASE)
_COMMUNICATION_SPAN = re.compile(r"gloo:")
_COMMUNICATION_CALL = re.compile(r"c10d::|_c10d_functional::")
_COPY_OPERATORS = frozenset({"aten::copy_", "aten::_to_copy", "aten::fill_", "aten::zero_"})

Interval = tuple[float, float]
"""[start, end) in microseconds, as traces have it."""


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one rank's step: ``step`` is the sum of four parts; ``communication`` counts the hidden part too."""

    step: float
    compute: float
    copy: float
    exposed_communication: float
    idle: float
    communication: float


def breakdown(events: Iterable[dict[str, Any]]) -> Breakdown:
    """The breakdown of the one range :data:`STEP` among the complete events (``ph`` X) of a Chrome trace.

    Raises ``ValueError`` when the trace holds no such range, or several.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    window = _window(complete)
    compute, copies, communication = list[Interval](), list[Interval](), list[Interval]()
    on_device = any(event.get("cat") in DEVICE_CATEGORIES for event in complete)
    for event in complete:
        kind = _device_kind(event) if on_device else _cpu_kind(event)
        span = _clipped(event, window)
        if kind is not None and span is not None:
            {"compute": compute, "copy": copies, "communication": communication}[kind].append(span)
    if not on_device:
        # An operator that copies is called by others: it is a copy for as long as it runs.
        compute = subtract(union(compute), union(copies))
    whole = (window[1] - window[0]) / 1e6
    computing = length(union(compute))
    copying = length(union([*compute, *copies])) - computing
    busy = length(union([*compute, *copies, *communication]))
    return Breakdown(
        step=whole,
        compute=computing / 1e6,
        copy=copying / 1e6,
        exposed_communication=(busy - computing - copying) / 1e6,
        idle=whole - busy / 1e6,
        communication=length(union(communication)) / 1e6,
    )


def kernels(events: Iterable[dict[str, Any]], count: int = 15) -> list[dict[str, Any]]:
    """The ``count`` kernels (on a CPU: operators) of the step that took longest: {"name", "seconds", "calls"}.

    An operator's time on a CPU includes the operators that it calls.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    window = _window(complete)
    on_device = any(event.get("cat") in DEVICE_CATEGORIES for event in complete)
    wanted = DEVICE_CATEGORIES if on_device else {"cpu_op"}
    totals: dict[str, list[float]] = {}
    for event in complete:
        span = _clipped(event, window) if event.get("cat") in wanted else None
        if span is not None:
            totals.setdefault(str(event["name"]), []).append(span[1] - span[0])
    longest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:count]
    return [{"name": name, "seconds": sum(spans) / 1e6, "calls": len(spans)} for name, spans in longest]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(intervals: list[Interval], taken: list[Interval]) -> list[Interval]:
    """The moments of ``intervals`` that are not in ``taken``; both are disjoint and in order, so is the result."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        index = first
        while index < len(taken) and taken[index][0] < end:
            if taken[index][0] > start:
                left.append((start, taken[index][0]))
            start = max(start, taken[index][1])
            index += 1
        if start < end:
            left.append((start, end))
    return left


def length(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace, gzipped or not."""
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events: list[dict[str, Any]] = content["traceEvents"] if isinstance(content, dict) else content
    return events


def profile_step(step: Callable[[], object], device: torch.device, trace: Path) -> dict[str, Any]:
    """Take two steps and record the second in ``trace``: {"breakdown": seconds by part, "kernels": the longest}.

    The first is for the profiler itself, which is slow to start. Collective where the step is.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    cuda = device.type != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda ready: ready.export_chrome_trace(str(trace)),
    ) as profiler:
        for _ in range(2):
            if cuda:
                torch.cuda.synchronize(device)
            with record_function(STEP):
                step()
                if cuda:
                    torch.cuda.synchronize(device)
            profiler.step()
    events = read_trace(trace)
    return {"breakdown": asdict(breakdown(events)), "kernels": kernels(events)}


def _window(complete: list[dict[str, Any]]) -> Interval:
    ranges = [event for event in complete if event.get("name") == STEP and event.get("cat") == "user_annotation"]
    if len(ranges) != 1:
        raise ValueError(f"the trace holds {len(ranges)} ranges named {STEP}, expected 1")
    start = float(ranges[0]["ts"])
    return start, start + float(ranges[0]["dur"])


def _clipped(event: dict[str, Any], window: Interval) -> Interval | None:
    start, end = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))
    start, end = max(start, window[0]), min(end, window[1])
    return (start, end) if start < end else None


def _device_kind(event: dict[str, Any]) -> str | None:
    category = event.get("cat")
    if category not in DEVICE_CATEGORIES:
        return None
    if _COMMUNICATION_KERNEL.search(event["name"]):
        return "communication"
    return "compute" if category == "kernel" else "copy"


def _cpu_kind(event: dict[str, Any]) -> str | None:
    name, category = event["name"], event.get("cat")
    if category == "user_annotation" and _COMMUNICATION_SPAN.match(name):
        return "communication"
    if category != "cpu_op" or _COMMUNICATION_CALL.match(name):
        return None
    return "copy" if name in _COPY_OPERATORS else "compute"
