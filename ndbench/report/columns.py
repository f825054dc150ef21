"""Rows under titles, at any width: a table where it fits, else an entry a paragraph. Nothing is ever cut off."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2
PROSE = 24
"""Columns that a text of several words is given at least."""


@dataclass(frozen=True)
class Column:
    title: str
    right: bool = False
    prose: bool = False
    """May be broken between its words."""


def print_columns(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """``rows`` have a text for each of ``columns``; the first names the row."""
    widths = [max(cell_len(text) for text in texts) for texts in zip([c.title for c in columns], *rows, strict=True)]
    least = [min(width, PROSE) if column.prose else width for column, width in zip(columns, widths, strict=True)]
    if sum(least) + GAP * (len(columns) - 1) > console.width:
        _print_paragraphs(console, columns, rows)
        return
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=not column.prose)
    for row in rows:
        table.add_row(*(Text(text) for text in row))
    console.print(table)


def _print_paragraphs(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    for name, *texts in rows:
        console.print(Text(name), soft_wrap=True)
        said = [
            text.rstrip(".") if column.prose else f"{column.title} {text}"
            for column, text in zip(columns[1:], texts, strict=True)
            if text not in ("", "-")
        ]
        lines = textwrap.wrap("; ".join(said), console.width - GAP, break_long_words=False, break_on_hyphens=False)
        for line in lines:
            console.print(Text(" " * GAP + line), soft_wrap=True)
