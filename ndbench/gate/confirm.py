"""The confirm stage of a run: suspects are measured again next to the base, and those pairs decide.

Finds out which base can be run (the baseline's commit in this interpreter, else the merge base), and says which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ndbench.compare.comparability import software_changes
from ndbench.compare.confirm import MOST_SUSPECTS, suspects
from ndbench.compare.result import Comparison, MetricVerdict
from ndbench.config import Cell, cell_from_dict
from ndbench.counted import counted, were
from ndbench.gate.ab import estimate
from ndbench.gate.loop import confirm, confirm_rule
from ndbench.gate.pairs import Bench
from ndbench.gate.refs import HERE, merge_base, open_side, resolve_commit
from ndbench.gate.sides import SideProcess
from ndbench.measure.code import is_users_code, package_checkout, package_folder
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline
from ndbench.results.store import RunFolder, write_json
from ndbench.run.plan import Plan


@dataclass
class Outcome:
    """What the confirm stage adds to a comparison."""

    metrics: dict[str, list[MetricVerdict]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Base:
    """The base to measure against: a reference of :mod:`ndbench.gate.refs`, and how it was chosen."""

    ref: str
    why: str


def confirm_suspects(
    plan: Plan,
    folder: RunFolder,
    baseline: Baseline | None,
    comparison: Comparison,
    say: Callable[[str], None],
    cwd: Path | None = None,
) -> Outcome:
    """Confirm the largest slowdowns of ``comparison`` where the base can be run; else say why the rest decides."""
    if plan.gate.confirm == "off" or plan.gate.mode == "off" or baseline is None or not baseline.sessions:
        return Outcome()
    chosen, rest = find_suspects(plan, comparison)
    if not chosen:
        return Outcome()
    if plan.gate.confirm == "auto" and (reason := _not_by_itself(plan, chosen)) is not None:
        return Outcome(notes=[_unconfirmed(comparison, chosen, f"{reason}; gate.confirm=on does it")])
    heads = {record["cell"]["name"]: record for record in folder.records()}
    here = cwd or Path.cwd()
    found = choose_base(plan.gate.base, baseline, chosen, heads, here)
    if plan.gate.base is None and not isinstance(found, str):
        found = code_is_elsewhere(plan.cells[chosen[0]], here) or found
    if isinstance(found, str):
        return Outcome(notes=[_unconfirmed(comparison, chosen, found)])
    cells = _cells(plan, baseline, chosen)
    say(
        f"{counted(len(chosen), 'suspect')} ({', '.join(chosen)}): measuring {found.ref} next to this"
        f" code ({found.why}), {estimate([head for _, head in cells.values()])}; gate.confirm=off skips this"
    )
    try:
        outcome = _confirm(plan, folder, cells, found, say, cwd)
    except (ValueError, OSError) as error:
        return Outcome(notes=[_unconfirmed(comparison, chosen, " ".join(str(error).split()))])
    for name in rest:
        outcome.metrics[name] = [_left_over(comparison, name)]
    outcome.notes.append(f"speed of {', '.join(chosen)} was decided by pairs with {found.ref} ({found.why})")
    return outcome


def _not_by_itself(plan: Plan, chosen: Sequence[str]) -> str | None:
    """Why ``gate.confirm=auto`` leaves these suspects to the stored sessions, or None."""
    if plan.cells[chosen[0]].config.hardware.device == "cpu":
        return "on a CPU that takes minutes a cell"
    if all(plan.repeats.get(name, 1) < 2 for name in chosen):
        return "one repeat was asked for"
    return None


def find_suspects(plan: Plan, comparison: Comparison) -> tuple[list[str], list[str]]:
    """(cells to confirm, further suspects), by the size of their slowdown against the stored baseline."""
    effects: dict[str, float] = {}
    for cell in comparison.cells:
        speed = cell.metric("tokens_per_second")
        if speed is not None and "log_effect" in speed.details and cell.name in plan.cells:
            effects[cell.name] = float(speed.details["log_effect"])
    if not effects:
        return [], []
    first = plan.cells[next(iter(effects))]
    return suspects(effects, confirm_rule(first, plan.gate).min_effect)


def choose_base(
    asked: str | None, baseline: Baseline, names: Sequence[str], heads: dict[str, Record], cwd: Path
) -> Base | str:
    """The base that can be run here, or in one sentence why none can."""
    if asked is not None:
        return Base(asked, "gate.base")
    base = _latest(baseline, names[0])
    changes = software_changes(base, heads[names[0]])
    if changes:
        return f"the baseline was measured with another software ({', '.join(changes[:3])}); set gate.base=python:PATH"
    commit, dirty = base["code"]["commit"], base["code"]["dirty"]
    head = heads[names[0]]["code"]
    if commit is not None and head["commit"] == commit and not dirty and not head["dirty"]:
        return "the baseline is of this very commit, so pairs would measure the code against itself; set gate.base"
    if commit is not None and not dirty and resolve_commit(commit, cwd) is not None:
        return Base(f"git:{commit}", "the baseline's commit")
    merged = merge_base(cwd)
    if merged is not None:
        was = "has no commit" if commit is None else "had uncommitted changes" if dirty else "is of a commit not here"
        return Base(f"git:{merged[0]}", f"the merge base with {merged[1]}; the baseline {was}")
    return "the baseline's commit is not in a git repository here; set gate.base"


def code_is_elsewhere(cell: Cell, cwd: Path) -> str | None:
    """Why no commit of the repository at ``cwd`` would be the code that ``cell`` runs; None where one is."""
    if is_users_code(cell):
        return None
    checkout = package_checkout()
    if checkout is None:
        return f"ndbench is a copy in {package_folder()}, which no commit here would change; set gate.base"
    if not cwd.resolve().is_relative_to(checkout):
        return f"ndbench's code is that of {checkout}, which the current folder is not in; set gate.base"
    return None


def _latest(baseline: Baseline, name: str) -> Record:
    """A repeat of the newest session that has the cell (or, for a renamed one, of any cell)."""
    held = baseline.history(name)
    session = held[-1] if held else baseline.sessions[-1]
    return session.cells[name][0] if held else next(iter(session.cells.values()))[0]


def _cells(plan: Plan, baseline: Baseline, names: Sequence[str]) -> dict[str, tuple[Cell, Cell]]:
    """For each suspect the base's cell as the baseline has it (with its planted slowdown or none) and the head's."""
    pairs = {}
    for name in names:
        head = plan.cells[name]
        record = _latest(baseline, name)
        try:
            base = cell_from_dict(record["cell"]) if record["cell_id"] == head.cell_id else head
        except (ValueError, TypeError):  # of another version of the schema; the identity is the same
            base = head
        pairs[name] = (base, head)
    return pairs


def _confirm(
    plan: Plan,
    folder: RunFolder,
    cells: dict[str, tuple[Cell, Cell]],
    base: Base,
    say: Callable[[str], None],
    cwd: Path | None,
) -> Outcome:
    root = folder.path / "confirm"
    folders = [RunFolder(root / label) for label in ("base", "head")]
    for one in folders:
        one.records_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        sides = [stack.enter_context(open_side(*side, cwd=cwd)) for side in (("base", base.ref), ("head", HERE))]
        processes = [
            stack.enter_context(SideProcess(side, f"{plan.run}-{side.label}", where))
            for side, where in zip(sides, folders, strict=True)
        ]
        for position, process in enumerate(processes):
            process.hello([pair[position] for pair in cells.values()])
        bench = Bench(
            base=processes[0],
            head=processes[1],
            base_folder=folders[0],
            head_folder=folders[1],
            seed=next(iter(cells.values()))[1].config.measure.shuffle_seed,
            residency=plan.gate.residency,
            note=say,
        )
        confirmed = confirm(bench, cells, plan.gate, say=say)
    write_json(root / "pairs.json", {"schema_version": 1, "base": base.ref, "cells": confirmed.to_json()})
    return Outcome(confirmed.metrics())


def _left_over(comparison: Comparison, name: str) -> MetricVerdict:
    """A suspect that was not among those confirmed: never a verdict by stored repeats where pairs could decide."""
    speed = comparison.cell(name).metric("tokens_per_second")
    assert speed is not None, "it was a suspect for its speed"
    slower = math.expm1(float(speed.details["log_effect"]))
    reason = f"step time {slower:+.1%}, a suspect beyond the {MOST_SUSPECTS} largest, which were confirmed"
    return MetricVerdict(
        speed.metric, "inconclusive", reason, speed.change, speed.low, speed.high, details=speed.details
    )


def _unconfirmed(comparison: Comparison, chosen: Sequence[str], why: str) -> str:
    """That these were not measured again. A cell that is regressed without it is no suspect any more."""
    open_ = [name for name in chosen if comparison.cell(name).verdict != "regressed"]
    if not open_:
        return f"speed of {', '.join(chosen)} was decided by the stored sessions, not by pairs: {why}"
    return f"{counted(len(open_), 'suspect')} {were(len(open_))} not confirmed by pairs: {why}"
