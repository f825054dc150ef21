"""What every report says, in words and figures: headline, rows, reasons, the fastest layout, the commands to go on.

Reads a comparison and a plan; knows nothing of tables, Markdown or the terminal.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndbench.compare.exits import COMPARED
from ndbench.compare.memory import said_bytes
from ndbench.compare.result import ACCEPTED, UNFINISHED, VERDICTS, CellVerdict, Comparison, Current, MetricVerdict
from ndbench.compare.statistics import MIN_REPEATS
from ndbench.counted import counted
from ndbench.report.cells import named
from ndbench.report.intervals import few, interval_of
from ndbench.report.tracker import known_secrets
from ndbench.report.wandb_runs import without_secrets
from ndbench.results.fit import Standing, standing
from ndbench.results.schema import Record

Plan = Mapping[str, Any]
WORDS = {"no_baseline": "no baseline"}
"""Verdicts as a reader sees them, where they differ from the word in the data."""


@dataclass(frozen=True)
class Row:
    """One cell of the table, as text; empty where there is nothing to show."""

    cell: str
    """Its name, and the engine beside it where that is not the bundled one."""
    layout: str
    tokens: str
    spread: str
    change: str
    interval: str
    memory: str
    loss: str
    verdict: str


def word(verdict: str) -> str:
    return WORDS.get(verdict, verdict)


def headline(comparison: Comparison) -> str:
    """``REGRESSED: 1 regressed, 7 pass of 8 cells of hsdp_tp``; ``NO BASELINE: 8 cells of hsdp_tp, compared with
    nothing yet``."""
    total = len(comparison.cells)
    if comparison.mode == UNFINISHED:
        return f"NOT FINISHED: {counted(total, 'cell')} of {comparison.suite}"
    if comparison.mode == ACCEPTED:
        return f"ACCEPTED: {counted(total, 'cell')} of {comparison.suite}, the reference since"
    if set(comparison.counts) == {"no_baseline"}:
        return f"NO BASELINE: {counted(total, 'cell')} of {comparison.suite}, compared with nothing yet"
    untimed = [c for c in comparison.cells if c.verdict in COMPARED and _is_incomparable(c.metric("tokens_per_second"))]
    speed = f", speed not compared in {len(untimed)}" if untimed else ""
    words = {"no_baseline": "without a baseline"}
    counts = ", ".join(f"{number} {words.get(verdict, word(verdict))}" for verdict, number in comparison.counts.items())
    of = f"{counts or 'nothing'} of {counted(total, 'cell')} of {comparison.suite}"
    return f"{word(comparison.verdict).upper()}: {of}{speed}"


def _is_incomparable(metric: MetricVerdict | None) -> bool:
    return metric is not None and metric.verdict == "incomparable"


def exit_line(comparison: Comparison) -> str:
    if comparison.mode == UNFINISHED:
        return comparison.exit_reason
    return f"exit {comparison.exit_code}: {comparison.exit_reason}"


def brief_exit_line(comparison: Comparison) -> str:
    """Without its names where they are long: they stand in the table, and the first screen is for the answers."""
    line = exit_line(comparison)
    if comparison.mode == UNFINISHED:
        return line
    what, colon, _ = comparison.exit_reason.partition(": ")
    return f"exit {comparison.exit_code}: {what}: see the table" if colon and len(line) > CLIPPED else line


def baseline_line(comparison: Comparison) -> str:
    """What the run was compared with, and how old that is."""
    if comparison.mode == UNFINISHED:
        return "baseline: not compared yet, that comes at the end of a run"
    if comparison.baseline is None:
        if comparison.mode == ACCEPTED:
            return "baseline: none when it was measured"
        return "baseline: off (gate.mode=off)" if comparison.mode == "off" else "baseline: none yet"
    newest = f", the newest {age(comparison.newest_days)} old" if comparison.newest_days is not None else ""
    return f"baseline: {comparison.baseline} ({counted(comparison.sessions, 'session')}{newest})"


def age(days: float) -> str:
    """``12 min``, ``30 h``, ``5 days``."""
    if days < 1 / 24:
        return f"{max(0, round(days * 1440))} min"
    return f"{days * 24:.0f} h" if days < 2 else f"{days:.0f} days"


def row(cell: CellVerdict) -> Row:
    current = cell.current
    speed = cell.metric("tokens_per_second")
    change = interval = ""
    if speed is not None and speed.change is not None:
        change = f"{speed.change:+.1%}"
        bounds = interval_of(cell, speed)
        interval = f"[{bounds[0]:+.0%}, {bounds[1]:+.0%}]" if bounds is not None else ""
    if current is None or current.step_seconds is current.tokens_per_second is None:
        outcome = current.outcome if current is not None and current.outcome != "ok" else "-"
        layout = (current.layout if current is not None else None) or ""
        return Row(
            named(cell.name, current.engine if current else None),
            layout,
            outcome,
            "",
            "",
            "",
            "",
            "",
            word(cell.verdict),
        )
    return Row(
        cell=named(cell.name, current.engine),
        layout=current.layout or "",
        tokens=_speed(current),
        spread=_spread(current),
        change=change,
        interval=interval,
        memory="" if current.peak_bytes is None else said_bytes(current.peak_bytes),
        loss="" if current.loss_last is None else f"{current.loss_last:.4f}",
        verdict=word(cell.verdict),
    )


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _speed(current: Current) -> str:
    """Tokens/s, or steps/s with the unit where a script does not say how many tokens a step has."""
    if current.tokens_per_second is not None:
        return figure(current.tokens_per_second)
    return f"{figure(1 / current.step_seconds)} steps/s" if current.step_seconds else "-"


WIDE = 0.5
"""Half an interval, relative, from which it is shown as a factor, which it is: not of sums."""


def _spread(current: Current) -> str:
    """Half the 95 % interval over repeats, relative, or the factor to either side of a wide one; ``n=2`` where so few
    repeats have none worth showing.
    """
    if few(current):
        return f"n={current.ok_repeats}"
    if current.tokens_low is None or current.tokens_high is None or not current.tokens_per_second:
        return ""
    half = (current.tokens_high - current.tokens_low) / 2 / current.tokens_per_second
    if half >= WIDE:  # about as wide as it is high, and not the same to both sides
        factor = (current.tokens_high / current.tokens_low) ** 0.5 if current.tokens_low > 0 else float("inf")
        return f"\u00d7/\u00f7 {factor:.2g}" if factor < 100 else "\u00d7/\u00f7 100+"
    return f"±{half:.0%}"


def few_line(comparison: Comparison) -> str | None:
    """What ``n=2`` in the table means; null when it is not there."""
    counts = sorted({c.ok_repeats for cell in comparison.cells if (c := cell.current) is not None and few(c)} - {0})
    if not counts:
        return None
    said = " or ".join(str(count) for count in counts)
    signs = ", ".join(f"n={count}" for count in counts)
    many = "1 repeat" if counts == [1] else f"{said} repeats"
    return f"{signs}: {many}: too few for an interval, {MIN_REPEATS} or more give one"


def by_severity(cells: Sequence[CellVerdict]) -> list[CellVerdict]:
    """The cells someone has to look at first come first; equal ones keep their order."""
    return sorted(cells, key=lambda cell: VERDICTS.index(cell.verdict))


def sentences(cell: CellVerdict) -> list[str]:
    """Reasons, then notes."""
    return [*cell.reasons, *cell.notes]


def to_explain(comparison: Comparison) -> list[CellVerdict]:
    """Cells with something to act on, most severe first: all but passes and cells that have no baseline."""
    silent = ("pass", "no_baseline", "new")
    return [cell for cell in by_severity(comparison.cells) if cell.verdict not in silent]


def remarks(comparison: Comparison) -> list[str]:
    """What the other cells still have to say, each once with the names of its cells: changed software, a loss equal
    only within tolerance, out of memory as before."""
    explained = {cell.name for cell in to_explain(comparison)}
    said: dict[str, list[str]] = {}
    for cell in comparison.cells:
        if cell.name not in explained:
            for text in [*cell.notes, *_passed_remarks(cell)]:
                said.setdefault(text, []).append(cell.name)
    return [f"{text} ({listed(names)})" for text, names in said.items()]


def _passed_remarks(cell: CellVerdict) -> list[str]:
    remarked = []
    for metric in cell.metrics:
        if metric.verdict == "pass" and metric.metric == "outcome":
            remarked.append(metric.reason)
        elif metric.verdict == "pass" and metric.details.get("tier") == "tolerance":
            name = "gradient norm" if metric.metric == "grad_norm" else metric.metric
            remarked.append(f"{name} within tolerance, not bitwise ({metric.details['why_not_bitwise']})")
    return remarked


def folded(plan: Plan | None) -> list[tuple[str, str, list[str]]]:
    """Cells that did not run, by kind and reason: ``("excluded", "tp > kv heads", ["tp8", …])``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for kind in ("excluded", "skipped", "unselected"):
        for entry in (plan or {}).get(kind, []):
            reason = entry.get("reason") or "not selected by cells= or shard="
            groups.setdefault((kind, reason), []).append(entry["name"])
    return [(kind, reason, names) for (kind, reason), names in groups.items()]


