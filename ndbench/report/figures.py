"""Figures of a run as plain Plotly descriptions (``data`` and ``layout``), for the page, static pictures and wandb.

Pure functions of records and verdicts. Knows no page, no theme (the reader's browser has one) and imports no Plotly.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ndbench.report import facts
from ndbench.results.schema import Record

Figure = dict[str, Any]

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
"""Okabe and Ito's colours, told apart with any colour vision; the yellow is left out, it is too pale on white."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon")
SHOWN = 12
"""Curves drawn at first; the others wait in the legend for a click."""
MOST_POINTS = 400
"""Points of one curve: a longer one is thinned evenly, its last point kept."""
MOST_BARS = 60


@dataclass(frozen=True)
class Measured:
    """One cell as it is drawn: its description, its repeats and its verdict's word."""

    name: str
    verdict: str
    cell: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if record["outcome"] == "ok" and record["steps"]]

    def values(self, metric: str) -> list[float]:
        found = (record["metrics"].get(metric, {}).get("value") for record in self.good)
        return [float(value) for value in found if value is not None and math.isfinite(value)]

    def mean(self, metric: str) -> float | None:
        values = self.values(metric)
        return fmean(values) if values else None

    @property
    def world(self) -> int:
        return int(self.records[0]["world"]["size"]) if self.records else int(self.cell.get("world_size") or 1)

    @property
    def layout(self) -> str:
        return str(self.records[0]["world"]["layout"]) if self.records else self.name

    @property
    def per_device(self) -> float | None:
        """Tokens/s of one device."""
        speed = self.mean("tokens_per_second")
        return None if speed is None else speed / self.world


def text(value: Any) -> str:
    """Text as Plotly shows it letter by letter: it reads a little HTML in names and labels."""
    return html.escape(facts.printable(str(value)))


def workload(cell: Mapping[str, Any], batch: bool = True) -> tuple[str, str]:
    """(key, title) of what must be equal for the tokens/s of two cells to answer "which layout?".

    Without ``batch`` the global batch may differ, as it does in weak scaling.
    """
    training = dict(cell.get("training") or {})
    training.pop("micro_batch_size", None)  # follows from the layout
    if not batch:
        training.pop("global_batch_size", None)
    key = json.dumps([_of(cell, "model"), training, cell.get("data"), cell.get("engine_config")], sort_keys=True)
    said = [(cell.get("model") or {}).get("name", "?"), f"{training.get('sequence_length', '?')} tokens"]
    if batch and training.get("global_batch_size"):
        said.append(f"batch {training['global_batch_size']}")
    return key, ", ".join([*said, str(training.get("precision", ""))]).rstrip(", ")


def _of(cell: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {key: value for key, value in (cell.get(part) or {}).items() if key != "kwargs"}


def pareto(cells: Sequence[Measured]) -> tuple[Figure, str] | None:
    """Tokens/s of one device against peak memory, the front of what no other layout beats in both, the best named."""
    points = [
        (cell, memory / 2**20, speed)
        for cell in cells
        if (speed := cell.per_device) is not None and (memory := cell.mean("peak_allocated_bytes")) is not None
    ]
    if not points:
        return None
    unit, scale = ("GiB", 1024.0) if max(memory for _, memory, _ in points) >= 1024 else ("MiB", 1.0)
    ranked = sorted(points, key=lambda point: (-point[2], point[1]))
    front: list[tuple[Measured, float, float]] = []
    for point in ranked:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    best = ranked[0]
    on_front = {point[0].name for point in front}
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "x": [_short(memory / scale) for _, memory, _ in reversed(front)],
            "y": [_short(speed) for _, _, speed in reversed(front)],
            "line": {"color": PALETTE[6], "dash": "dash", "width": 1, "shape": "hv"},
            "hoverinfo": "skip",
        }
    ]
    kinds = (("on the front", True, PALETTE[0], "circle"), ("not on it", False, PALETTE[4], "circle-open"))
    for label, wanted, colour, symbol in kinds:
        some = [point for point in ranked if (point[0].name in on_front) == wanted]
        if some:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers+text" if wanted and len(some) <= 8 else "markers",
                    "name": label,
                    "x": [_short(memory / scale) for _, memory, _ in some],
                    "y": [_short(speed) for _, _, speed in some],
                    "text": [text(cell.name) for cell, _, _ in some],
                    "textposition": "top center",
                    "marker": {
                        "color": colour,
                        "symbol": ["star" if cell is best[0] else symbol for cell, _, _ in some],
                        "size": [15 if cell is best[0] else 9 for cell, _, _ in some],
                    },
                    "hovertemplate": f"%{{text}}<br>%{{y:,.4s}} tokens/s a device<br>%{{x:.3g}} {unit}<extra></extra>",
                }
            )
    layout = _layout(f"peak memory of the worst rank ({unit})", "tokens/s a device")
    said = f"Best: {best[0].name}, {best[2]:,.4g} tokens/s a device at {best[1] / scale:,.3g} {unit}. "
    names = ", ".join(point[0].name for point in front)
    return {"data": traces, "layout": layout}, said + f"On the Pareto front: {names}."


