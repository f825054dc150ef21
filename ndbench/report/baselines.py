"""Stored baselines as tables, and what accepting and pruning did: what ``ndbench baseline`` prints."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ndbench.results.baseline import Accepted


def print_list(found: list[dict[str, Any]], results_dir: Path, console: Console) -> None:
    """One line a baseline, from ``results.baseline.list_baselines``."""
    if not found:
        _line(
            console, f"no baseline in {results_dir / 'baselines'}; accept one: ndbench baseline accept RUN --reason …"
        )
        return
    table = _table("baseline", "sessions", "cells", "newest", "accepted by", "torch", "reason")
    for entry in found:
        newest = entry["sessions"][-1]
        cells = {name for session in entry["sessions"] for name in session["cells"]}
        table.add_row(
            Text(f"{entry['hardware']}/{entry['suite']}"),
            str(len(entry["sessions"])),
            str(len(cells)),
            _age(newest["age_days"]),
            Text(newest["by"] or "-"),
            Text(str(newest["software"].get("torch", "-"))),
            Text(newest["reason"]),
        )
    console.print(table)


def print_session(described: dict[str, Any], console: Console) -> None:
    """One session, from ``results.baseline.show``."""
    commit = f"{described['commit'][:12]}{' (dirty)' if described['dirty'] else ''}" if described["commit"] else "-"
    _line(console, f"session {described['session']} of {described['source']}")
    _line(console, f"accepted {described['accepted']} ({_age(described['age_days'])}) by {described['by'] or '-'}")
    _line(console, f"reason: {described['reason']}")
    software = ", ".join(f"{name} {value}" for name, value in described["software"].items() if value)
    _line(console, f"commit {commit}; {software}")
    for word in ("restarted", "improved", "retired"):
        if described[word]:
            _line(console, f"{word}: {', '.join(described[word])}")
    table = _table("cell", "repeats", "outcome", "tokens/s", "peak memory", "last loss")
    for name, metrics in described["metrics"].items():
        memory = _median(metrics.get("peak_allocated_bytes"))
        loss = _median(metrics.get("loss_last"))
        speed = _median(metrics.get("tokens_per_second"))
        table.add_row(
            Text(name),
            str(described["cells"][name]),
            described["outcomes"][name],
            "-" if speed is None else f"{speed:,.0f}",
            "-" if memory is None else f"{memory / 2**20:,.1f} MiB",
            "-" if loss is None else f"{loss:.6g}",
        )
    console.print(table)


def print_accepted(accepted: Accepted, console: Console) -> None:
    if accepted.cells:
        _line(console, f"accepted into {accepted.folder}: {', '.join(accepted.cells)}")
    if accepted.already:
        _line(console, f"in it already: {', '.join(accepted.already)}")
    if accepted.restarted:
        _line(console, f"a new level begins for: {', '.join(accepted.restarted)}")
    if accepted.retired:
        _line(console, f"no longer expected: {', '.join(accepted.retired)}")
    for name, reason in accepted.refused.items():
        console.print(Text(f"not accepted: {name}: {reason}"), style="yellow", soft_wrap=True)


def print_pruned(removed: list[str], folder: Path, console: Console) -> None:
    if removed:
        _line(console, f"removed {len(removed)} of the sessions in {folder}: {', '.join(removed)}")
    else:
        _line(console, f"nothing to remove in {folder}")


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        right = title in ("sessions", "cells", "repeats", "tokens/s", "peak memory", "last loss")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    return table


def _line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _median(values: list[float | None] | None) -> float | None:
    known = [value for value in values or [] if value is not None]
    return median(known) if known else None


def _age(days: float) -> str:
    if days < 1 / 24:
        return "just now"
    return f"{days * 24:.0f} h ago" if days < 2 else f"{days:.0f} days ago"
