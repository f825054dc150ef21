"""``ndbench selftest``: plant faults on this machine, and see whether the gate turns red for each.

Measures a small cell again and again, sound and faulty, and asks ``compare`` as a run does. On a CPU 30 % slower must
be caught and 3 and 10 % are reported; everything that is exact must be caught everywhere.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ndbench.compare.confirm import ConfirmRule, Decision, decide
from ndbench.compare.result import CellVerdict
from ndbench.compare.verdict import compare
from ndbench.config import Cell, GateConfig
from ndbench.counted import counted
from ndbench.gate.faulty import FAULTS, NONE
from ndbench.gate.loop import confirm_rule
from ndbench.gate.pairs import CPU, WALL, Bench, Pair, turn_pair
from ndbench.gate.refs import HERE, open_side
from ndbench.gate.sides import SideProcess
from ndbench.matrix.expand import expand
from ndbench.measure.code import another_package
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline, baseline_of_run
from ndbench.results.store import RunFolder

SLOWDOWNS = (0.03, 0.10, 0.30)
RESIDENCY = 10.0
"""Seconds; shorter than a real one, so that the whole takes minutes."""
EXPECTED = {
    "memory leak": ("peak_allocated_bytes", "regressed"),
    "gradient x2": ("grad_norm", "regressed"),
    "loss shift": ("loss", "regressed"),
    "nan": ("loss", "regressed"),
    "all-gather": ("structure", "regressed"),
    "token count": ("outcome", "invalid"),
    "missing step": ("loss", "regressed"),
    "missing cell": ("outcome", "missing"),
}
"""The metric that must object to each fault, and how."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    planted: str
    must: bool
    """Whether not catching it fails the selftest."""
    caught: bool
    """For the line with nothing planted: whether the gate kept quiet."""
    said: str
    """What the gate said."""


@dataclass(frozen=True)
class Selftest:
    rows: list[Row]
    smallest: float
    """The smallest slowdown that the same pairs would show in nine of ten cases (relative)."""
    pairs: int
    seconds: float
    load: tuple[float, float, float]
    cell: str

    @property
    def passed(self) -> bool:
        return all(row.caught for row in self.rows if row.must)


