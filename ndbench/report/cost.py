"""What a cell would take, before it runs: bytes of a rank and seconds of all its repeats.

Time is taken from stored repeats of the same cell on the same kind of machine where there are any; else from FLOPs.
Reads records, never writes; an unreadable one only makes the estimate coarser.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from ndbench.config import Cell
from ndbench.measure.flops import memory_estimate, step_flops
from ndbench.results.store import UnreadableFile, read_json

RUNS_SEARCHED = 10
"""Latest runs and sessions that are looked through."""
REPEATS_READ = 2
"""Repeats of a cell that are read: the first has the structure step, the others do not."""

GPU_UTILISATION = 0.35
"""Share of the peak that training usually reaches (30 to 45 % in published runs of this size)."""
GPU_LAUNCH_SECONDS = 15.0
"""Process group, model and first step of a repeat on GPUs."""
CPU_FLOPS_PER_CORE = 4e9
"""Small float32 matmuls of torch on one core reach a few GFLOP/s."""
CPU_LAUNCH_SECONDS = 1.5
CPU_STEP_SECONDS = 0.004
"""A rank's Python and gloo time of one step, whatever its size."""


@dataclass(frozen=True)
class Cost:
    repeats: int
    memory_bytes: int | None
    """Estimated peak of one rank."""
    seconds: float | None
    """All repeats of the cell; null when there is nothing to estimate from."""
    basis: str
    """``stored`` (timed before), ``flops`` (from the device's peak), ``rule`` (CPU, rule of thumb) or ``unknown``."""


def costs(cells: Iterable[Cell], results_dir: str | Path) -> dict[str, Cost]:
    """The cost of each cell, by name."""
    cells = list(cells)
    timed = _stored_seconds(cells, Path(results_dir))
    return {cell.name: _cost(cell, timed.get(cell.name)) for cell in cells}


def _cost(cell: Cell, stored: float | None) -> Cost:
    repeats = cell.config.measure.repeats
    assert repeats is not None, "cells are resolved"
    seconds, basis = (stored, "stored") if stored is not None else _by_flops(cell)
    return Cost(
        repeats,
        None if _is_a_script(cell) else memory_estimate(cell),
        None if seconds is None else seconds * repeats,
        basis,
    )


def _by_flops(cell: Cell) -> tuple[float | None, str]:
    """Seconds of one repeat."""
    config, steps = cell.config, cell.config.training.steps
    flops = step_flops(config.model, config.training)
    if flops is None or _is_a_script(cell):
        return None, "unknown"
    if config.hardware.device == "cpu":
        cores = min(cell.world_size, os.cpu_count() or 1)
        step = flops / (cores * CPU_FLOPS_PER_CORE) + CPU_STEP_SECONDS * cell.world_size
        return CPU_LAUNCH_SECONDS + (steps + 4) * step, "rule"  # + 4: the first step is slow, the structure step slower
    peak = config.hardware.peak_flops.get(config.training.precision)
    if not peak:
        return None, "unknown"
    return GPU_LAUNCH_SECONDS + steps * flops / (cell.world_size * peak * GPU_UTILISATION), "flops"


def _is_a_script(cell: Cell) -> bool:
    """``engine=command``: what it trains is not known, whatever the model here is called."""
    return cell.config.engine.command is not None


def _stored_seconds(cells: list[Cell], results_dir: Path) -> dict[str, float]:
    """Mean seconds of one repeat, by name, of the cells that were measured before."""
    wanted: dict[str, tuple[str, str]] = {}
    found: dict[str, float] = {}
    for files in _places(results_dir, cells[0].suite if cells else ""):
        wanted = wanted or {cell.name: (cell.cell_id, cell.config.hardware.name) for cell in cells}
        for name in wanted.keys() - found.keys() & files.keys():
            seconds = [
                _seconds(record)
                for path in files[name]
                for record in _records(path)
                if (record["cell_id"], (record["cell"].get("hardware") or {}).get("name")) == wanted[name]
                and record["outcome"] == "ok"
            ]
            if seconds:
                found[name] = fmean(seconds)
        if wanted.keys() == found.keys():
            break
    return found


def _places(results_dir: Path, suite: str) -> Iterator[dict[str, list[Path]]]:
    """Files by cell name: of each of the latest runs, then of each of the suite's latest accepted sessions."""
    for run in _latest(results_dir.glob("runs/*/records")):
        files: dict[str, list[Path]] = {}
        for path in sorted(run.glob("*.r*.json")):
            name = re.sub(r"\.r[0-9]+$", "", path.stem)
            if len(files.setdefault(name, [])) < REPEATS_READ:
                files[name].append(path)
        yield files
    for session in _latest(results_dir.glob(f"baselines/*/{suite}/*")):
        yield {path.stem: [path] for path in session.glob("*.json") if path.name != "session.json"}


def _latest(folders: Iterable[Path]) -> list[Path]:
    return sorted(folders, key=lambda path: path.parts[-2:], reverse=True)[:RUNS_SEARCHED]


def _records(path: Path) -> list[dict[str, Any]]:
    """The record in a run's file, or those of a baseline's cell file; none when it cannot be read."""
    try:
        value = read_json(path)
        records = [{**value, **repeat} for repeat in value["repeats"]] if "repeats" in value else [value]
        return [record for record in records if {"cell_id", "cell", "outcome", "start", "end"} <= record.keys()]
    except (UnreadableFile, TypeError, AttributeError):
        return []


def _seconds(record: dict[str, Any]) -> float:
    return (datetime.fromisoformat(record["end"]) - datetime.fromisoformat(record["start"])).total_seconds()