def scaling(cells: Sequence[Measured]) -> tuple[Figure, str] | None:
    """Tokens/s over the number of devices, one line a family of layouts, with the line of no loss beside each.

    Strong: the same global batch; weak: the same batch a device. Null when no family was measured at two world sizes.
    """
    families: dict[str, dict[int, float]] = {}
    for cell in cells:
        speed = cell.mean("tokens_per_second")
        if speed is None:
            continue
        batch = int((cell.cell.get("training") or {}).get("global_batch_size") or 0)
        family = re.sub(r"\d+(x\d+)*", "", cell.layout) or cell.layout
        kinds = (f"strong, batch {batch}", f"weak, batch {batch / cell.world:g} a device")
        for name in (f"{family} ({kind})" for kind in kinds):
            sizes = families.setdefault(name, {})
            sizes[cell.world] = max(speed, sizes.get(cell.world, 0.0))
    for kind in {name.partition(" ")[2] for name in families}:
        alone = families.pop(f"single {kind}", {})  # one device is where every family starts
        for name in families if alone else ():
            if name.endswith(f" {kind}"):
                families[name] = {**alone, **families[name]}
    drawn = {name: sorted(sizes.items()) for name, sizes in families.items() if len(sizes) > 1}
    traces: list[dict[str, Any]] = []
    said = []
    for index, (name, line) in enumerate(sorted(drawn.items())):
        base, first = line[0]
        colour = PALETTE[index % len(PALETTE)]
        efficiency = [speed / (first * size / base) for size, speed in line]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": text(name),
                "x": [size for size, _ in line],
                "y": [_short(speed) for _, speed in line],
                "customdata": [_short(value) for value in efficiency],
                "line": {"color": colour},
                "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 9},
                "hovertemplate": "%{fullData.name}, %{x} devices<br>%{y:,.4s} tokens/s<br>"
                "%{customdata:.0%} of ideal<extra></extra>",
            }
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{text(name)}, ideal",
                "x": [base, line[-1][0]],
                "y": [_short(first), _short(first * line[-1][0] / base)],
                "line": {"color": colour, "dash": "dot", "width": 1},
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
        said.append(f"{name} keeps {efficiency[-1]:.0%} of ideal from {base} to {line[-1][0]} devices")
    if not traces:
        return None
    layout = _layout("devices", "tokens/s")
    layout["xaxis"] |= {"type": "log", "dtick": math.log10(2)}
    layout["yaxis"] |= {"type": "log"}
    return {"data": traces, "layout": layout}, "; ".join(said) + ". Dotted: ideal."


