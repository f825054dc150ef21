"""The report of a run on a terminal: what is wrong first, then one table, every reason in full, and drawings.

Readable at 80 columns, without colour and where only ASCII can be shown. A failing gate is answered within the first
screen and, when the report is longer than that, once more at its end. Reads a comparison and a plan, decides nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ndbench.compare.result import CellVerdict, Comparison
from ndbench.report import facts, peers, ranking
from ndbench.report.facts import Plan
from ndbench.report.plain import ascii_text, is_plain
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ndbench.report.figures import Measured
    from ndbench.report.page_facts import Finding

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
NARROW = 76
"""Columns below which only speed and verdict fit beside a name."""
SCREEN = 23
"""Lines of the smallest usual terminal (24) without the one of the prompt."""
MAX_EXPLAINED = 40
"""Cells explained in full; the rest are counted, and stand in ``verdict.json``."""
LOG_LINES = 8


@dataclass(frozen=True)
class _Line:
    text: str
    style: str = ""
    indent: int = 0
    hang: int = 2
    """Further indent of the lines it is wrapped to."""
    wrap: bool = True
    """A command is not wrapped: it is there to be copied."""


def print_comparison(
    comparison: Comparison,
    *,
    plan: Plan | None = None,
    run_folder: str | Path | None = None,
    records: Sequence[Record] = (),
    baseline: Baseline | None = None,
    remarks: Sequence[str] = (),
    draw: bool = False,
    again: str | None = None,
    console: Console | None = None,
) -> None:
    """Print the whole report. ``plan`` is the run's ``plan.json`` (for what did not run, and the command lines).

    ``baseline`` tells since when; ``draw`` adds the drawings of the ``records``; ``again`` is the command to
    repeat where it is not the plan's.
    """
    from ndbench.report import page_facts
    from ndbench.report.output import make_console

    console = console or make_console()
    measured = page_facts.measured_cells(records, comparison, plan)
    head = [
        _Line(facts.headline(comparison), STYLES.get(comparison.verdict, "")),
        _Line(facts.brief_exit_line(comparison)),
        _Line(facts.baseline_line(comparison)),
    ]
    found = page_facts.findings(measured, comparison, plan, baseline, again)
    answers, answered = _answers(found, console.width, SCREEN - _count(head, console.width))
    for line in [*head, *answers]:
        _print(console, line)
    with console.capture() as body:
        for note in [*comparison.notes, *remarks]:
            _print(console, _Line(f"note: {note}", "yellow"))
        if comparison.cells:
            console.print()
            console.print(_table(comparison.cells, console))
            legend = facts.few_line(comparison)
            if legend is not None:
                _print(console, _Line(legend, "dim"))
        _explain(console, comparison, plan, run_folder, answered, again)
        if draw:
            _draw(console, comparison, measured, plan, baseline)
        for text in ranking.layouts(comparison, plan) if not draw else ():
            _print(console, _Line(text))
        for text in peers.ratios(comparison, plan):
            _print(console, _Line(text))
        for kind, reason, names in facts.folded(plan):
            listed = f"{', '.join(names[:8])}{_more(names, 8)}"
            _print(console, _Line(f"{kind} ({len(names)}): {reason}: {listed}", "dim"))
        command = facts.accept_command(comparison, run_folder)
        if command is not None:
            _print(console, _Line(f"to make this run the reference: {command}", wrap=False))
        if run_folder is not None:
            _print(console, _Line(f"records, logs, verdict.json: {run_folder}", "dim", wrap=False))
    console.file.write(body.get())
    if answers and _count([*head, *answers], console.width) + body.get().count("\n") > SCREEN:
        console.print()
        for line in [*head[:1], *answers]:
            _print(console, line)


def _answers(found: Sequence[Finding], width: int, room: int) -> tuple[list[_Line], set[str]]:
    """What is wrong with each cell, how much, how surely, since when and how to see it again, as many cells as fit the
    lines; and the names of those cells."""
    lines: list[_Line] = []
    answered: set[str] = set()
    for finding in found:
        block = [
            _Line(""),
            _Line(f"{finding.cell}: {finding.verdict}", STYLES.get(finding.verdict, ""), 2),
            *(_Line(f"how much    {text}", "bold", 4, 12) for text in finding.what),
            _Line(f"how surely  {finding.surely}", "", 4, 12),
            _Line(f"since       {finding.since}", "", 4, 12),
            _Line(f"again       {finding.again}", "", 4, wrap=False)
            if finding.again
            else _Line("again       not in this run's plan", "", 4),
        ]
        if answered and _count([*lines, *block], width) > room - 2:
            rest = [other.cell for other in found if other.cell not in answered]
            named = f"and {len(rest)} more: {', '.join(rest)}"
            lines.append(_Line(named if len(named) < width - 2 else f"and {len(rest)} more: see the table", "", 2))
            break
        lines += block
        answered.add(finding.cell)
    return lines, answered


def _wrapped(line: _Line, width: int) -> list[str]:
    text = facts.printable(line.text)
    first, rest = " " * line.indent, " " * (line.indent + line.hang)
    if not line.wrap or not text:
        return [first + text]
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _count(lines: Sequence[_Line], width: int) -> int:
    """The rows of a terminal that they take."""
    return sum(max(1, -(-len(text) // width)) for line in lines for text in _wrapped(line, width))


def _print(console: Console, line: _Line) -> None:
    """A paragraph with a hanging indent, never read as markup."""
    from rich.text import Text

    line = _Line(_shown(console, line.text), line.style, line.indent, line.hang, line.wrap)
    for text in _wrapped(line, console.width):
        console.print(Text(text, style=line.style if text.strip() else ""), soft_wrap=True)


def _shown(console: Console, text: str) -> str:
    text = facts.printable(text)
    return ascii_text(text) if is_plain(console.encoding) else text


def _table(cells: list[CellVerdict], console: Console) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    rows = [facts.row(cell) for cell in cells]
    wide = console.width >= WIDE
    layouts = wide and any(row.layout not in ("", row.cell) for row in rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("cell", overflow="fold", min_width=8)
    if layouts:
        table.add_column("layout", overflow="fold")
    # names are folded, figures never: one cut short would be another figure
    for title in ("tokens/s", "change", "peak mem", "last loss")[: 4 if console.width >= NARROW else 2]:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for cell, row in zip(cells, rows, strict=True):
        tokens = f"{row.tokens} {row.spread}".rstrip()
        change = f"{row.change} {row.interval}".rstrip() if wide else row.change
        figures = [tokens, change, row.memory, row.loss][: 4 if console.width >= NARROW else 2]
        texts = [row.cell, *([row.layout] if layouts else []), *figures]
        verdict = Text(row.verdict, style=STYLES.get(cell.verdict, ""))
        table.add_row(*(Text(_shown(console, text)) for text in texts), verdict)
    return table


def _draw(console: Console, comparison: Comparison, measured: Sequence[Measured], plan: Plan | None,
          baseline: Baseline | None) -> None:  # fmt: skip
    from rich.text import Text

    from ndbench.report.drawings import sections
    from ndbench.report.page_facts import history_points
    from ndbench.report.strokes import ASCII, BLOCKS, lay_out

    strokes = ASCII if is_plain(console.encoding) else BLOCKS
    points = {cell.name: history_points(cell, baseline) for cell in measured} if baseline is not None else {}
    found = sections(comparison, measured, points, plan, strokes, console.width)
    if found and strokes.legend:
        _print(console, _Line(f"In the lines drawn below {strokes.legend}", "dim"))
    for section in found:
        _print(console, _Line(section.title, "bold"))
        for before, drawing, after in lay_out(section.rows, console.width):
            parts = [_shown(console, part) for part in (before, drawing, after)]
            console.print(Text.assemble(parts[0], (parts[1], "cyan"), parts[2]), soft_wrap=True)
        for line in section.lines:
            _print(console, _Line(line, indent=4))
        console.print()


def _explain(
    console: Console,
    comparison: Comparison,
    plan: Plan | None,
    run_folder: str | Path | None,
    answered: set[str],
    command: str | None = None,
) -> None:
    """The reasons of every cell that is not a plain pass. The commands of the ``answered`` ones stand above already."""
    cells = facts.to_explain(comparison)
    for cell in cells[:MAX_EXPLAINED]:
        console.print()
        _print(console, _Line(f"{cell.name}: {facts.word(cell.verdict)}", STYLES.get(cell.verdict, "")))
        for sentence in facts.sentences(cell):
            _print(console, _Line(sentence, indent=2))
        current = cell.current
        if current is not None and current.log_tail and cell.verdict in ("invalid", "regressed"):
            for text in facts.tail(current.log_tail, LOG_LINES):
                _print(console, _Line(f"| {text}", "dim", 2, wrap=False))
        again = command or facts.reproduce_command(plan, cell.name)
        if again is not None and cell.verdict in ("regressed", "invalid") and cell.name not in answered:
            _print(console, _Line(f"measure it again: {again}", indent=2, wrap=False))
        accept = facts.deliberate_command(comparison, cell, run_folder)
        if accept is not None:
            _print(console, _Line(f"if it is meant to be so: {accept}", indent=2, wrap=False))
    if len(cells) > MAX_EXPLAINED:
        _print(console, _Line(f"and {len(cells) - MAX_EXPLAINED} more cells with reasons, in verdict.json"))
    console.print()
    remarks = facts.remarks(comparison)
    for text in remarks[:MAX_EXPLAINED]:
        _print(console, _Line(text, "dim"))
    if len(remarks) > MAX_EXPLAINED:
        _print(console, _Line(f"and {len(remarks) - MAX_EXPLAINED} more remarks, in verdict.json", "dim"))


def _more(names: Sequence[str], most: int) -> str:
    return f" and {len(names) - most} more" if len(names) > most else ""