def listed(names: Sequence[str], most: int = 6) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def standing_of(records: Sequence[Record], run_folder: str | Path | None) -> Standing | None:
    """How the run stands to the baseline that the command printed for it would add to; null without records."""
    if not records or run_folder is None:
        return None
    folder = Path(run_folder)
    return standing(records, folder.parent.parent if folder.parent.name == "runs" else "results")


def accept_command(
    comparison: Comparison, run_folder: str | Path | None = None, stands: Standing | None = None
) -> str | None:
    """The command that makes this run a reference, where that is a sensible next step and, as far as ``stands`` says,
    would not be refused; else null."""
    acceptable = [cell for cell in comparison.cells if cell.current is not None and cell.current.ok_repeats]
    wanted = ("no_baseline", "new", "improved", "incomparable", "inconclusive")
    acceptable = [cell for cell in acceptable if stands is None or stands.takes(cell.name)]
    if comparison.mode in ("off", "ab", UNFINISHED) or not any(cell.verdict in wanted for cell in acceptable):
        return None
    return f'ndbench baseline accept {run_argument(comparison, run_folder)} --reason "…"'


def accepted_line(stands: Standing | None) -> str | None:
    """Which cells of the run are part of the baseline since; null for none."""
    if stands is None or stands.session is None or not stands.accepted:
        return None
    return f"accepted since, as {stands.session}: {listed(stands.accepted)}"


