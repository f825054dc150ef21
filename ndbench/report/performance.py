"""The performance table of stored baselines, and the README that holds it: nothing in it is written by hand.

A row is a cell of the bundled engine (or of another one, where there is none of it) in the latest session that holds
it; the ratio is to the fastest other engine on the same cell of the same session. One that is not in that session
counts as it was in its latest on such a machine, and is then said to be of another run.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ndbench.compare.memory import said_bytes
from ndbench.compare.statistics import mean_interval
from ndbench.config import TrainingConfig
from ndbench.measure.flops import MATMUL_SIDE
from ndbench.report.peers import MEMORY, OURS, work_of
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline, Session, read_baseline, stored_suites

BLOCK = re.compile(r"(<!-- performance: (?P<pattern>\S+) -->\n)(?P<body>.*?)(<!-- /performance -->)", re.DOTALL)
"""What :func:`rewrite` fills; the pattern is of ``HARDWARE/SUITE``."""

HEAD = (
    "| cell | tokens/s per device | MFU | of matmul | peak memory | against the better peer | command | measured |",
    "|---|---|---|---|---|---|---|---|",
)
NO_SUITE = "adhoc"
"""What a run without a suite is filed under; its cells have no short command."""
NONE_YET = "No record is stored yet: `ndbench suite=peers`, then `ndbench baseline accept latest --reason …`.\n"


def table(root: Path, pattern: str = "*") -> str:
    """Markdown of every baseline below ``root`` whose ``HARDWARE/SUITE`` is like ``pattern``, a table a machine."""
    machines: dict[str, list[str]] = {}
    for folder in stored_suites(root):
        if fnmatch.fnmatchcase("/".join(folder.relative_to(root).parts), pattern):
            for machine, row in _rows(folder):
                machines.setdefault(machine, []).append(row)
    parts = ["\n".join((f"{machine}:", "", *HEAD, *rows, "")) for machine, rows in machines.items()]
    return "\n".join(parts) or NONE_YET


def rewrite(text: str, root: Path) -> str:
    """``text`` with every block filled anew. Raises ``ValueError`` where it has none."""
    if not BLOCK.search(text):
        raise ValueError("no block '<!-- performance: HARDWARE/SUITE -->' … '<!-- /performance -->' to fill")
    return BLOCK.sub(lambda found: f"{found[1]}{table(root, found['pattern'])}{found[4]}", text)


def _rows(folder: Path) -> Iterator[tuple[str, str]]:
    """(machine and software, row) of each cell."""
    baseline = read_baseline(folder)
    for name in baseline.cells:
        session = baseline.history(name)[-1]
        records = session.cells[name]
        beside = _beside(records[0], session, baseline)
        if records[0]["cell"]["engine"] != OURS and OURS in beside:
            continue
        yield _machine(records[0]), _row(name, records, beside, session)


def _beside(record: Record, session: Session, baseline: Baseline) -> dict[str, list[Record]]:
    """Repeats by engine of the cells that differ from this one in nothing but their engine, on the same machine.

    Of an engine the fastest cell of this session, else of its latest session, else one that did not end well.
    """
    found: dict[str, tuple[tuple[bool, bool, int, float], list[Record]]] = {}
    for age, place in enumerate(reversed(baseline.sessions)):
        for name, records in place.cells.items():
            same = work_of(records[0]["cell"]) == work_of(record["cell"]) and _machine(records[0]) == _machine(record)
            if same and any(place is each for each in baseline.history(name)):
                speeds = _speeds(records)
                worth = (bool(speeds), place is session, -age, fmean(speeds) if speeds else 0.0)
                engine = records[0]["cell"]["engine"]
                found[engine] = max(found.get(engine, (worth, records)), (worth, records), key=lambda each: each[0])
    return {engine: records for engine, (_, records) in found.items()}


def _machine(record: Record) -> str:
    hardware, software = record["fingerprint"]["hardware"], record["fingerprint"]["software"]
    count = f"{hardware['count']} x " if hardware.get("count") else ""
    parts = [f"{count}{hardware.get('name')}"]
    named = ("torch", "driver", "nccl", "cudnn", "flash-attn-4")
    parts += [f"{name} {software[name]}" for name in named if software.get(name)]
    return ", ".join(parts)


def _row(name: str, records: Sequence[Record], beside: dict[str, list[Record]], session: Session) -> str:
    cell, speeds = records[0]["cell"], _speeds(records)
    selected = _selected(name, cell, beside)
    command = "" if cell["suite"] == NO_SUITE else f"`ndbench suite={cell['suite']} cells={selected}`"
    day = str(records[-1]["end"] or session.accepted)[:10]
    if not speeds:
        outcome = ", ".join(sorted({record["outcome"] for record in records}))
        return f"| {name} | {outcome} | | | | {_against(records, beside)} | {command} | {day} |"
    columns = (
        name,
        f"{median(speeds):,.0f}",
        _share(_mfu(records)),
        _share(_of_matmul(records)),
        _peak(records),
        _against(records, beside),
        command,
        f"{day}, {len(speeds)} launch{'es' * (len(speeds) > 1)}",
    )
    return f"| {' | '.join(columns)} |"


def _selected(name: str, cell: Mapping[str, Any], beside: Mapping[str, Any]) -> str:
    """What selects the cell, and its peers with it."""
    ending = f"-{cell['engine']}"
    return f"'{name.removesuffix(ending)}-*'" if len(beside) > 1 and name.endswith(ending) else name


def _values(records: Sequence[Record], metric: str) -> list[float]:
    found = (record["metrics"].get(metric, {}).get("value") for record in records if record["outcome"] == "ok")
    return [float(value) for value in found if value is not None]


def _speeds(records: Sequence[Record]) -> list[float]:
    """Tokens/s per device of each repeat."""
    return [speed / records[0]["world"]["size"] for speed in _values(records, "tokens_per_second")]


def _mfu(records: Sequence[Record]) -> float | None:
    found = _values(records, "mfu_causal")
    return median(found) if found else None


def _of_matmul(records: Sequence[Record]) -> float | None:
    """Model FLOP/s (causal) over those of the yardstick's bfloat16 matmul beside it; null without a known peak."""
    hardware, mfu = records[0]["cell"]["hardware"], _mfu(records)
    peak = hardware["peak_flops"].get(records[0]["cell"]["training"]["precision"])
    sides = [side for record in records for side in (record["yardstick"] or {}).values() if side]
    seconds = [side["matmul_seconds"] for side in sides if side.get("matmul_seconds")]
    if mfu is None or not peak or not seconds:
        return None
    side: int = MATMUL_SIDE[hardware["device"]]
    return float(mfu * peak * median(seconds) / (2 * side**3))


