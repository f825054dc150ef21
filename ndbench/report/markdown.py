"""The report of a run as Markdown: for the run folder, for a pull request, for GitHub's step summary.

Verdict first, changed cells next, the rest folded. Names and logs are escaped: nothing measured can draw in the page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from ndbench.compare.result import CellVerdict, Comparison
from ndbench.counted import counted
from ndbench.report import facts, page_facts, peers, ranking
from ndbench.report.cells import speed_title, under
from ndbench.report.facts import Plan
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline

STEP_SUMMARY_LIMIT = 1024 * 1024
"""Bytes of one step's summary that GitHub shows; a longer one is refused as a whole."""
DEFAULT_LIMIT = STEP_SUMMARY_LIMIT - 16 * 1024
LOG_LINES = 20
MARKS = {"regressed": "🔴", "invalid": "🔴", "missing": "🔴", "inconclusive": "🟡", "improved": "🟢", "pass": "🟢"}
QUIET = ("pass", "no_baseline")

_SPECIAL = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ZERO_WIDTH = "\u200b"


def escape(text: str) -> str:
    """Text as Markdown shows it literally, in a paragraph or a table cell: no formatting, link, mention or HTML."""
    flat = html.escape(" ".join(facts.printable(text).split()), quote=False)
    literal = _SPECIAL.sub(lambda found: f"\\{found[0]}", flat)
    # a backslash does not stop GitHub from linking @names and #numbers
    return re.sub(r"([@#])(?=\w)", rf"\1{_ZERO_WIDTH}", literal)


