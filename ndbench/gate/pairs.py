"""Measuring pairs: base and head next to each other in ABBA order, by whole launches or by taking turns.

Hands back log ratios and keeps both sides' records. When to look and what they mean is ``compare.confirm``'s business.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ndbench.compare.throughput import log_step_time
from ndbench.config import Cell
from ndbench.gate.sides import SideProcess
from ndbench.results.schema import Record
from ndbench.results.store import RunFolder
from ndbench.run.locks import device_locks
from ndbench.run.repeat import DEVICE_WAIT_SECONDS, devices_of, handicap_of
from ndbench.run.turns import Lost, Turn, Turns

WARM_QUADS = 2
"""Rounds of four turns before the first that counts: allocators and caches fill, the optimizer's state appears."""
LEAST_QUADS = 3
WALL, CPU = "tokens_per_second", "cpu_seconds_per_step"
"""The quantities of a pair, by the names of the metrics they decide."""


@dataclass
class Pair:
    """One pair of one cell, or why there is none."""

    ratios: dict[str, float] = field(default_factory=dict)
    """Log of head over base by quantity."""
    failed: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def print_nothing(_line: str) -> None:
    """For those who do not want to hear that a device is waited for."""


@dataclass(frozen=True)
class Bench:
    """Both sides, started, and where their records go."""

    base: SideProcess
    head: SideProcess
    base_folder: RunFolder
    head_folder: RunFolder
    seed: int = 0
    residency: float = 25.0
    """Seconds for which both sides are there and take turns."""
    note: Callable[[str], None] = print_nothing

    def sides(self) -> tuple[tuple[SideProcess, RunFolder], tuple[SideProcess, RunFolder]]:
        return (self.base, self.base_folder), (self.head, self.head_folder)


def by_turns(cell: Cell) -> bool:
    """Whether pairs of this cell are taken by turns: on a CPU, where launches of the same code differ by 10 to 30 %."""
    return cell.config.hardware.device == "cpu"


def measure_pair(bench: Bench, base: Cell, head: Cell, index: int) -> Pair:
    """Pair ``index`` of a cell, by the way its device asks for."""
    return turn_pair(bench, base, head, index) if by_turns(head) else launch_pair(bench, base, head, index)


def head_first(name: str, index: int, seed: int) -> bool:
    """ABBA: base first, head first, head first, base first; or the mirror image, by the seed and the cell."""
    mirrored = random.Random(f"{seed} {name}").random() < 0.5
    return (index % 4 in (1, 2)) != mirrored


def launch_pair(bench: Bench, base: Cell, head: Cell, index: int) -> Pair:
    """One launch of each side, one after the other."""
    records: dict[str, Record] = {}
    order = [(bench.base, bench.base_folder, base), (bench.head, bench.head_folder, head)]
    for side, folder, cell in reversed(order) if head_first(head.name, index, bench.seed) else order:
        side.start(cell, index)
        record = side.finish(cell.config.measure.timeout + 120)
        folder.write_record(record)
        records[side.side.label] = record
    failed = _failure(records)
    if failed:
        return Pair(failed=failed)
    return Pair({WALL: log_step_time(records["head"]) - log_step_time(records["base"])})


def _failure(records: Mapping[str, Record]) -> str | None:
    broken = [(label, record) for label, record in records.items() if record["outcome"] != "ok"]
    return "; ".join(f"{label} {record['outcome']}: {record['reason']}" for label, record in broken) or None


def turn_pair(bench: Bench, base: Cell, head: Cell, index: int, planted: tuple[float, ...] | None = None) -> Pair:
    """One residency: both sides' ranks at once, turns of one step in ABBA order, and their median ratio.

    ``planted`` gives the head's handicaps that alternate from one round of four turns to the next (in place of the
    cell's own); the ratios are then by handicap as well, under ``<quantity>@<handicap>``.
    """
    handicaps = planted if planted is not None else (handicap_of(head),)
    scratch = Path(tempfile.mkdtemp(prefix="ndbench-turns-"))
    turns: list[Turns] = []
    records: dict[str, Record] = {}
    lost: str | None = None
    cells = (base, head)
    try:
        with device_locks(devices_of(head), DEVICE_WAIT_SECONDS, bench.note):
            for (side, _), cell in zip(bench.sides(), cells, strict=True):
                turns.append(Turns(scratch / side.side.label, cell.world_size))
                side.start(cell, index, turns[-1].folder)
            try:
                quads = _residency(bench, turns, cells, handicaps, head_first(head.name, index, bench.seed))
            except Lost as error:
                lost, quads = str(error), []
            for one in turns:
                one.stop()
            for (side, folder), cell in zip(bench.sides(), cells, strict=True):
                records[side.side.label] = side.finish(cell.config.measure.timeout + 120)
                folder.write_record(records[side.side.label])
    finally:
        for one in turns:
            one.close()
        _remove(scratch)
    failed = _failure(records) or lost
    if failed:
        return Pair(failed=failed)
    return _summary(quads, handicaps, planted is not None)


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


@dataclass(frozen=True)
class _Quad:
    handicap: float
    base: tuple[Turn, Turn]
    head: tuple[Turn, Turn]


def _residency(
    bench: Bench, turns: list[Turns], cells: tuple[Cell, Cell], handicaps: tuple[float, ...], mirrored: bool
) -> list[_Quad]:
    """Rounds of four turns until the time is over and both sides have gone through their data once."""
    timeout = cells[1].config.measure.timeout
    watches = [bench.base.watch, bench.head.watch]
    for one, watch in zip(turns, watches, strict=True):
        one.wait_ready(timeout, watch)
    own = handicap_of(cells[0])
    needed = -(-max(cell.config.training.steps for cell in cells) // 2)
    least = max(needed, WARM_QUADS + LEAST_QUADS * len(handicaps))
    quads: list[_Quad] = []
    began = time.monotonic()
    while len(quads) < least or time.monotonic() - began < bench.residency:
        handicap = handicaps[len(quads) % len(handicaps)]
        taken: tuple[list[Turn], list[Turn]] = ([], [])
        first = int(mirrored != bool(len(quads) % 2))
        for side in (first, 1 - first, 1 - first, first):
            taken[side].append(turns[side].take(handicap if side else own, timeout, watches[side]))
        quads.append(_Quad(handicap, (taken[0][0], taken[0][1]), (taken[1][0], taken[1][1])))
    return quads[WARM_QUADS:]


def _summary(quads: list[_Quad], handicaps: tuple[float, ...], by_handicap: bool) -> Pair:
    """Median over the rounds of the log ratio of each: a burst of foreign load spoils a round, not the residency."""
    ratios: dict[str, float] = {}
    for handicap in dict.fromkeys(handicaps):
        chosen = [quad for quad in quads if quad.handicap == handicap]
        suffix = f"@{handicap:g}" if by_handicap else ""
        for name, of in ((WALL, "seconds"), (CPU, "cpu_seconds")):
            values = [_log_mean(quad.head, of) - _log_mean(quad.base, of) for quad in chosen]
            ratios[name + suffix] = median(values)
    seconds = [turn.seconds for quad in quads for turn in quad.base]
    return Pair(ratios, details={"rounds": len(quads), "base_step_seconds": median(seconds)})


def _log_mean(turns: tuple[Turn, Turn], what: str) -> float:
    return fmean(math.log(max(1e-9, getattr(turn, what))) for turn in turns)