def deliberate_command(
    comparison: Comparison,
    cell: CellVerdict,
    run_folder: str | Path | None = None,
    stands: Standing | None = None,
) -> str | None:
    """The command that accepts a regressed or missing cell on purpose; null for any other, and where ``stands`` says
    that it would be refused."""
    if cell.verdict not in ("regressed", "missing") or comparison.mode in ("ab", UNFINISHED):
        return None
    if stands is not None and not stands.takes(cell.name):
        return None
    run = run_argument(comparison, run_folder)
    return f'ndbench baseline accept {run} --cells {shlex.quote(cell.name)} --reason "…"'


def run_argument(comparison: Comparison, run_folder: str | Path | None) -> str:
    """The run's name under the default results folder, with ``--results-dir`` under another, else its path."""
    if run_folder is None:
        return comparison.run
    folder = Path(run_folder)
    if folder.parent.name != "runs":
        return shlex.quote(_short(folder))
    results = _short(folder.parent.parent)
    return comparison.run if results == "results" else f"{comparison.run} --results-dir {shlex.quote(results)}"


def resume_command(run_folder: Path) -> str:
    """The line that goes on with a run."""
    results = str(run_folder.parent.parent)
    elsewhere = [] if results == "results" else [f"results.dir={results}"]
    return shlex.join(["ndbench", "--resume", run_folder.name, *elsewhere])


def _short(path: Path) -> str:
    """Relative to the working directory where the path lies below it."""
    relative = os.path.relpath(path.resolve(), Path.cwd().resolve())
    return relative if not relative.startswith("..") else str(path.resolve())


def reproduce_command(plan: Plan | None, cell: str) -> str | None:
    """The line that measures one cell again; null when the plan does not say how the run was started."""
    overrides = [text for text in (plan or {}).get("overrides", []) if not text.startswith(("cells=", "shard="))]
    if plan is None or not any(entry["name"] == cell for entry in plan.get("cells", [])):
        return None
    if not any(text.startswith("suite=") for text in overrides) and plan.get("suite"):
        return shlex.join(["ndbench", *overrides])
    return shlex.join(["ndbench", *overrides, f"cells={cell}"])


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text without terminal codes, so that a log can neither colour nor rewrite a report, and without keys."""
    shown: str = without_secrets(_CONTROL.sub("", text.replace("\r\n", "\n")), known_secrets())
    return shown


CLIPPED = 160
"""Letters of a reason where the whole of it stands elsewhere in the report."""


def clipped(text: str) -> str:
    return text if len(text) <= CLIPPED else f"{text[:CLIPPED].rsplit(' ', 1)[0]} … (the rest among the reasons)"


def tail(text: str | None, lines: int) -> list[str]:
    """The last lines of a log that are not empty, made printable."""
    return [line for line in printable(text or "").splitlines() if line.strip()][-lines:]
