"""The report of a run on a terminal: headline first, one table, then every reason in full sentences.

Readable at 100 columns and still at 80, with and without colour. Reads a comparison and a plan, decides nothing.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from ndbench.compare.result import CellVerdict, Comparison
from ndbench.report import facts
from ndbench.report.facts import Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {
    "regressed": "bold red",
    "invalid": "bold red",
    "missing": "bold red",
    "inconclusive": "yellow",
    "improved": "bold green",
    "pass": "green",
    "incomparable": "yellow",
    "new": "cyan",
    "no_baseline": "cyan",
}
WIDE = 96
"""Columns from which intervals and the layout fit beside the figures."""
MAX_EXPLAINED = 40
"""Cells explained in full; the rest are counted, and stand in ``verdict.json``."""
LOG_LINES = 8


def print_comparison(
    comparison: Comparison,
    *,
    plan: Plan | None = None,
    run_folder: str | Path | None = None,
    console: Console | None = None,
) -> None:
    """Print the whole report. ``plan`` is the run's ``plan.json`` (for what did not run, and the command lines)."""
    from rich.console import Console

    console = console or Console(highlight=False)
    _line(console, facts.headline(comparison), STYLES.get(comparison.verdict, ""))
    _line(console, facts.exit_line(comparison))
    _line(console, facts.baseline_line(comparison))
    for note in comparison.notes:
        _line(console, f"note: {note}", "yellow")
    if comparison.cells:
        console.print()
        console.print(_table(comparison.cells, console.width))
    _explain(console, comparison, plan, run_folder)
    for line in facts.layouts(comparison, plan):
        _line(console, line)
    for kind, reason, names in facts.folded(plan):
        _line(
            console, f"{kind} ({len(names)}): {facts.printable(reason)}: {', '.join(names[:8])}{_more(names, 8)}", "dim"
        )
    command = facts.accept_command(comparison, run_folder)
    if command is not None:
        _line(console, f"to make this run the reference: {command}", wrap=False)
    if run_folder is not None:
        _line(console, f"records, logs, verdict.json: {run_folder}", "dim")


def _line(console: Console, text: str, style: str = "", indent: int = 0, wrap: bool = True) -> None:
    """A paragraph with a hanging indent, never read as markup. A command is not wrapped: it is there to be copied."""
    from rich.text import Text

    first, rest = " " * indent, " " * (indent + 2)
    lines = [first + facts.printable(text)]
    if wrap:
        lines = textwrap.wrap(
            facts.printable(text), console.width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=True)


def _table(cells: list[CellVerdict], width: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    rows = [facts.row(cell) for cell in cells]
    wide = width >= WIDE
    layouts = wide and any(row.layout not in ("", row.cell) for row in rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("cell", overflow="fold", min_width=8)
    if layouts:
        table.add_column("layout", overflow="fold")
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column("peak mem", justify="right", no_wrap=True)
    table.add_column("last loss", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for cell, row in zip(cells, rows, strict=True):
        tokens = f"{row.tokens} {row.spread}".rstrip()
        change = f"{row.change} {row.interval}".rstrip() if wide else row.change
        verdict = Text(row.verdict, style=STYLES.get(cell.verdict, ""))
        texts = [Text(facts.printable(row.cell)), *([Text(row.layout)] if layouts else []), Text(tokens), Text(change)]
        table.add_row(*texts, Text(row.memory), Text(row.loss), verdict)
    return table


def _explain(console: Console, comparison: Comparison, plan: Plan | None, run_folder: str | Path | None) -> None:
    cells = facts.to_explain(comparison)
    for cell in cells[:MAX_EXPLAINED]:
        console.print()
        _line(console, f"{cell.name}: {facts.word(cell.verdict)}", STYLES.get(cell.verdict, ""))
        for sentence in facts.sentences(cell):
            _line(console, sentence, indent=2)
        current = cell.current
        if current is not None and current.log_tail and cell.verdict in ("invalid", "regressed"):
            for text in facts.tail(current.log_tail, LOG_LINES):
                _line(console, f"| {text}", "dim", indent=2, wrap=False)
        again = facts.reproduce_command(plan, cell.name)
        if again is not None and cell.verdict in ("regressed", "invalid"):
            _line(console, f"measure it again: {again}", indent=2, wrap=False)
        accept = facts.deliberate_command(comparison, cell, run_folder)
        if accept is not None:
            _line(console, f"if it is meant to be so: {accept}", indent=2, wrap=False)
    if len(cells) > MAX_EXPLAINED:
        _line(console, f"and {len(cells) - MAX_EXPLAINED} more cells with reasons, in verdict.json")
    console.print()
    remarks = facts.remarks(comparison)
    for text in remarks[:MAX_EXPLAINED]:
        _line(console, text, "dim")
    if len(remarks) > MAX_EXPLAINED:
        _line(console, f"and {len(remarks) - MAX_EXPLAINED} more remarks, in verdict.json", "dim")


def _more(names: list[str], most: int) -> str:
    return f" and {len(names) - most} more" if len(names) > most else ""