def run_selftest(say: Callable[[str], None], overrides: tuple[str, ...] = (), residency: float = RESIDENCY) -> Selftest:
    """Plant everything, one after the other. Raises ``ValueError`` when no cell can run here."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ndbench-selftest-") as scratch, ExitStack() as stack:
        root = Path(scratch)
        plan = root / "fault"
        plan.write_text(NONE)
        cell = small_cell(plan, overrides)
        folders = [RunFolder(root / label) for label in ("base", "head")]
        for folder in folders:
            folder.records_dir.mkdir(parents=True)
        sides = [stack.enter_context(open_side(label, HERE)) for label in ("base", "head")]
        processes = [
            stack.enter_context(SideProcess(side, f"selftest-{side.label}", folder))
            for side, folder in zip(sides, folders, strict=True)
        ]
        for process in processes:
            process.hello([cell])
        if (told := another_package()) is not None:
            say(told)
        say(f"{cell.name}, {counted(cell.world_size, 'rank')} of {cell.config.hardware.device}")
        rows = _exact_rows(processes[0], cell, plan, say)
        plan.write_text(NONE)
        bench = Bench(
            base=processes[0],
            head=processes[1],
            base_folder=folders[0],
            head_folder=folders[1],
            residency=residency,
            note=say,
        )
        decisions, pairs = _slowdowns(bench, cell, say)
        rows += _speed_rows(decisions, cell)
        quiet = decisions[0.0]
        smallest = min(math.expm1(decision.minimal_effect) for decision in quiet.values())
    return Selftest(rows, smallest, pairs, time.monotonic() - began, os.getloadavg(), cell.name)


def small_cell(plan: Path, overrides: tuple[str, ...] = ()) -> Cell:
    """The sound cell: two ranks of FSDP where there are two devices, else one rank."""
    words = [
        "suite=smoke",
        "model=llama_tiny",
        "data=markov",
        "training=default",
        "training.steps=8",
        "engine.name=selftest",
        "engine.target=ndbench.gate.faulty.FaultyEngine",
        f"+engine.options.plan={plan}",
        *overrides,
    ]
    matrix = expand(words)
    if not matrix.cells:
        reasons = "; ".join(reason for _, reason in matrix.skipped)
        raise ValueError(f"the selftest's cell cannot run here: {reasons}")
    cells = {cell.name: cell for cell in matrix.cells}
    return next((cell for name, cell in cells.items() if "fsdp" in name), matrix.cells[0])


def _exact_rows(side: SideProcess, cell: Cell, plan: Path, say: Callable[[str], None]) -> list[Row]:
    """Everything that one launch decides: structure, memory, loss, tokens, completeness."""

    def launch(fault: str) -> Record:
        plan.write_text(fault)
        side.start(cell, 0)
        say(f"measuring: {fault if fault != NONE else 'nothing planted'}")
        return side.finish(cell.config.measure.timeout + 120)

    sound, again = launch(NONE), launch(NONE)
    if sound["outcome"] != "ok":
        raise ValueError(f"the sound cell does not run here: {sound['outcome']}: {sound['reason']}")
    baseline = _baseline([sound])
    rows = [_quiet_row(judge([again], baseline, cell))]
    for fault in FAULTS:
        rows.append(_row(fault, judge([launch(fault)], baseline, cell)))
    rows.append(_row("missing step", judge([without_last_step(again)], baseline, cell)))
    other = {**sound, "cell": {**sound["cell"], "name": "dropped"}, "cell_id": "dropped"}
    rows.append(_row("missing cell", judge([again], _baseline([sound, other]), cell, "dropped")))
    return rows


def _baseline(records: list[Record]) -> Baseline:
    return baseline_of_run(RunFolder(Path("selftest")), records)


def judge(records: list[Record], baseline: Baseline, cell: Cell, about: str | None = None) -> CellVerdict:
    """What the gate says about the cell (or the cell called ``about``) of a run."""
    plan = [cell.to_dict() | {"cell_id": cell.cell_id}]
    return compare(records, baseline, plan, GateConfig(), suite="selftest").cell(about or cell.name)


def without_last_step(record: Record) -> Record:
    """The record of a repeat that lost a step."""
    cut = copy.deepcopy(record)
    assert cut["steps"] is not None, "an ok record has steps"
    for series in ("loss", "grad_norm", "seconds"):
        if cut["steps"][series]:
            cut["steps"][series].pop()
    return cut


def _row(fault: str, verdict: CellVerdict) -> Row:
    metric, word = EXPECTED[fault]
    found = verdict.metric(metric)
    caught = found is not None and found.verdict == word
    said = found.reason if caught and found is not None else f"{verdict.verdict}: {'; '.join(verdict.reasons)}"
    return Row(fault, True, caught, said)


EXACT = ("peak_allocated_bytes", "grad_norm", "loss", "structure", "tokens", "outcome")


def _quiet_row(verdict: CellVerdict) -> Row:
    """Nothing planted: no exact metric may object."""
    loud = [m for m in verdict.metrics if m.metric in EXACT and m.verdict in ("regressed", "invalid", "missing")]
    said = "; ".join(metric.reason for metric in loud) or "structure, memory, loss and tokens as before"
    return Row("nothing", True, not loud, said)


def _slowdowns(bench: Bench, cell: Cell, say: Callable[[str], None]) -> tuple[dict[float, dict[str, Decision]], int]:
    """Residencies in which the head's turns are slowed down by 0, 3, 10 and 30 % in rotation; decided at both looks."""
    planted = (0.0, *SLOWDOWNS)
    rule = replace(confirm_rule(cell, GateConfig()), looks=(6, 12))
    pairs: list[Pair] = []
    decisions: dict[float, dict[str, Decision]] = {}
    for look in rule.looks:
        while len(pairs) < look:
            pair = turn_pair(bench, cell, cell, len(pairs), planted)
            if pair.failed is not None:
                raise ValueError(f"taking turns failed: {pair.failed}")
            pairs.append(pair)
            told = ", ".join(f"{h:.0%} as {math.expm1(pair.ratios[f'{CPU}@{h:g}']):+.1%}" for h in planted)
            say(f"[{len(pairs)}/{look}] slowdowns in CPU seconds: {told}")
        decisions = {handicap: _decide(pairs, handicap, rule) for handicap in planted}
        if _slower(decisions[SLOWDOWNS[-1]]):
            break
    return decisions, len(pairs)


def _decide(pairs: list[Pair], handicap: float, rule: ConfirmRule) -> dict[str, Decision]:
    return decide({name: [pair.ratios[f"{name}@{handicap:g}"] for pair in pairs] for name in (WALL, CPU)}, rule)


def _slower(decisions: dict[str, Decision]) -> bool:
    return any(decision.verdict == "regressed" for decision in decisions.values())


def _speed_rows(decisions: dict[float, dict[str, Decision]], cell: Cell) -> list[Row]:
    rows = []
    for handicap, made in decisions.items():
        said = "; ".join(
            f"{'wall' if name == WALL else 'CPU'} {math.expm1(d.effect):+.1%} "
            f"[{math.expm1(d.low):+.1%}, {math.expm1(d.high):+.1%}] {d.verdict}"
            for name, d in made.items()
        )
        slower = _slower(made)
        if handicap == 0:
            rows.append(Row("no slowdown", True, not slower, said))
        else:
            must = (cell.config.hardware.device != "cpu" and handicap >= 0.1) or handicap == SLOWDOWNS[-1]
            rows.append(Row(f"{handicap:.0%} slower", must, slower, said))
    return rows
