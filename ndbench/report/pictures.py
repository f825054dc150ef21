"""The figures that compare layouts as PNG files, for a README or a slide.

Draws the same descriptions as the page, with Matplotlib: that needs no browser, which is seldom there where a run is
measured. Knows as much of Plotly's format as ``figures_layouts`` uses of it, and fails on anything else.
"""

from __future__ import annotations

import html
import math
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndbench.report import facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 9.0, 200
"""Inches and dots an inch: 1800 pixels."""
PIXELS_PER_INCH = 100.0
"""Of the heights in the descriptions."""
TITLE_INCHES, CAPTION_INCHES = 0.36, 0.16
"""Heights of the title and of one line of the caption."""
CAPTION_LETTERS = 135
MARKERS = {
    "circle": "o", "circle-open": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "star": "*",
    "hexagon": "h", "x": "x",
}  # fmt: skip
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
HATCHES = {"": "", "/": "//", "\\": "\\\\", "x": "xx", "-": "--", "|": "||", "+": "++", ".": ".."}


def check() -> None:
    """Raises ``ValueError`` naming the extra to install when Matplotlib is absent."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"pictures need {error.name}: pip install 'ndbench[png]'") from error


def save(folder: Path, groups: Sequence[Mapping[str, Any]], drawn: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Write one file a figure of ``groups`` (as the page has them, ``drawn`` by id) into ``folder``; the paths."""
    check()
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    for number, group in enumerate(groups):
        for entry in group["figures"]:
            stem = re.sub(r"[^a-z0-9]+", "-", f"{entry['kind']}-{group['title']}".lower()).strip("-")[:120]
            path = folder / f"{number:02d}-{stem}.png"
            made = picture(drawn[entry["id"]], f"{entry['title']}: {group['title']}", entry["said"])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box stands for it
                made.savefig(path, dpi=DPI, metadata={"Software": None})
            saved.append(path)
    return saved


def picture(described: Mapping[str, Any], title: str, caption: str) -> Figure:
    """The figure of a description, below its title and its caption."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = described["layout"]
    lines = textwrap.wrap(facts.printable(caption), CAPTION_LETTERS)
    head = TITLE_INCHES + CAPTION_INCHES * len(lines)
    height = layout["height"] / PIXELS_PER_INCH + head
    figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - head / height)))
    figure.text(0.01, 1 - 0.08 / height, facts.printable(title), va="top", fontsize=12, parse_math=False)
    below: dict[str, Any] = {"va": "top", "fontsize": 8, "color": "#565B63", "linespacing": 1.3, "parse_math": False}
    figure.text(0.01, 1 - TITLE_INCHES / height, "\n".join(lines), **below)
    if "yaxis2" in layout:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    else:
        upper = lower = figure.subplots()
    bars: dict[str, float] = {}
    for trace in described["data"]:
        if trace.get("visible", True) is not True:
            continue  # waits in the page's legend for a click
        axes = lower if trace.get("yaxis") == "y2" else upper
        if trace["type"] == "bar":
            _bars(axes, trace, bars)
        else:
            assert trace["type"] == "scatter", f"no figure that compares layouts has a {trace['type']}"
            _scatter(axes, trace)
    _dress(lower, "x", layout["xaxis"])
    _dress(upper, "y", layout["yaxis"])
    if lower is not upper:
        _dress(lower, "y", layout["yaxis2"])
    for axes in {upper, lower}:
        axes.grid(color="#D5D8DD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = upper.get_legend_handles_labels()
    if len(handles) > 1:
        legend = figure.legend(handles, labels, loc="outside lower left", ncols=4, fontsize=8, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def _scatter(axes: Axes, trace: Mapping[str, Any]) -> None:
    mode = trace["mode"].split("+")
    line, marker = trace.get("line", {}), trace.get("marker", {})
    label = html.unescape(trace["name"]) if trace.get("showlegend", True) else "_hidden"
    ys = [math.nan if value is None else value for value in trace["y"]]
    if "lines" in mode:
        axes.plot(
            trace["x"],
            ys,
            color=line.get("color"),
            linestyle=DASHES[line.get("dash", "solid")],
            linewidth=line.get("width", 1.6),
            drawstyle="steps-post" if line.get("shape") == "hv" else "default",
            label=label,
        )
        label = "_hidden"
    if "markers" in mode:
        count = len(trace["x"])
        symbols, sizes = (
            _each(marker.get(key, default), count) for key, default in (("symbol", "circle"), ("size", 9))
        )
        colour = marker.get("color", line.get("color"))
        for x, y, symbol, size in zip(trace["x"], ys, symbols, sizes, strict=True):
            face = "none" if symbol.endswith("-open") else colour
            kind = MARKERS[symbol]
            axes.plot([x], [y], kind, color=colour, markerfacecolor=face, markersize=size * 0.75, label=label)
            label = "_hidden"  # once in the legend
    if "text" in mode:
        for x, y, text in zip(trace["x"], ys, trace["text"], strict=True):
            axes.annotate(
                html.unescape(text),
                (x, y),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                parse_math=False,
            )
        axes.margins(x=0.12, y=0.15)


def _bars(axes: Axes, trace: Mapping[str, Any], ends: dict[str, float]) -> None:
    """Horizontal bars, each beginning where the one before it in the same row ended."""
    names = [html.unescape(name) for name in trace["y"]]
    places = [list(dict.fromkeys([*ends, *names])).index(name) for name in names]
    lefts = [ends.get(name, 0.0) for name in names]
    axes.barh(
        places,
        trace["x"],
        left=lefts,
        color=trace["marker"]["color"],
        hatch=HATCHES[trace["marker"]["pattern"]["shape"]],
        edgecolor="white",
        linewidth=0,
        label=html.unescape(trace["name"]),
    )
    for name, left, value in zip(names, lefts, trace["x"], strict=True):
        ends[name] = left + value
    axes.set_yticks(range(len(ends)), list(ends), parse_math=False)


def _dress(axes: Axes, which: str, described: Mapping[str, Any]) -> None:
    """Title, scale and direction of one axis."""
    title = html.unescape(described["title"]["text"])
    getattr(axes, f"set_{which}label")(title, parse_math=False)
    if described.get("type") == "log":
        getattr(axes, f"set_{which}scale")("log", base=2 if which == "x" else 10)
        axis = axes.xaxis if which == "x" else axes.yaxis
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter("{x:,g}" if which == "y" else "")
    if described.get("autorange") == "reversed":
        getattr(axes, f"invert_{which}axis")()


def _each(value: Any, count: int) -> Sequence[Any]:
    return value if isinstance(value, list) else [value] * count
