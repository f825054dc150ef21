"""``ndbench ab``: the same cells on two sides, paired and interleaved on this machine, and what the pairs say.

Opens both sides, measures, and lets ``compare`` decide: speed by the pairs alone, everything else by the records.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ndbench.compare.exits import unwritten
from ndbench.compare.result import Comparison
from ndbench.compare.verdict import compare
from ndbench.config import Cell
from ndbench.counted import counted
from ndbench.gate.loop import Confirmed, confirm, confirm_rule, so_far
from ndbench.gate.pairs import Bench, by_turns
from ndbench.gate.refs import HERE, Side, importable, open_side, uncommitted
from ndbench.gate.sides import SideProcess
from ndbench.matrix.expand import Matrix, expand
from ndbench.measure.code import another_package, is_users_code
from ndbench.report import junit
from ndbench.report.annotations import annotate
from ndbench.report.console import print_comparison
from ndbench.report.markdown import append_step_summary, render
from ndbench.report.progress import duration
from ndbench.results.sessions import baseline_of_run
from ndbench.results.store import RunFolder, write_json, write_text
from ndbench.run.plan import Plan, new_run_name
from ndbench.run.start import ask_engines

LAUNCH_SECONDS = 20.0
"""A guess for what starting the ranks of one launch costs, for the estimate that is printed."""
START_SECONDS = 20.0
"""... and for starting the two sides' processes, which import torch, once."""


def run_ab(
    words: Sequence[str],
    base: str,
    head: str,
    *,
    setup: str | None = None,
    config_dir: Path | None = None,
    sweep: bool = False,
    console: Console,
) -> int:
    """Measure both sides and return the exit code. Raises ``ValueError`` for what the user must change."""
    more = [*(["--setup", setup] if setup else []), *(["--config-dir", str(config_dir)] if config_dir else [])]
    again = shlex.join(
        ["ndbench", "ab", *words, "--base", base, "--head", head, *more, *(["--multirun"] if sweep else [])]
    )
    with ExitStack() as stack:
        sides = [
            stack.enter_context(open_side(label, ref, setup=setup)) for label, ref in (("base", base), ("head", head))
        ]
        with importable(sides):
            matrices = [expand([*words, *side.overrides], config_dir, sweep=sweep) for side in sides]
            cells = pair_cells(*matrices)
        folder = ab_folder(matrices[1].config.results.dir)
        folders = [side_folder(folder, side.label, matrix) for side, matrix in zip(sides, matrices, strict=True)]
        config = matrices[1].config
        _announce(cells, sides, console)
        processes = [
            stack.enter_context(SideProcess(side, folder.name, where))
            for side, where in zip(sides, folders, strict=True)
        ]
        for process, position in zip(processes, (0, 1), strict=True):
            process.hello([pair[position] for pair in cells.values()])
        for line in package_remarks(processes, cells):
            _say(console, line)
        bench = Bench(
            base=processes[0],
            head=processes[1],
            base_folder=folders[0],
            head_folder=folders[1],
            seed=config.measure.shuffle_seed,
            residency=config.gate.residency,
            note=lambda line: _say(console, line),
        )
        confirmed = Confirmed()
        try:
            confirm(bench, cells, config.gate, say=lambda line: _say(console, line), into=confirmed)
        except BaseException as error:
            if not isinstance(error, BrokenPipeError):  # nobody is there to read it
                _stop(folder, sides, confirmed, so_far(confirmed, cells, config.gate), again, console)
            raise
    comparison = decide_ab(folders, sides, confirmed, matrices[1])
    return _finish(folder, comparison, confirmed, sides, again, console)


def pair_cells(base: Matrix, head: Matrix) -> dict[str, tuple[Cell, Cell]]:
    """Each head cell with the base's of the same name; a single cell on both sides is paired whatever it is called.

    Raises ``ValueError`` naming cells that only one side has, and when nothing can run.
    """
    found = []
    for matrix in (base, head):
        runnable, refused = ask_engines(matrix.cells)
        if not runnable:
            reasons = [reason for _, reason in (*matrix.skipped, *refused)]
            raise ValueError(f"no cell of suite {matrix.suite} can run here: {'; '.join(dict.fromkeys(reasons))}")
        found.append({cell.name: cell for cell in runnable})
    ours, theirs = found
    if len(ours) == len(theirs) == 1:
        (one,), (other,) = ours.values(), theirs.values()
        return {other.name: (one, other)}
    lonely = sorted(set(ours) ^ set(theirs))
    if lonely:
        raise ValueError(f"only one side has {', '.join(lonely)}: an A/B needs the same cells on both")
    return {name: (ours[name], theirs[name]) for name in theirs}


def ab_folder(results_dir: str | Path) -> Path:
    """A new folder ``<results.dir>/ab/<run>``."""
    folder = Path(results_dir) / "ab" / new_run_name()
    folder.mkdir(parents=True)
    return folder


def side_folder(parent: Path, label: str, matrix: Matrix) -> RunFolder:
    """A run folder for one side's records, with a plan, so that every reading verb takes it."""
    folder = RunFolder(parent / label)
    folder.path.mkdir()
    folder.records_dir.mkdir()
    plan = Plan(
        run=f"{parent.name}-{label}",
        suite=matrix.suite,
        overrides=list(matrix.overrides),
        cells={cell.name: cell for cell in matrix.cells},
        repeats={},
        order=[],
        gate=matrix.config.gate,
        baseline=None,
        budget_seconds=None,
    )
    plan.save(folder.plan_path)
    return folder


