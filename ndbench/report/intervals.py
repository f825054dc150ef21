"""Which intervals are worth showing: that of two repeats reaches 13 standard errors to either side and says nothing."""

from __future__ import annotations

from ndbench.compare.result import CellVerdict, Current, MetricVerdict
from ndbench.compare.statistics import MIN_REPEATS


def few(current: Current) -> bool:
    """Whether these are too few repeats for an interval."""
    return current.ok_repeats < MIN_REPEATS


def interval_of(cell: CellVerdict, metric: MetricVerdict) -> tuple[float, float] | None:
    """The 95 % interval of a change; null where there is none, or too few repeats for one. Pairs have their own."""
    if metric.low is None or metric.high is None:
        return None
    unsure = cell.current is None or few(cell.current)
    return None if unsure and not metric.details.get("confirmed") else (metric.low, metric.high)
