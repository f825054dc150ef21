"""Sparklines and bars out of characters, and rows of them that fit a terminal's columns.

Pure functions of numbers to text; knows no cell and no colour.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len, chop_cells


@dataclass(frozen=True)
class Strokes:
    """The characters to draw with."""

    levels: str
    """From the lowest to the highest value of a sparkline."""
    parts: str
    """Of one column of a bar, from the thinnest to the whole column."""
    legend: str
    """What a reader has to be told about ``levels``."""


BLOCKS = Strokes("▁▂▃▄▅▆▇█", "▏▎▍▌▋▊▉█", "")
ASCII = Strokes("0123456789", "#", "0 is the lowest value of a line and 9 the highest. ")
NOT_FINITE = "x"
STEADY_SPAN = 0.1
"""Least range of a sparkline of times, relative to their median: noise of a few percent shall look like noise."""


def thinned(values: Sequence[float | None], width: int) -> list[float | None]:
    """At most ``width`` values: each the largest of its share, and null where one of them is not finite."""
    if len(values) <= width:
        return [value if value is not None and math.isfinite(value) else None for value in values]
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    found: list[float | None] = []
    for start, end in pairwise(edges):
        share = [value for value in values[start:end] if value is not None and math.isfinite(value)]
        found.append(max(share) if len(share) == end - start else None)
    return found


def sparkline(values: Sequence[float | None], strokes: Strokes, low: float, high: float) -> str:
    """A character a value between ``low`` and ``high``; :data:`NOT_FINITE` for null."""
    top = len(strokes.levels) - 1
    drawn = []
    for value in values:
        if value is None:
            drawn.append(NOT_FINITE)
        else:
            share = (value - low) / (high - low) if high > low else 0.0
            drawn.append(strokes.levels[round(min(max(share, 0.0), 1.0) * top)])
    return "".join(drawn)


def bar(share: float, width: int, strokes: Strokes) -> str:
    """A bar of ``share`` (0 to 1) of ``width`` columns; anything above 0 is seen."""
    fine = len(strokes.parts)
    eighths = round(min(max(share, 0.0), 1.0) * width * fine)
    if share > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, fine)
    return strokes.parts[-1] * whole + (strokes.parts[rest - 1] if rest else "")


@dataclass(frozen=True)
class Row:
    """One line of a drawing. A null name goes on with the row above."""

    name: str
    figure: str
    """Stands before the drawing, aligned to the right."""
    drawing: str
    said: str = ""
    """Stands after the drawing."""


def drawing_width(names: Sequence[str], figures: Sequence[str], said: Sequence[str], width: int, most: int = 40) -> int:
    """Columns that are left for the drawings beside these texts, between 8 and ``most``."""
    used = 2 + name_width(names, width) + 1 + _longest(figures) + 1 + 1 + _longest(said)
    return max(8, min(most, width - used))


def name_width(names: Sequence[str], width: int) -> int:
    """Columns for the names: a name longer than a third of the line has a line of its own."""
    return _longest([name for name in names if cell_len(name) <= max(12, width // 3)])


def lay_out(rows: Sequence[Row], width: int) -> list[tuple[str, str, str]]:
    """Lines of (before the drawing, the drawing, after it), none wider than ``width``.

    A name too long for its column stands on a line of its own, and what no longer fits after a drawing goes below it.
    """
    names = name_width([row.name for row in rows], width)
    figures, drawings = _longest([row.figure for row in rows]), _longest([row.drawing for row in rows])
    lines: list[tuple[str, str, str]] = []
    for row in rows:
        name = row.name
        if cell_len(name) > names:
            lines += [(f"  {piece}", "", "") for piece in chop_cells(name, width - 2)]
            name = ""
        before = f"  {name}{' ' * (names - cell_len(name))} {' ' * (figures - cell_len(row.figure))}{row.figure}"
        before = before.rstrip() if not row.drawing and not row.said else before + " " * bool(figures)
        pad = " " * (drawings - cell_len(row.drawing) + 1)
        if not row.said:
            lines.append((before, row.drawing, ""))
        elif cell_len(before) + drawings + 1 + cell_len(row.said) <= width:
            lines.append((before, row.drawing, pad + row.said))
        else:
            lines.append((before, row.drawing, ""))
            lines += [("", "", piece) for piece in textwrap.wrap(row.said, width, initial_indent="      ",
                                                                  subsequent_indent="      ")]  # fmt: skip
    return lines


def _longest(texts: Sequence[str]) -> int:
    return max((cell_len(text) for text in texts), default=0)
