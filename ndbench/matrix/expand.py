"""From overrides and a suite to the list of cells: what runs, what a rule leaves out, what cannot run and why.

The one entry of this room is :func:`expand`. It starts no process and imports no torch.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndbench.config import AD_HOC, Cell, Config
from ndbench.matrix.compose import Composer
from ndbench.matrix.overrides import Request, choose, parse_overrides
from ndbench.matrix.points import Point, PointMaker
from ndbench.matrix.resolve import crossing
from ndbench.matrix.sources import GROUPS, find_sources
from ndbench.matrix.suite import SuiteConfig


@dataclass
class Matrix:
    """Every point of a request. ``cells`` are those to run."""

    suite: str
    config: Config
    """What concerns the run as a whole (results, gate, baseline, budget): that of the first point."""
    overrides: list[str]
    cells: list[Cell] = field(default_factory=list)
    excluded: list[tuple[str, str]] = field(default_factory=list)
    """(name, rule) of what the suite or the command line leaves out."""
    skipped: list[tuple[Cell, str]] = field(default_factory=list)
    """Cells that cannot run, with the numbers."""
    unselected: list[Cell] = field(default_factory=list)
    """Cells that ``cells=`` or ``shard=`` leaves out."""
    warnings: list[str] = field(default_factory=list)
    description: str = ""


def expand(
    overrides: Sequence[str], config_dir: str | Path | None = None, *, sweep: bool = False, here: bool = True
) -> Matrix:
    """The matrix of a command line's overrides.

    ``sweep``: comma-separated values are axes (``-m``). ``here``: the cells must fit this machine; False for
    ``show``, which plans for any. Raises ``ValueError``, one line, for whatever the user must change: an unknown key
    or name, a wrong type, a suite's mistake, a selection of nothing, a single cell that is refused.
    """
    sources = find_sources(config_dir)
    request = parse_overrides(overrides, sources, sweep)
    composer = Composer(sources)
    hardware = request.groups.get("hardware")
    if hardware is None and "hardware" not in request.sweeps:
        hardware, values = choose("hardware", "auto", sources)
        request.values = values | request.values
    base = {"hardware": hardware or "cpu"}
    suite = composer.suite(request.suite, base) if request.suite else SuiteConfig(name=AD_HOC)
    if hardware is not None and "hardware" not in suite.axes:
        request.groups["hardware"] = hardware
    device = composer.config(base).hardware.device
    settings = _without_choices(suite.settings_for(device), request)
    candidates = {key: value for key, value in settings.items() if key in GROUPS and isinstance(value, list)}
    maker = PointMaker(composer, sources, request, suite, here)
    points: list[Point] = []
    combinations = list(itertools.product(*candidates.values()))
    for names in combinations:
        points = maker.points(settings | dict(zip(candidates, names, strict=True)))
        # all of them, selected or not: what a cell is does not depend on which are asked for
        if len(combinations) == 1 or all(point.refused or not point.lacks for point in points):
            break
    single = not request.suite and not sweep
    return _sort(_distinct(points), request, suite, maker.warnings, single)


def _without_choices(settings: dict[str, Any], request: Request) -> dict[str, Any]:
    """The suite's settings that the command line leaves alone: a group chosen there takes all its keys with it."""
    groups, keys = {*request.groups, *request.sweeps}, {*request.values, *request.sweeps}
    return {key: value for key, value in settings.items() if key not in keys and key.split(".")[0] not in groups}


def _distinct(points: list[Point]) -> list[Point]:
    """The points with unique names; the same cell twice is one cell."""
    by_name: dict[str, list[Point]] = {}
    for point in points:
        if point.excluded is None:
            by_name.setdefault(point.cell.name, []).append(point)
    dropped: set[int] = set()
    for name, same in by_name.items():
        if len(same) == 1:
            continue
        first: dict[str, Point] = {}
        for point in same:
            if first.setdefault(point.cell.cell_id, point) is not point:
                dropped.add(id(point))
        if len(first) > 1:
            for key, point in first.items():
                point.cell = dataclasses.replace(point.cell, name=f"{name}-{key[:6]}")
    return [point for point in points if id(point) not in dropped]


def _sort(points: list[Point], request: Request, suite: SuiteConfig, warnings: list[str], single: bool) -> Matrix:
    if not points:
        raise ValueError(f"suite {suite.name} has no cells")
    candidates = [point for point in points if point.excluded is None]
    contradicted = [point for point in points if point.contradicts]
    if contradicted and not candidates:
        reasons = ", ".join(sorted({str(point.excluded) for point in contradicted}))
        raise ValueError(
            f"no cell of suite {suite.name} fits: {reasons}; its cells: "
            + ", ".join(dict.fromkeys(point.cell.name for point in contradicted))
        )
    if single and candidates and candidates[0].refused:
        raise ValueError("; ".join(candidates[0].refused))
    config = points[0].cell.config
    matrix = Matrix(suite.name, config, request.overrides, description=suite.description, warnings=list(warnings))
    matrix.excluded = [(point.cell.name, point.excluded) for point in points if point.excluded is not None]
    selected = _selected(candidates, matrix.excluded, config, suite.name)
    own = _shard([point for point in candidates if id(point) in selected], config.shard)
    for point in candidates:
        if id(point) not in own:
            matrix.unselected.append(point.cell)
        elif point.refused or point.lacks:
            matrix.skipped.append((point.cell, "; ".join(point.refused or point.lacks)))
        else:
            matrix.cells.append(point.cell)
    matrix.warnings += [warning for cell in matrix.cells if (warning := crossing(cell)) is not None]
    return matrix


def _selected(points: list[Point], excluded: list[tuple[str, str]], config: Config, suite: str) -> set[int]:
    """The points that ``cells=`` names. Raises ``ValueError`` for a pattern that finds none, or only excluded ones."""
    if config.cells is None:
        return {id(point) for point in points}
    found: set[int] = set()
    patterns = [pattern.strip() for pattern in config.cells.split(",") if pattern.strip()]
    for pattern in patterns:
        matches = {id(point) for point in points if fnmatch.fnmatchcase(point.cell.name, pattern)}
        if not matches:
            if left := _reasons([pair for pair in excluded if fnmatch.fnmatchcase(pair[0], pattern)]):
                raise ValueError(f"cells={pattern} selects cells that are left out: {left}")
            names = ", ".join(point.cell.name for point in points)
            raise ValueError(f"cells={pattern} selects no cell of suite {suite}; its cells: {names}")
        found |= matches
    if not found:
        raise ValueError(f"cells='{config.cells}' is empty: it selects no cell of suite {suite}")
    return found


def _reasons(excluded: list[tuple[str, str]]) -> str:
    """``ddp2, fsdp2 (dp > 1); tp2 (tp > 1)``"""
    names: dict[str, list[str]] = {}
    for name, reason in dict.fromkeys(excluded):
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(same)} ({reason})" for reason, same in names.items())


def _shard(points: list[Point], shard: str | None) -> set[int]:
    """This shard's points: those that fit the machine are dealt in turn, before an engine is asked about any; what fits
    on none is told by all. Raises ``ValueError`` for anything but K/N."""
    if shard is None:
        return {id(point) for point in points}
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", shard)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise ValueError(f"shard={shard} is not K/N with 1 <= K <= N, such as 1/4")
    fitting = [point for point in points if not point.wrong and not point.lacks]
    own = fitting[index - 1 :: count]
    if fitting and not own:
        raise ValueError(f"shard={shard} holds no cell: there are only {len(fitting)}")
    dealt = {id(point) for point in fitting} - {id(point) for point in own}
    return {id(point) for point in points} - dealt