def losses(cells: Sequence[Measured]) -> tuple[Figure, str] | None:
    """Loss curves over each other, and below them the difference of each from the first; non-finite steps marked."""
    curves = [(cell, cell.good[0]["steps"]["loss"]) for cell in cells if cell.good and cell.good[0]["steps"]["loss"]]
    if not curves:
        return None
    reference, base = curves[0]
    traces: list[dict[str, Any]] = []
    gaps: list[str] = []
    largest = 0.0
    for index, (cell, loss) in enumerate(curves):
        style = {"color": PALETTE[index % len(PALETTE)], "dash": DASHES[index // len(PALETTE) % len(DASHES)]}
        shared = {
            "type": "scatter",
            "mode": "lines" if len(loss) > 1 else "markers",
            "name": text(cell.name),
            "legendgroup": str(index),
            "line": style,
            "visible": True if index < SHOWN else "legendonly",
        }
        steps = _thinned(len(loss))
        values = [_finite(loss[step]) for step in steps]
        traces.append(
            {**shared, "x": steps, "y": [_short(value, 7) for value in values], "hovertemplate": _AT.format("loss")}
        )
        if any(_finite(value) is None for value in loss):
            bad = [step for step, value in enumerate(loss) if _finite(value) is None]
            gaps.append(f"{cell.name} is not finite at step {bad[0]}" + (f" and {len(bad) - 1} more" * (len(bad) > 1)))
            floor = min((value for value in map(_finite, loss) if value is not None), default=0.0)
            marker = {"symbol": "x", "size": 9, "color": style["color"]}
            where = {"x": bad[:MOST_POINTS], "y": [floor] * len(bad[:MOST_POINTS]), "mode": "markers"}
            traces.append({**shared, **where, "marker": marker, "showlegend": False, "hovertemplate": _NOT_FINITE})
        if cell is not reference:
            apart = [_minus(loss[s], base[s] if s < len(base) else None) for s in steps]
            largest = max([largest, *(abs(value) for value in apart if value is not None)])
            below = {"x": steps, "y": [_short(value, 4) for value in apart], "yaxis": "y2", "showlegend": False}
            traces.append({**shared, **below, "hovertemplate": _AT.format("difference")})
    layout = _layout("step", "loss (nats a token)")
    layout["xaxis"] |= {"anchor": "y2"}
    layout["yaxis"] |= {"domain": [0.42, 1]}
    layout["yaxis2"] = _axis(f"minus {text(reference.name)}") | {"domain": [0, 0.34], "zeroline": True}
    layout["yaxis2"] |= {"exponentformat": "e"}
    layout["height"] = 460
    said = f"Largest difference from {reference.name}: {largest:.3g} over {len(curves)} layouts (repeat 0 of each). "
    said += "; ".join(gaps[:4]) + (". " if gaps else "")
    if len(curves) > SHOWN:
        said += f"{SHOWN} of {len(curves)} curves are drawn; click a name in the legend for the others."
    return {"data": traces, "layout": layout}, said


_AT = "%{{fullData.name}}<br>step %{{x}}: {} %{{y}}<extra></extra>"
_NOT_FINITE = "%{fullData.name}<br>step %{x}: not finite<extra></extra>"


def collectives(cells: Sequence[Measured]) -> tuple[Figure, str] | None:
    """Bytes that one rank sends in a step, stacked by mesh axis."""
    by_axis: dict[str, dict[str, float]] = {}
    names: list[str] = []
    for cell in cells:
        table = table_of(cell)
        if table is None:
            continue
        names.append(cell.name)
        for entry in table:
            axis = by_axis.setdefault(str(entry["axis"]), {})
            axis[cell.name] = axis.get(cell.name, 0.0) + entry["bytes"]
    if not names:
        return None
    left, names = len(names) - MOST_BARS, names[:MOST_BARS]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": text(axis),
            "y": [text(name) for name in names],
            "x": [_short(by_axis[axis].get(name, 0.0) / 2**20) for name in names],
            "marker": {
                "color": PALETTE[index % len(PALETTE)],
                "pattern": {
                    "shape": ("", "/", "\\", "x", "-", "|", "+", ".")[index % 8],
                    "fillmode": "overlay",
                    "fgcolor": "#FFFFFF",
                    "fgopacity": 0.6,
                    "solidity": 0.2,
                },
            },
            "hovertemplate": "%{y}<br>%{fullData.name}: %{x:.4g} MiB a step<extra></extra>",
        }
        for index, axis in enumerate(sorted(by_axis))
    ]
    layout = _layout("MiB a rank sends in one step", "")
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True, "type": "category"}
    layout |= {"barmode": "stack", "height": 140 + 26 * len(names)}
    totals = {name: sum(axis.get(name, 0.0) for axis in by_axis.values()) for name in names}
    most = max(totals, key=lambda name: totals[name])
    said = f"Most: {most}, {totals[most] / 2**20:,.3g} MiB a step." + (f" {left} more cells not drawn." * (left > 0))
    return {"data": traces, "layout": layout}, said


def table_of(cell: Measured) -> list[dict[str, Any]] | None:
    """The collectives of the cell's instrumented step; null when none was instrumented."""
    structures = (record["structure"] for record in cell.records if record["structure"])
    found = next(structures, None)
    return None if found is None else list(found["collectives"] or [])


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
        shown = [_short(timed[index]) for index in _thinned(len(timed))]
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
                dropped_y.append(_short(value * 1e3) or 0.0)
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
    layout = _layout("", "step time (ms)")
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["height"] = 300
    counts = ", ".join(str(record["steps"]["first_timed"]) for record in cell.good)
    return {"data": traces, "layout": layout}, f"Steps that warm-up dropped, by repeat: {counts}."


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
            "y": [_short(value) for value in means],
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [_short(max(p.values) - m) for p, m in zip(drawn, means, strict=True)],
                "arrayminus": [_short(m - min(p.values)) for p, m in zip(drawn, means, strict=True)],
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
    layout = _layout("", "tokens/s")
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


def _layout(x: str, y: str) -> dict[str, Any]:
    return {
        "xaxis": _axis(x),
        "yaxis": _axis(y),
        "margin": {"l": 70, "r": 16, "t": 28, "b": 48},
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top"},
        "hovermode": "closest",
        "height": 380,
    }


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, "zeroline": False}


def _thinned(count: int) -> list[int]:
    stride = max(1, math.ceil(count / MOST_POINTS))
    kept = list(range(0, count, stride))
    return kept if not kept or kept[-1] == count - 1 else [*kept, count - 1]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _minus(value: float | None, base: float | None) -> float | None:
    a, b = _finite(value), _finite(base)
    return None if a is None or b is None else a - b


def _short(value: float | None, digits: int = 5) -> float | None:
    """Enough digits to draw; the record has them all."""
    return None if value is None else float(f"{value:.{digits}g}")


def groups(cells: Iterable[Measured], batch: bool = True) -> dict[str, list[Measured]]:
    """Cells by :func:`workload`, under a title that no other workload has."""
    found: dict[str, list[Measured]] = {}
    titles: dict[str, str] = {}
    for cell in cells:
        key, title = workload(cell.cell, batch)
        found.setdefault(key, []).append(cell)
        titles[key] = title
    seen: dict[str, int] = {}
    named: dict[str, list[Measured]] = {}
    for key, some in found.items():
        title = titles[key]
        seen[title] = seen.get(title, 0) + 1
        named[title if seen[title] == 1 else f"{title} ({seen[title]})"] = some
    return named
