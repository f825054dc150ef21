"""Change points in a cell's history: where its level moved, told from the series alone and the same on every rerun.

E-divisive (Matteson and James 2014) finds the split with the largest energy distance, Welch's t-test decides whether
it is one (a permutation test would make the answer depend on luck), and both sides are searched again. Outliers are
clipped first: training benchmarks have whole launches that sit apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ndbench.compare.statistics import t_tail, variance
from ndbench.compare.throughput import log_step_time
from ndbench.results.sessions import Baseline

if TYPE_CHECKING:
    import numpy as np

HAMPEL_WINDOW = 7
HAMPEL_SIGMAS = 4.0
MIN_SEGMENT = 4
ALPHA = 1e-3
"""Welch's p of a change point. The split was chosen to be the best of many, so this is no error rate of the series."""


@dataclass(frozen=True)
class ChangePoint:
    index: int
    """Position in the given series of the first value at the new level."""
    before: float
    after: float
    """Means of the clipped values on both sides, up to the neighbouring change points."""
    p: float

    @property
    def change(self) -> float:
        return self.after - self.before


def clip_outliers(values: Sequence[float], window: int = HAMPEL_WINDOW, sigmas: float = HAMPEL_SIGMAS) -> list[float]:
    """Hampel's filter: a value further from the median of its window than ``sigmas`` sd is moved to that distance.

    The sd is robust and of the whole series: 1.4826 times the median distance to the window's median. A change of
    level is no outlier: within half a window of it the medians move too.
    """
    count, half = len(values), window // 2
    medians = []
    for index in range(count):
        start = max(0, min(index - half, count - window))
        medians.append(median(values[start : start + window]))
    distances = [abs(value - middle) for value, middle in zip(values, medians, strict=True)]
    limit = sigmas * 1.4826 * median(distances) if count else 0.0
    return [
        min(max(value, middle - limit), middle + limit) if limit > 0 else value
        for value, middle in zip(values, medians, strict=True)
    ]


def change_points(values: Sequence[float | None], alpha: float = ALPHA) -> list[ChangePoint]:
    """The change points of a series, oldest first; missing and non-finite values are left out, not counted as level."""
    kept = [(index, float(v)) for index, v in enumerate(values) if v is not None and math.isfinite(v)]
    series = clip_outliers([value for _, value in kept])
    splits = sorted(_split(series, 0, len(series), alpha))
    edges = [0, *splits, len(series)]
    found = []
    for number, split in enumerate(splits):
        left, right = series[edges[number] : split], series[split : edges[number + 2]]
        found.append(ChangePoint(kept[split][0], fmean(left), fmean(right), welch_p(left, right)))
    return found


def _split(series: list[float], start: int, end: int, alpha: float) -> list[int]:
    """The change points inside ``series[start:end]``, searched from the strongest down."""
    if end - start < 2 * MIN_SEGMENT:
        return []
    at = start + _best_split(series[start:end])
    if not welch_p(series[start:at], series[at:end]) < alpha:
        return []
    return [at, *_split(series, start, at, alpha), *_split(series, at, end, alpha)]


def _best_split(values: list[float]) -> int:
    """The split with the largest energy distance between its sides, at least :data:`MIN_SEGMENT` from either end.

    E = 2 E|X - Y| - E|X - X'| - E|Y - Y'|, scaled by nm / (n + m).
    """
    import numpy as np

    series = np.asarray(values)
    count = len(series)
    sums: np.ndarray[Any, Any] = np.zeros((count + 1, count + 1))
    sums[1:, 1:] = np.abs(series[:, None] - series[None, :]).cumsum(axis=0).cumsum(axis=1)
    n = np.arange(MIN_SEGMENT, count - MIN_SEGMENT + 1)
    m = count - n
    inside_left = sums[n, n]
    across = sums[n, count] - inside_left
    inside_right = sums[count, count] - inside_left - 2 * across
    energy = 2 * across / (n * m) - inside_left / (n * (n - 1)) - inside_right / (m * (m - 1))
    return int(n[np.argmax(energy * n * m / count)])


def welch_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of Welch's t-test; groups without any spread differ surely, or not at all."""
    va, vb = variance(a) / len(a), variance(b) / len(b)
    difference = abs(fmean(a) - fmean(b))
    if va + vb <= (1e-12 * max(1.0, abs(fmean(a)))) ** 2:
        return 0.0 if difference > 1e-9 * max(1.0, abs(fmean(a))) else 1.0
    degrees = (va + vb) ** 2 / (va**2 / max(1, len(a) - 1) + vb**2 / max(1, len(b) - 1))
    return 2 * t_tail(difference / math.sqrt(va + vb), degrees)


@dataclass(frozen=True)
class HistoryChange:
    """A change of a cell's step time between two of its sessions."""

    session: str
    """The first session at the new level."""
    slowdown: float
    """Relative change of step time."""
    p: float


def history_changes(baseline: Baseline, cell: str) -> list[HistoryChange]:
    """Change points of the cell's sessions (mean log step time each), at its present level and on its latest hardware.

    The series starts anew where the hardware changed and where a change was accepted on purpose.
    """
    points: list[tuple[str, float]] = []
    hardware: Any = None
    for session in baseline.segment(cell, limit=len(baseline.sessions)):
        records = [record for record in session.cells[cell] if record["outcome"] == "ok"]
        if not records:
            continue
        if records[0]["fingerprint"]["hardware"] != hardware:
            points, hardware = [], records[0]["fingerprint"]["hardware"]
        points.append((session.session, fmean(map(log_step_time, records))))
    found = change_points([value for _, value in points])
    return [HistoryChange(points[c.index][0], math.expm1(c.change), c.p) for c in found]
