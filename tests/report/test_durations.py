"""Lengths of time are readable from seconds to years, and those that a user writes are read."""

from __future__ import annotations

import pytest

from ndbench.matrix.durations import seconds
from ndbench.report.progress import duration


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (0.4, "0 s"),
        (47, "47 s"),
        (200, "3 min 20 s"),
        (3900, "1 h 05 min"),
        (86399, "23 h 59 min"),
        (86400, "1 day 00 h"),
        (3 * 86400 + 4 * 3600, "3 days 04 h"),
        (41 * 86400, "41 days"),
        (1e10, "317 years"),
    ],
)
def test_a_duration_is_said_in_two_units_at_most(length: float, said: str) -> None:
    assert duration(length) == said


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("45s", 45), ("20m", 1200), ("20 min", 1200), ("1.5h", 5400), ("2d", 172800)]
)
def test_a_duration_is_read(text: str, expected: float) -> None:
    assert seconds("measure.budget", text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-5m", "0", "5 weeks", "1e9", "٣m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"measure.budget=.* is not a duration"):
        seconds("measure.budget", text)
