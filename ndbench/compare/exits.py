"""From the cells' verdicts to the run's: one word, one exit code, one sentence why.

0 nothing to object, 1 regressed, 3 invalid or missing cells, 4 nothing comparable, 5 inconclusive (only if asked).
Several at once: 1 before 3 before 5 before 4. An empty result is never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from ndbench.compare.notes import STALE_DAYS
from ndbench.compare.result import CellVerdict, Comparison, worst
from ndbench.config import GateConfig
from ndbench.failures import USAGE
from ndbench.results.sessions import Baseline

COMPARED = ("pass", "improved", "regressed", "inconclusive")
SUMMARY_ORDER = ("regressed", "invalid", "missing", "inconclusive", "pass", "improved")


def conclude(
    cells: Sequence[CellVerdict],
    *,
    suite: str,
    run: str,
    gate: GateConfig,
    baseline: Baseline | None,
    skipped: Sequence[Mapping[str, Any]],
    now: datetime | None,
) -> Comparison:
    """The comparison of a run from its cells."""
    present = baseline is not None and bool(baseline.sessions)
    code, reason = exit_of(cells, gate, present)
    notes: list[str] = []
    newest = None
    if baseline is not None and present and gate.mode != "off":
        newest = round(baseline.sessions[-1].age_days(now), 4)
        if newest > STALE_DAYS:
            notes.append(f"the newest baseline session is {newest:.0f} days old: accept a fresh one")
        compared = [cell for cell in cells if cell.verdict in COMPARED]
        timed = [cell for cell in compared if (m := cell.metric("tokens_per_second")) and m.verdict in COMPARED]
        if compared and not timed and any(cell.metric("tokens_per_second") for cell in compared):
            notes.append("speed was compared in no cell: the baseline is from other hardware")
        absent = sorted({str(cell["name"]) for cell in skipped} & set(baseline.cells))
        if absent:
            notes.append(f"in the baseline but skipped on this machine: {', '.join(absent)}")
    verdicts = {cell.verdict for cell in cells}
    overall = next((word for word in SUMMARY_ORDER if word in verdicts), worst(verdicts) or "invalid")
    return Comparison(
        suite=suite,
        run=run,
        mode=gate.mode,
        baseline=baseline.source if baseline is not None and present and gate.mode != "off" else None,
        sessions=len(baseline.sessions) if baseline is not None and present and gate.mode != "off" else 0,
        newest_days=newest,
        cells=list(cells),
        verdict=overall,
        exit_code=code,
        exit_reason=reason,
        notes=notes,
    )


def unwritten(comparison: Comparison, error: OSError) -> Comparison:
    """The comparison as it ends when its files cannot be written: CI takes an absent verdict for an error."""
    return replace(comparison, exit_code=USAGE, exit_reason=f"the verdict is not kept: {error}")


def exit_of(cells: Sequence[CellVerdict], gate: GateConfig, baseline_present: bool) -> tuple[int, str]:
    """The exit code and its reason."""
    if not cells:
        return 3, "no cell was measured: an empty result is not a green one"
    names: dict[str, list[str]] = {}
    for cell in cells:
        names.setdefault(cell.verdict, []).append(cell.name)
    if "regressed" in names:
        return 1, f"regressed: {_listed(names['regressed'])}"
    for verdict in ("invalid", "missing"):
        if verdict in names:
            both = names.get("invalid", []) + names.get("missing", [])
            word = " and ".join(word for word in ("invalid", "missing") if word in names)
            return 3, f"{word}: {_listed(both)}"
    if gate.mode != "off" and gate.fail_on_inconclusive and "inconclusive" in names:
        return 5, f"inconclusive, and gate.fail_on_inconclusive is set: {_listed(names['inconclusive'])}"
    if all(cell.current is not None and cell.current.ok_repeats == 0 for cell in cells) and not any(
        cell.verdict == "pass" for cell in cells
    ):
        return 3, "no cell ran to its end"
    if gate.mode == "off":
        return 0, "the gate is off: nothing was compared"
    if not any(verdict in names for verdict in COMPARED):
        return _nothing_compared(names, gate, baseline_present)
    if "inconclusive" in names:
        open_ = len(names["inconclusive"])
        are = "cell is" if len(cells) == 1 else "cells is" if open_ == 1 else "cells are"
        return 0, f"{open_} of {len(cells)} {are} inconclusive: {_listed(names['inconclusive'])}"
    return 0, "nothing regressed"


def _nothing_compared(names: Mapping[str, list[str]], gate: GateConfig, present: bool) -> tuple[int, str]:
    if "incomparable" in names:
        return 4, f"nothing is comparable with the baseline: {_listed(names['incomparable'])}"
    what = "the baseline has none of these cells" if present else "there is no baseline"
    if gate.mode == "require":
        return 4, f"{what}, and gate.mode=require asks for one"
    return 0, f"{what} yet: measured, not compared"


def _listed(names: Sequence[str], most: int = 6) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
