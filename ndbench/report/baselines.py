"""What the baseline verbs print: the stored baselines, one session, and what accepting or pruning did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndbench.compare.statistics import MIN_SESSIONS
from ndbench.counted import counted
from ndbench.report.facts import age, printable
from ndbench.results.baseline import Accepted
from ndbench.results.sessions import stored_suites

if TYPE_CHECKING:
    from rich.console import Console


def baseline_at(name: str | Path | None, results_dir: str | Path = "results") -> Path:
    """The folder of one suite's baseline: a path, or ``<hardware>/<suite>`` (or a part that only one has).

    Raises ``ValueError`` naming the stored baselines when there is none or there are several.
    """
    root = Path(results_dir) / "baselines"
    names = {"/".join(folder.relative_to(root).parts): folder for folder in stored_suites(root)}
    if name is not None:
        for folder in (Path(name), root / name):
            if folder.is_dir() and (any(folder.glob("*/*.json")) or (folder / "session.json").is_file()):
                return folder
        matching = [key for key in names if str(name) in key.split("/")]
    else:
        matching = list(names)
    if len(matching) == 1:
        return names[matching[0]]
    wanted = "" if name is None else f" '{name}'"
    listed = ", ".join(names) or "none"
    raise ValueError(f"{len(matching)} baselines{wanted} below {root}; stored there: {listed}")


LONGEST_NAME, LEAST_OF_A_REASON = 12, 16
"""Letters of who accepted a session, and of why, in a list of a line each."""


def _say(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(printable(text), style=style, overflow="fold"))


def print_list(
    found: Sequence[Mapping[str, Any]], results_dir: str | Path, console: Console, here: str | None = None
) -> None:
    """Every baseline with its sessions, oldest first, a line each; those of the hardware file ``here`` come first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    if not found:
        _say(console, f'no baseline below {Path(results_dir) / "baselines"}: ndbench baseline accept RUN --reason "…"')
        return
    mine = [entry for entry in found if here is not None and _is_of(entry["hardware"], here)]
    for entry in [*mine, *(entry for entry in found if entry not in mine)]:
        head = f"{entry['hardware']}/{entry['suite']}  ({entry['folder']})"
        console.print(Text(printable(head), style="bold"), soft_wrap=True)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
        for column in ("session", "age", "cells", "torch", "by", "reason"):
            table.add_column(column, no_wrap=True)
        rows = [
            (
                session["session"],
                age(session["age_days"]),
                str(len(session["cells"])),
                str(session["software"].get("torch", "")).partition("+")[0],
                _cut(session["by"] or "", LONGEST_NAME),
                " ".join(f"{_marks(session)} {session['reason']}".split()),
            )
            for session in entry["sessions"]
        ]
        used = sum(3 + max(len("cells"), *(len(row[column]) for row in rows)) for column in range(5))
        for *facts, reason in rows:
            texts = (*facts, _cut(reason, max(LEAST_OF_A_REASON, console.width - used)))
            table.add_row(*(Text(printable(text)) for text in texts))
        console.print(table)
        console.print()
    _say(console, "a whole reason: ndbench baseline show NAME --session SESSION", "dim")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def _is_of(folder: str, hardware: str) -> bool:
    """Whether a baseline's folder (``h100_x8``) is one of a hardware file (``h100``)."""
    return folder == hardware or folder.rpartition("_x")[0] == hardware


def _marks(session: Mapping[str, Any]) -> str:
    """``[new level: fsdp8]`` and the like: what the session changed about earlier ones."""
    names = {"restarted": "new level", "improved": "improved", "retired": "retired"}
    said = [f"{word}: {', '.join(session[key])}" for key, word in names.items() if session[key]]
    return f"[{'; '.join(said)}]" if said else ""


def print_session(described: Mapping[str, Any], console: Console) -> None:
    """One session: who, when, why, and the main metrics of its cells."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    commit = (described["commit"] or "unknown commit")[:12] + (" (dirty)" if described["dirty"] else "")
    _say(console, f"session {described['session']} of {described['source']}", "bold")
    _say(console, f"accepted {described['accepted']} by {described['by'] or 'unknown'}, from {commit}")
    _say(console, f"reason: {described['reason']} {_marks(described)}".strip())
    _say(console, "software: " + ", ".join(f"{key} {value}" for key, value in described["software"].items() if value))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for column in ("cell", "repeats", "outcome", "tokens/s", "peak mem", "last loss"):
        table.add_column(column, overflow="fold", justify="left" if column in ("cell", "outcome") else "right")
    for name, repeats in described["cells"].items():
        metrics = described["metrics"][name]
        outcome = described["outcomes"][name]
        texts = (
            name,
            str(repeats),
            outcome,
            _range(metrics, "tokens_per_second", ",.0f"),
            _peak(metrics),
            _loss(metrics),
        )
        table.add_row(*(Text(printable(text)) for text in texts))
    console.print(table)


def _range(metrics: Mapping[str, Sequence[float | None]], name: str, form: str) -> str:
    values = [value for value in metrics.get(name, ()) if value is not None]
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:{form}}" if f"{low:{form}}" == f"{high:{form}}" else f"{low:{form}} to {high:{form}}"


def _peak(metrics: Mapping[str, Sequence[float | None]]) -> str:
    from ndbench.compare.memory import said_bytes

    values = [value for value in metrics.get("peak_allocated_bytes", ()) if value is not None]
    return said_bytes(max(values)) if values else ""


def _loss(metrics: Mapping[str, Sequence[float | None]]) -> str:
    return _range(metrics, "loss_last", ".4f")


def print_accepted(accepted: Accepted, console: Console) -> None:
    """What :func:`ndbench.results.baseline.accept` took, what it held back and why."""
    if accepted.cells:
        _say(console, f"accepted {counted(len(accepted.cells), 'cell')}: {', '.join(accepted.cells)}", "green")
    if accepted.already:
        _say(console, f"accepted before, unchanged: {', '.join(accepted.already)}")
    if accepted.suspects:
        _say(console, f"taken although not told apart from a regression: {', '.join(accepted.suspects)}", "yellow")
    if accepted.restarted:
        _say(console, f"new level, earlier sessions are no longer compared with: {', '.join(accepted.restarted)}")
    if accepted.retired:
        _say(console, f"retired, no longer expected: {', '.join(accepted.retired)}")
    for name, why in accepted.refused.items():
        _say(console, f"not accepted: {name}: {why}", "bold red")
    few = min(accepted.sessions.values(), default=MIN_SESSIONS)
    if few < MIN_SESSIONS:
        more = MIN_SESSIONS - few
        what = f"{counted(more, 'more accepted run')} will tell how runs differ"
        _say(console, f"{few} of {MIN_SESSIONS}: {what}; until then only a step twice as long is red")
    held = accepted.cells or accepted.already or accepted.retired
    _say(console, f"session: {accepted.folder}" if held else "nothing was accepted: the baseline is as it was")


def print_pruned(removed: Sequence[str], folder: Path, console: Console) -> None:
    kept = len(list(folder.glob("*/session.json")))
    what = f"removed {counted(len(removed), 'session')}: {', '.join(removed)}" if removed else "nothing to remove"
    _say(console, f"{what}; {kept} stay in {folder}")