def decide_ab(folders: Sequence[RunFolder], sides: Sequence[Side], confirmed: Confirmed, matrix: Matrix) -> Comparison:
    """Speed by the pairs, everything else by comparing the head's records with the base's."""
    base, head = (folder.records() for folder in folders)
    names = set(confirmed.pairs)
    stored = baseline_of_run(folders[0], _renamed(base, names)) if base else None
    source = f"{sides[0].ref}{f' ({sides[0].commit[:12]})' if sides[0].commit else ''}, measured next to it"
    comparison = compare(
        head,
        dataclasses.replace(stored, source=source) if stored is not None else None,
        [cell.to_dict() | {"cell_id": cell.cell_id} for cell in matrix.cells if cell.name in names],
        matrix.config.gate,
        suite=matrix.suite,
        run=folders[1].path.parent.name,
        confirmed=confirmed.metrics(),
    )
    return dataclasses.replace(comparison, mode="ab")


def _renamed(records: list, names: set[str]) -> list:  # type: ignore[type-arg]
    """The base's records under the head's cell name, where a single cell is called differently there."""
    if len(names) == 1 and records and records[0]["cell"]["name"] not in names:
        (name,) = names
        return [{**record, "cell": {**record["cell"], "name": name}} for record in records]
    return records


def _announce(cells: dict[str, tuple[Cell, Cell]], sides: Sequence[Side], console: Console) -> None:
    said = f"base {sides[0].ref}, head {sides[1].ref}: {counted(len(cells), 'cell')}"
    _say(console, f"{said}, {estimate([head for _, head in cells.values()])}")
    for line in remarks(sides):
        _say(console, line)


def remarks(sides: Sequence[Side]) -> list[str]:
    """What the references may not have been meant to say."""
    found = []
    if sides[0].commit is not None and sides[0].commit == sides[1].commit:
        found.append(f"both sides are commit {sides[0].commit[:12]}: what differs is noise")
    for side in sides:
        if side.ref == "git:HEAD" and uncommitted(Path.cwd()):
            found.append(f"{side.ref} is without your uncommitted changes; '{HERE}', the default head, has them")
    return found


def package_remarks(processes: Sequence[SideProcess], cells: Mapping[str, tuple[Cell, Cell]]) -> list[str]:
    """Sides that measure another ndbench than their reference says, once both have told which they imported."""
    if all(is_users_code(cell) for pair in cells.values() for cell in pair):
        return []
    found = []
    for process in processes:
        side, package = process.side, Path(process.facts["package"])
        if side.commit is not None and not any(package.is_relative_to(path) for path in side.pythonpath):
            found.append(f"{side.label} {side.ref} measures the ndbench installed in {package}: that commit has none")
        elif side.ref == HERE and (told := another_package(side.cwd, package)) is not None:
            found.append(f"{side.label} {side.ref} {told}")
    return found


def estimate(cells: Sequence[Cell]) -> str:
    """What confirming these cells takes, in words."""
    rule, turns = confirm_rule(cells[0], cells[0].config.gate), by_turns(cells[0])
    residency = cells[0].config.gate.residency
    # a residency starts the ranks of both sides, on the same cores
    each = residency + 2 * LAUNCH_SECONDS if turns else 3 * LAUNCH_SECONDS
    low, high = (duration(START_SECONDS + each * count * len(cells)) for count in rule.looks)
    what = f"residencies of {residency:g} s, taking turns" if turns else "pairs of launches"
    return f"{rule.looks[0]} to {rule.looks[1]} {what}: about {low} to {high}"


def _say(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)


def _stop(
    folder: Path, sides: Sequence[Side], confirmed: Confirmed, said: list[str], again: str, console: Console
) -> None:
    """Of an A/B that ends in the middle: what the pairs say so far, marked as partial, and where they are."""
    _say(console, "stopped in the middle; what there is decides nothing:")
    for line in said:
        _say(console, f"  {line}")
    try:
        _write_pairs(folder, sides, confirmed, again, stopped=said)
    except (OSError, ValueError) as error:
        _say(console, f"pairs.json is not written: {error}")
    _say(console, f"both sides' records, pairs.json: {folder}")
    _say(console, f"again: {again}")


def _write_pairs(
    folder: Path, sides: Sequence[Side], confirmed: Confirmed, again: str, stopped: list[str] | None = None
) -> None:
    """``stopped``: what a partial A/B said; null in that of a whole one."""
    described = {side.label: {"ref": side.ref, "commit": side.commit, "python": side.python} for side in sides}
    head = {"schema_version": 1, "command": again, "stopped": stopped}
    write_json(folder / "pairs.json", {**head, **described, "cells": confirmed.to_json()})


def _finish(
    folder: Path,
    comparison: Comparison,
    confirmed: Confirmed,
    sides: Sequence[Side],
    again: str,
    console: Console,
) -> int:
    summary = render(comparison, again=again)
    try:
        write_text(folder / "summary.md", summary)
        write_text(folder / "junit.xml", junit.render(comparison))
        _write_pairs(folder, sides, confirmed, again)
        write_json(folder / "verdict.json", comparison.to_json())
    except OSError as error:  # a full disk: the exit code that is printed is the one that is returned
        print_comparison(unwritten(comparison, error), again=again, console=console)
        raise
    print_comparison(comparison, again=again, console=console)
    _say(console, f"both sides' records, pairs.json, verdict.json: {folder}")
    step_summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if step_summary:
        append_step_summary(step_summary, summary)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        annotate(comparison)
    return comparison.exit_code
