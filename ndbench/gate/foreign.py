"""A run compared with a file of pytest-benchmark: the same rule for speed, nothing else to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ndbench.compare.comparability import is_accelerator
from ndbench.compare.result import MetricVerdict
from ndbench.compare.throughput import Timing, gate_rule, judge, log_step_time
from ndbench.config import GateConfig
from ndbench.results.schema import Record


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
            timings[name] = Timing([log_step_time(record) for record in group], [base], rule)
    found = judge(timings)
    for name in sorted(set(seconds) - set(by_cell)):
        found[name] = MetricVerdict("outcome", "missing", "the file has this benchmark and the run does not")
    for name in sorted(set(by_cell) - set(seconds)):
        found[name] = MetricVerdict("outcome", "new", "the file does not have this cell")
    return found
