"""Figures that compare layouts: speed against memory, scaling, loss over loss, bytes by mesh axis.

Pure functions from measured cells to a Plotly description and a sentence that says the essentials in words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ndbench.report.figures import (
    MOST_POINTS,
    PALETTE,
    Figure,
    Measured,
    axes,
    axis_of,
    finite,
    minus,
    short,
    table_of,
    text,
    thinned,
)

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon")
SHOWN = 12
"""Curves drawn at first; the others wait in the legend for a click."""
MOST_BARS = 60


def pareto(cells: Sequence[Measured]) -> tuple[Figure, str] | None:
    """Tokens/s of one device against peak memory, the front of what no other layout beats in both, the best named.

    Null for fewer than two cells: a point alone tells nothing on axes that are drawn around it.
    """
    points = [
        (cell, memory / 2**20, speed)
        for cell in cells
        if (speed := cell.per_device) is not None and (memory := cell.mean("peak_allocated_bytes")) is not None
    ]
    if len(points) < 2:
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
            "x": [short(memory / scale) for _, memory, _ in reversed(front)],
            "y": [short(speed) for _, _, speed in reversed(front)],
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
                    "x": [short(memory / scale) for _, memory, _ in some],
                    "y": [short(speed) for _, _, speed in some],
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
    layout = axes(f"peak memory, worst rank ({unit})", "tokens/s a device")
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
                "y": [short(speed) for _, speed in line],
                "customdata": [short(value) for value in efficiency],
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
                "y": [short(first), short(first * line[-1][0] / base)],
                "line": {"color": colour, "dash": "dot", "width": 1},
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
        said.append(f"{name} keeps {efficiency[-1]:.0%} of ideal from {base} to {line[-1][0]} devices")
    if not traces:
        return None
    layout = axes("devices", "tokens/s")
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
        steps = thinned(len(loss))
        values = [finite(loss[step]) for step in steps]
        traces.append(
            {**shared, "x": steps, "y": [short(value, 7) for value in values], "hovertemplate": _AT.format("loss")}
        )
        if any(finite(value) is None for value in loss):
            bad = [step for step, value in enumerate(loss) if finite(value) is None]
            gaps.append(f"{cell.name} is not finite at step {bad[0]}" + (f" and {len(bad) - 1} more" * (len(bad) > 1)))
            floor = min((value for value in map(finite, loss) if value is not None), default=0.0)
            marker = {"symbol": "x", "size": 9, "color": style["color"]}
            where = {"x": bad[:MOST_POINTS], "y": [floor] * len(bad[:MOST_POINTS]), "mode": "markers"}
            traces.append({**shared, **where, "marker": marker, "showlegend": False, "hovertemplate": _NOT_FINITE})
        if cell is not reference:
            apart = [minus(loss[s], base[s] if s < len(base) else None) for s in steps]
            largest = max([largest, *(abs(value) for value in apart if value is not None)])
            below = {"x": steps, "y": [short(value, 4) for value in apart], "yaxis": "y2", "showlegend": False}
            traces.append({**shared, **below, "hovertemplate": _AT.format("difference")})
    layout = axes("step", "loss (nats a token)")
    layout["xaxis"] |= {"anchor": "y2"}
    layout["yaxis"] |= {"domain": [0.42, 1]}
    layout["yaxis2"] = axis_of(f"minus {text(reference.name)}") | {"domain": [0, 0.34], "zeroline": True}
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
            "x": [short(by_axis[axis].get(name, 0.0) / 2**20) for name in names],
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
    layout = axes("MiB a rank sends in one step", "")
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True, "type": "category"}
    layout |= {"barmode": "stack", "height": 140 + 26 * len(names)}
    totals = {name: sum(axis.get(name, 0.0) for axis in by_axis.values()) for name in names}
    most = max(totals, key=lambda name: totals[name])
    said = f"Most: {most}, {totals[most] / 2**20:,.3g} MiB a step." + (f" {left} more cells not drawn." * (left > 0))
    return {"data": traces, "layout": layout}, said
