"""From a matrix to a running plan: what the engine refuses is set aside, the rest is ordered and started."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from ndbench.config import Cell
from ndbench.counted import counted
from ndbench.gate.refs import refuse_base
from ndbench.matrix.durations import seconds
from ndbench.matrix.expand import Matrix
from ndbench.matrix.resolve import plan_refusals
from ndbench.report.tracker import check as check_tracker
from ndbench.run.plan import Plan, interleave, new_run_name

NOTHING_TO_RUN = 3


def run_matrix(matrix: Matrix, *, max_failures: int | None, console: Console) -> int:
    """Measure a matrix and answer with the run's exit code; 3 when no cell of it can run here.

    Raises ``ValueError`` before any process starts for what the user must change.
    """
    budget = matrix.config.measure.budget
    check_tracker(matrix.config.tracker)
    if matrix.config.gate.base is not None:
        refuse_base(matrix.config.gate.base, Path.cwd())
    runnable, refused = ask_engines(matrix.cells)
    if not runnable and len(refused) == 1 and not matrix.skipped:
        raise ValueError(f"{refused[0][0].name}: {refused[0][1]}")
    skipped = [*matrix.skipped, *refused]
    if not runnable:
        _say_nothing_runs(matrix, skipped, console)
        return NOTHING_TO_RUN
    repeats = {cell.name: _repeats(cell) for cell in runnable}
    plan = Plan(
        run=new_run_name(),
        suite=matrix.suite,
        overrides=list(matrix.overrides),
        cells={cell.name: cell for cell in runnable},
        repeats=repeats,
        order=interleave(repeats, matrix.config.measure.shuffle_seed),
        gate=matrix.config.gate,
        baseline=matrix.config.baseline,
        budget_seconds=None if budget is None else seconds("measure.budget", budget),
        excluded=list(matrix.excluded),
        skipped=[(cell.name, cell.cell_id, reason) for cell, reason in skipped],
        unselected=[(cell.name, cell.cell_id) for cell in matrix.unselected],
        warnings=list(matrix.warnings),
    )
    for warning in matrix.warnings:
        console.print(Text(f"warning: {warning}"), style="yellow", soft_wrap=True)
    # Imports torch: after everything that can be refused without it.
    from ndbench.run.runner import start_run

    return start_run(plan, Path(matrix.config.results.dir), max_failures=max_failures, console=console)


def ask_engines(cells: list[Cell]) -> tuple[list[Cell], list[tuple[Cell, str]]]:
    """(cells their engine can run, cells it refuses with the reason): of a matrix, so what needs no model's code was
    asked before."""
    runnable: list[Cell] = []
    refused: list[tuple[Cell, str]] = []
    for cell in cells:
        reasons = plan_refusals(cell)
        if reasons:
            refused.append((cell, "; ".join(reasons)))
        else:
            runnable.append(cell)
    return runnable, refused


def _repeats(cell: Cell) -> int:
    repeats = cell.config.measure.repeats
    assert repeats is not None, "cells are resolved"
    return repeats


def _say_nothing_runs(matrix: Matrix, skipped: list[tuple[Cell, str]], console: Console) -> None:
    console.print(
        Text(f"suite {matrix.suite}: none of its {counted(len(skipped), 'cell')} can run here"), style="bold red"
    )
    for cell, reason in skipped:
        console.print(Text(f"  {cell.name}: {reason}"), soft_wrap=True)
    others = " ".join(text for text in matrix.overrides if not text.startswith(("hardware=", "world_size=")))
    console.print(Text(f"this would run: ndbench {others} hardware=cpu"), soft_wrap=True)
