"""A run compared with a file of pytest-benchmark: the same rule for speed, nothing else to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ndbench.compare.comparability import is_accelerator
from ndbench.compare.exits import SUMMARY_ORDER, exit_of
from ndbench.compare.result import CellVerdict, Comparison, MetricVerdict, worst
from ndbench.compare.summary import summarise
from ndbench.compare.throughput import Timing, gate_rule, judge, log_step_time
from ndbench.config import GateConfig
from ndbench.results.pytest_benchmark import read_pytest_benchmark
from ndbench.results.schema import Record
from ndbench.results.store import RunFolder, read_json


def compare_with_file(
    records: Sequence[Record], seconds: dict[str, list[float]], gate: GateConfig
) -> dict[str, MetricVerdict]:
    """The verdict on speed by cell: ``missing`` for a benchmark the run lacks, ``new`` for a cell the file lacks.

    The file is one session of unknown hardware, so a slowdown is a suspect (``inconclusive``), never a regression.
    """
    by_cell: dict[str, list[Record]] = {}
    for record in records:
        if record["outcome"] == "ok":
            by_cell.setdefault(record["cell"]["name"], []).append(record)
    timings = {}
    for name, group in by_cell.items():
        if name in seconds:
            rule = gate_rule(is_accelerator(group[0]), gate.min_effect, gate.resolve, gate.alpha)
            base = [math.log(value) for value in seconds[name]]
            timings[name] = Timing([log_step_time(record) for record in group], [base], rule, accepted=False)
    found = judge(timings)
    for name in sorted(set(seconds) - set(by_cell)):
        found[name] = MetricVerdict("outcome", "missing", "the file has this benchmark and the run does not")
    for name in sorted(set(by_cell) - set(seconds)):
        found[name] = MetricVerdict("outcome", "new", "the file does not have this cell")
    return found


def comparison_with_file(run: RunFolder, path: Path, gate: GateConfig) -> Comparison:
    """The verdict on a run against a file of pytest-benchmark, in the form that every report takes.

    Raises ``ValueError`` naming the file, or a benchmark in it, that cannot be read.
    """
    records = run.records()
    found = compare_with_file(records, read_pytest_benchmark(read_json(path), str(path)), gate)
    cells = [
        CellVerdict(
            name=name,
            cell_id=None,
            verdict=metric.verdict,
            reasons=[metric.reason] if metric.verdict != "pass" else [],
            metrics=[metric],
            current=summarise([record for record in records if record["cell"]["name"] == name]),
        )
        for name, metric in found.items()
    ]
    code, reason = exit_of(cells, gate, True)
    verdicts = {cell.verdict for cell in cells}
    return Comparison(
        suite=records[0]["suite"] if records else "",
        run=run.path.name,
        mode="ab",
        baseline=str(path),
        sessions=1,
        newest_days=None,
        cells=cells,
        verdict=next((word for word in SUMMARY_ORDER if word in verdicts), worst(verdicts) or "invalid"),
        exit_code=code,
        exit_reason=reason,
        notes=["only speed was compared: a file of pytest-benchmark holds nothing else"],
    )
