"""The cells of a matrix as a table, and why the others are left out: what ``ndbench show`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ndbench.counted import counted
from ndbench.report.cells import engine_of
from ndbench.report.columns import Column, print_columns
from ndbench.report.cost import Cost
from ndbench.report.progress import duration

if TYPE_CHECKING:
    from ndbench.config import Cell
    from ndbench.matrix.expand import Matrix

BY_ESTIMATE = "needs about "
"""How the reason of a cell too large for the memory begins."""
MARGIN = (
    "A cell fits when its estimate is no more than all of the memory; estimates are within a quarter of measured peaks."
)
NAMES_SHOWN = 12
"""Names of cells that are listed after one reason; JSON has them all."""


def print_matrix(matrix: Matrix, costs: Mapping[str, Cost], console: Console) -> None:
    hardware = matrix.config.hardware
    head = f"suite {matrix.suite}" if matrix.suite != "adhoc" else "matrix"
    console.print(Text(f"{head} on {hardware.name}: {_count(matrix.cells, 'cell')}"), style="bold")
    if matrix.description:
        console.print(Text(matrix.description))
    if matrix.cells:
        _print_cells(matrix.cells, costs, console)
        console.print(Text(_total(matrix.cells, costs)))
    for title, reasons in (
        ("excluded", list(matrix.excluded)),
        ("cannot run", [(cell.name, reason) for cell, reason in matrix.skipped]),
        ("not selected", [(cell.name, "cells= or shard=") for cell in matrix.unselected]),
    ):
        if reasons:
            console.print(Text(f"\n{title}: {_count(reasons, 'cell')}"), style="bold")
            for reason, names in _by_reason(reasons).items():
                console.print(Text(f"  {reason}: {_listed(names)}"), soft_wrap=not console.is_terminal)
            if any(reason.startswith(BY_ESTIMATE) for _, reason in reasons):
                console.print(Text(MARGIN), soft_wrap=not console.is_terminal)
    for warning in matrix.warnings:
        console.print(Text(f"warning: {warning}"), style="yellow", soft_wrap=not console.is_terminal)


def matrix_json(matrix: Matrix, costs: Mapping[str, Cost]) -> dict[str, Any]:
    """The same facts, all of them, as plain data."""
    seconds = [cost.seconds for cell in matrix.cells if (cost := costs[cell.name]).seconds is not None]
    return {
        "suite": matrix.suite,
        "description": matrix.description,
        "overrides": matrix.overrides,
        "hardware": matrix.config.hardware.name,
        "cells": [_cell_json(cell, costs[cell.name]) for cell in matrix.cells],
        "total_seconds": sum(seconds) if seconds else None,
        "excluded": [{"name": name, "reason": reason} for name, reason in matrix.excluded],
        "skipped": [{"name": cell.name, "cell_id": cell.cell_id, "reason": reason} for cell, reason in matrix.skipped],
        "unselected": [{"name": cell.name, "cell_id": cell.cell_id} for cell in matrix.unselected],
        "warnings": matrix.warnings,
    }


def _cell_json(cell: Cell, cost: Cost) -> dict[str, Any]:
    return {
        "name": cell.name,
        "cell_id": cell.cell_id,
        "layout": cell.layout,
        "world_size": cell.world_size,
        "parallelism": cell.parallelism.sizes,
        "engine": cell.config.engine.name,
        "model": cell.config.model.name if cell.config.engine.command is None else None,
        "hardware": cell.config.hardware.name,
        "precision": cell.config.training.precision,
        "tokens_per_step": _tokens(cell) if cell.config.engine.command is None else None,
        "repeats": cost.repeats,
        "memory_bytes_per_rank": cost.memory_bytes,
        "seconds": cost.seconds,
        "seconds_basis": cost.basis,
    }


def _print_cells(cells: list[Cell], costs: Mapping[str, Cost], console: Console) -> None:
    layouts = any(cell.name != cell.layout for cell in cells)
    hardware = len({cell.config.hardware.name for cell in cells}) > 1
    engines = any(engine_of(cell.name, cell.config.engine.name) for cell in cells)
    titles = ["cell", *(["layout"] if layouts else []), *(["hardware"] if hardware else [])]
    titles += [*(["engine"] if engines else []), "model"]
    columns = [Column(title) for title in titles]
    columns += [Column(title, right=True) for title in ("ranks", "tokens/step", "memory/rank", "repeats", "time")]
    rows = []
    for cell in cells:
        cost = costs[cell.name]
        row = [
            cell.name,
            *([cell.layout] if layouts else []),
            *([cell.config.hardware.name] if hardware else []),
            *([cell.config.engine.name] if engines else []),
            "-" if cell.config.engine.command is not None else cell.config.model.name,
            str(cell.world_size),
            "-" if cell.config.engine.command is not None else f"{_tokens(cell):,}",
            _bytes(cost.memory_bytes),
            str(cost.repeats),
            _time(cost),
        ]
        rows.append(row)
    print_columns(console, columns, rows)


def _total(cells: list[Cell], costs: Mapping[str, Cost]) -> str:
    known = [cost for cell in cells if (cost := costs[cell.name]).seconds is not None]
    repeats = sum(costs[cell.name].repeats for cell in cells)
    told = f"{_count(cells, 'cell')}, {counted(repeats, 'repeat')}"
    if not known:
        return f"{told}; the time cannot be estimated: hardware without a peak, cells never measured"
    seconds = sum(cost.seconds or 0.0 for cost in known)
    stored = sum(cost.basis == "stored" for cost in known)
    told += f", about {duration(seconds)}"
    if len(known) < len(cells):
        told += f" for {len(known)} of them (no estimate for the others)"
    return f"{told}; {stored} of the cells timed before" if stored else f"{told} (~: never timed here, a rule of thumb)"


def _time(cost: Cost) -> str:
    if cost.seconds is None:
        return "?"
    return duration(cost.seconds) if cost.basis == "stored" else f"~{duration(cost.seconds)}"


def _tokens(cell: Cell) -> int:
    return cell.config.training.global_batch_size * cell.config.training.sequence_length


def _bytes(value: int | None) -> str:
    if value is None:
        return "?"
    return f"{value / 2**30:,.1f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"


def _by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, reason in reasons:
        grouped.setdefault(reason, []).append(name)
    return grouped


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _count(things: Iterable[Any], noun: str) -> str:
    return counted(len(list(things)), noun)
