"""Figures of one cell: its step times, repeat by repeat, and its history, session by session.

Pure functions to a Plotly description and a sentence that says the essentials in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ndbench.report.figures import PALETTE, Figure, Measured, axes, short, text, thinned


def step_times(cell: Measured) -> tuple[Figure, str] | None:
    """Distribution of the timed steps of every repeat, and apart from it what warm-up dropped."""
    traces: list[dict[str, Any]] = []
    dropped_x: list[str] = []
    dropped_y: list[float] = []
    dropped_n: list[int] = []
    for record in cell.good:
        steps, name = record["steps"], f"repeat {record['repeat']}"
        first = int(steps["first_timed"] or 0)
        seconds = steps["seconds"]
        timed = [value * 1e3 for value in seconds[first:] if value is not None and math.isfinite(value)]
        shown = [short(timed[index]) for index in thinned(len(timed))]
        traces.append(
            {
                "type": "box",
                "name": name,
                "y": shown,
                "boxpoints": "all",
                "pointpos": 0,
                "jitter": 0.5,
                "marker": {"color": PALETTE[0], "size": 4, "opacity": 0.7},
                "line": {"color": PALETTE[0], "width": 1},
                "showlegend": False,
                "hovertemplate": "%{x}<br>%{y:.4g} ms<extra></extra>",
            }
        )
        for step, value in enumerate(seconds[: min(first, 20)]):
            if value is not None and math.isfinite(value):
                dropped_x.append(name)
                dropped_y.append(short(value * 1e3) or 0.0)
                dropped_n.append(step)
    if not traces:
        return None
    if dropped_x:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "dropped: warm-up",
                "x": dropped_x,
                "y": dropped_y,
                "customdata": dropped_n,
                "marker": {"symbol": "x-thin-open", "size": 10, "color": PALETTE[1], "line": {"width": 2}},
                "hovertemplate": "%{x}, step %{customdata}: %{y:.4g} ms<br>dropped as warm-up<extra></extra>",
            }
        )
    layout = axes("", "step time (ms)")
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["height"] = 300
    counts = ", ".join(str(record["steps"]["first_timed"]) for record in cell.good)
    return {"data": traces, "layout": layout}, f"Steps that warm-up dropped, by repeat: {counts}."


HERE = "this run"
"""Stands for the session's name at the end of a history."""


@dataclass(frozen=True)
class Point:
    """One session of a cell's history."""

    session: str
    when: str
    values: Sequence[float]
    """Tokens/s of its repeats."""
    mark: str = ""
    """What was accepted here on purpose: ``new level``, ``improved``."""
    reason: str = ""
    change: float | None = None
    """Relative change of step time when the level moved at this session."""


def history(points: Sequence[Point]) -> tuple[Figure, str] | None:
    """Tokens/s of every accepted session and of this run, with change points and what was accepted on purpose."""
    drawn = [point for point in points if point.values]
    if len(drawn) < 2:
        return None
    means = [fmean(point.values) for point in drawn]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "tokens/s, with the range over repeats",
            "x": list(range(len(drawn))),
            "y": [short(value) for value in means],
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [short(max(p.values) - m) for p, m in zip(drawn, means, strict=True)],
                "arrayminus": [short(m - min(p.values)) for p, m in zip(drawn, means, strict=True)],
                "thickness": 1,
            },
            "text": [text(f"{p.session} {p.mark}: {p.reason}".replace(" : ", ": ")[:160]) for p in drawn],
            "line": {"color": PALETTE[0]},
            "marker": {
                "size": [13 if p.mark else 8 for p in drawn],
                "symbol": ["star" if p.mark else "circle" for p in drawn[:-1]] + ["diamond"],
                "color": [PALETTE[2] if p.mark else PALETTE[0] for p in drawn[:-1]] + [PALETTE[1]],
            },
            "hovertemplate": "%{text}<br>%{y:,.5g} tokens/s<extra></extra>",
        }
    ]
    layout = axes("", "tokens/s")
    layout["xaxis"] |= {
        "tickvals": list(range(len(drawn))),
        "ticktext": [text(p.when) for p in drawn],
        "automargin": True,
    }
    layout["shapes"] = []
    layout["annotations"] = []
    said = []
    for index, point in enumerate(drawn):
        if point.change is not None:
            line = {"color": PALETTE[1], "dash": "dash", "width": 2}
            layout["shapes"].append(
                {"type": "line", "x0": index - 0.5, "x1": index - 0.5, "yref": "paper", "y0": 0, "y1": 1, "line": line}
            )
            label = f"step time {point.change:+.1%}"
            layout["annotations"].append(
                {"x": index - 0.5, "y": 1, "yref": "paper", "text": label, "showarrow": False, "yanchor": "bottom"}
            )
            said.append(f"{label} from session {point.session} on")
    layout["height"] = 300
    stars = " Stars: accepted on purpose." if any(point.mark for point in drawn) else ""
    moved = f"Change points: {'; '.join(said)}." if said else "No change point."
    return {"data": traces, "layout": layout}, f"{moved} The diamond is this run.{stars}"