def code(text: str) -> str:
    """An inline code span that holds backticks and, in a table, bars without ending there."""
    flat = " ".join(facts.printable(text).split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", flat)), default=0))
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{ticks}{pad}{flat}{pad}{ticks}"


def fenced(lines: list[str]) -> str:
    """A block of literal lines, whatever fences they contain."""
    ticks = "`" * max(3, 1 + max((len(run) for line in lines for run in re.findall("`+", line)), default=0))
    return "\n".join([f"{ticks}text", *lines, ticks])


def render(
    comparison: Comparison,
    *,
    plan: Plan | None = None,
    run_folder: str | Path | None = None,
    records: Sequence[Record] = (),
    baseline: Baseline | None = None,
    again: str | None = None,
    limit: int = DEFAULT_LIMIT,
) -> str:
    """The whole report in at most ``limit`` bytes: cells that do not fit are counted, the least severe first.

    ``records`` and ``baseline`` tell since when a cell is as it is; ``again`` is the command to repeat where it is not
    the plan's.
    """
    cells = facts.by_severity(comparison.cells)
    measured = page_facts.measured_cells(records, comparison, plan)
    since = {found.cell: found.since for found in page_facts.findings(measured, comparison, plan, baseline)}
    stands = facts.standing_of(records, run_folder)
    blocks = [
        _reasons(
            cell,
            again or facts.reproduce_command(plan, cell.name),
            facts.deliberate_command(comparison, cell, run_folder, stands),
            since.get(cell.name),
        )
        for cell in facts.to_explain(comparison)
    ]
    ends = [escape(said)] if (said := facts.accepted_line(stands)) is not None else []
    command = facts.accept_command(comparison, run_folder, stands)
    if command is not None:
        ends.append(f"To make this run the reference: {code(command)}")
    shown, explained = len(cells), len(blocks)
    while True:
        text = _page(comparison, cells[:shown], blocks[:explained], plan, ends, len(blocks))
        if len(text.encode()) <= limit or shown + explained == 0:
            return text
        explained, shown = (explained * 3 // 4, shown) if explained else (0, shown * 3 // 4)


def _page(
    comparison: Comparison,
    cells: list[CellVerdict],
    blocks: list[str],
    plan: Plan | None,
    ends: list[str],
    total_blocks: int,
) -> str:
    parts = [f"## ndbench: {escape(facts.headline(comparison))}", escape(facts.exit_line(comparison)) + "\\"]
    parts[-1] += "\n" + escape(facts.baseline_line(comparison))
    parts += [f"> {escape(note)}" for note in comparison.notes]
    changed = [cell for cell in cells if cell.verdict not in QUIET]
    quiet = [cell for cell in cells if cell.verdict in QUIET]
    if changed:
        parts.append(_table(changed))
    if quiet and not changed:
        parts.append(_table(quiet))
    elif quiet:
        parts.append(_fold(f"{counted(len(quiet), 'cell')} without objection", _table(quiet)))
    legend = facts.few_line(comparison)
    if legend is not None:
        parts.append(escape(legend))
    if len(cells) < len(comparison.cells):
        parts.append(
            f"**{len(comparison.cells) - len(cells)} more cells** do not fit here; they are in `verdict.json`."
        )
    parts += blocks
    remarks = facts.remarks(comparison)
    if remarks:
        parts.append("\n".join(f"- {escape(text)}" for text in remarks))
    if len(blocks) < total_blocks:
        parts.append(f"**The reasons of {total_blocks - len(blocks)} more cells** do not fit here: see `verdict.json`.")
    layouts = [*ranking.layouts(comparison, plan), *peers.ratios(comparison, plan)]
    if layouts:
        parts.append("\n".join(f"- {escape(line)}" for line in layouts))
    away = facts.folded(plan)
    if away:
        lines = [f"- {kind} ({len(names)}): {escape(reason)}: {escape(_listed(names))}" for kind, reason, names in away]
        total = sum(len(names) for _, _, names in away)
        parts.append(_fold(f"{counted(total, 'cell')} that did not run", "\n".join(lines)))
    return "\n\n".join([*parts, *ends]) + "\n"


def _listed(names: list[str], most: int = 50) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _table(cells: list[CellVerdict]) -> str:
    speed = speed_title(cells)
    lines = [f"| | cell | layout | {speed} | change | peak memory | last loss | verdict |"]
    lines.append("|---|---|---|---:|---:|---:|---:|---|")
    for cell in cells:
        row = facts.row(cell)
        values = [
            row.cell,
            row.layout,
            f"{under(speed, row.tokens)} {row.spread}",
            f"{row.change} {row.interval}",
            row.memory,
            row.loss,
        ]
        texts = [MARKS.get(cell.verdict, "⚪"), *(escape(value) for value in values), row.verdict]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def _fold(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>\n\n{body}\n\n</details>"


def _reasons(cell: CellVerdict, again: str | None, accept: str | None, since: str | None) -> str:
    lines = [f"**{escape(cell.name)}**: {facts.word(cell.verdict)}", ""]
    lines += [f"- {escape(sentence)}" for sentence in facts.sentences(cell)]
    if since:
        lines.append(f"- since: {escape(since)}")
    if again is not None and cell.verdict in ("regressed", "invalid"):
        lines.append(f"- measure it again: {code(again)}")
    if accept is not None:
        lines.append(f"- if it is meant to be so: {code(accept)}")
    log = facts.tail(cell.current.log_tail, LOG_LINES) if cell.current is not None else []
    if log and cell.verdict in ("invalid", "regressed"):
        lines += ["", _fold("end of the log", fenced(log))]
    return "\n".join(lines)


def append_step_summary(path: str | Path, text: str) -> bool:
    """Append to the file behind ``$GITHUB_STEP_SUMMARY``, cut so that the whole stays under GitHub's limit.

    Whether it was written: a summary that cannot be shown must not fail a measurement.
    """
    path = Path(path)
    try:
        used = path.stat().st_size if path.exists() else 0
        room = STEP_SUMMARY_LIMIT - used - 1
        encoded = text.encode()
        if len(encoded) > room:
            lost = f"\n\n**Cut here: {len(encoded)} bytes do not fit into GitHub's step summary; see summary.md.**\n"
            keep = room - len(lost.encode())
            if keep <= 0:
                return False
            encoded = encoded[:keep].decode(errors="ignore").encode() + lost.encode()
        with path.open("ab") as stream:
            stream.write(encoded)
    except OSError:
        return False
    return True