def _peak(records: Sequence[Record]) -> str:
    found = _values(records, "peak_allocated_bytes")
    return said_bytes(max(found)) if found else ""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _setting(record: Record, key: str) -> str:
    """A key of ``training`` as it is written; records from before there was one have its default."""
    value = record["cell"]["training"].get(key, getattr(TrainingConfig, key))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _against(ours: Sequence[Record], beside: dict[str, list[Record]]) -> str:
    """``1.12 (1.10 to 1.14) of accelerate, 54.90 GiB``: the ratio of speeds, its 95 % interval, the peer's memory."""
    speeds = _speeds(ours)
    peers = {other: _speeds(records) for other, records in beside.items() if other != ours[0]["cell"]["engine"]}
    measured = {other: found for other, found in peers.items() if found}
    if not measured:
        failed = {other: beside[other][0]["outcome"] for other in peers}
        return ", ".join(f"{other}: {outcome}" for other, outcome in failed.items())
    best = max(measured, key=lambda other: fmean(measured[other]))
    memory = "".join(f", {peak}" for peak in [_peak(beside[best])] if peak)
    theirs, together = beside[best][0], beside[best][0]["session"] == ours[0]["session"]
    memory += "".join(
        f", {key}={_setting(theirs, key)}" for key in MEMORY if _setting(theirs, key) != _setting(ours[0], key)
    )
    memory += "" if together else ", another run"
    if not speeds:
        return f"{best}: {median(measured[best]):,.0f}{memory}"
    logs = [[math.log(speed) for speed in side] for side in (speeds, measured[best])]
    ratio = fmean(logs[0]) - fmean(logs[1])
    intervals = [mean_interval(side) for side in logs]
    said = ""
    if together and all(intervals):  # what drifts between runs is in no interval
        half = math.hypot(*((interval[1] - interval[0]) / 2 for interval in intervals if interval))
        said = f" ({math.exp(ratio - half):.3f} to {math.exp(ratio + half):.3f})"
    return f"{math.exp(ratio):.3f}{said} of {best}{memory}"
