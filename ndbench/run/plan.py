"""The plan of a run: which repeats of which cells, in which order. Written before the first launch, read on resume.

Repeats of all cells are interleaved in rounds, shuffled by a seed, so that a slow drift of the machine hits all cells
alike and two runs of one suite follow the same order.
"""

from __future__ import annotations

import dataclasses
import datetime
import random
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndbench.config import Cell, GateConfig, cell_from_dict
from ndbench.results.store import UnreadableFile, read_json, write_json

PLAN_VERSION = 1


def new_run_name() -> str:
    """Sorts by time, and is unique even when two runs start in the same second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


def interleave(repeats: dict[str, int], seed: int) -> list[tuple[str, int]]:
    """(cell, repeat) in rounds: round k holds repeat k of every cell that has one, in an order drawn from the seed."""
    order: list[tuple[str, int]] = []
    generator = random.Random(seed)
    for repeat in range(max(repeats.values(), default=0)):
        names = [name for name, count in repeats.items() if repeat < count]
        generator.shuffle(names)
        order.extend((name, repeat) for name in names)
    return order


@dataclass(frozen=True)
class Plan:
    run: str
    suite: str
    overrides: list[str]
    cells: dict[str, Cell]
    repeats: dict[str, int]
    order: list[tuple[str, int]]
    gate: GateConfig
    baseline: str | None
    budget_seconds: float | None
    excluded: list[tuple[str, str]] = field(default_factory=list)
    """Points of the matrix a rule of the suite leaves out: (name, rule)."""
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    """Cells that cannot run here: (name, cell id, reason)."""
    unselected: list[tuple[str, str]] = field(default_factory=list)
    """Cells that ``cells=`` or ``shard=`` left out: (name, cell id)."""
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": PLAN_VERSION,
            "run": self.run,
            "suite": self.suite,
            "overrides": self.overrides,
            "repeats": self.repeats,
            "order": [list(entry) for entry in self.order],
            "gate": dataclasses.asdict(self.gate),
            "baseline": self.baseline,
            "budget_seconds": self.budget_seconds,
            "cells": [cell.to_dict() | {"cell_id": cell.cell_id} for cell in self.cells.values()],
            "excluded": [{"name": name, "reason": reason} for name, reason in self.excluded],
            "skipped": [{"name": name, "cell_id": key, "reason": reason} for name, key, reason in self.skipped],
            "unselected": [{"name": name, "cell_id": key} for name, key in self.unselected],
            "warnings": self.warnings,
        }

    def save(self, path: Path) -> None:
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Raises :class:`UnreadableFile` naming the file when it is not a plan of this version."""
        values = read_json(path)
        if not isinstance(values, dict) or values.get("schema_version") != PLAN_VERSION:
            version = values.get("schema_version") if isinstance(values, dict) else None
            raise UnreadableFile(f"cannot resume from {path}: plan version {version}, this ndbench has {PLAN_VERSION}")
        try:
            cells = [cell_from_dict({k: v for k, v in cell.items() if k != "cell_id"}) for cell in values["cells"]]
            return cls(
                run=values["run"],
                suite=values["suite"],
                overrides=values["overrides"],
                cells={cell.name: cell for cell in cells},
                repeats=values["repeats"],
                order=[(name, repeat) for name, repeat in values["order"]],
                gate=GateConfig(**values["gate"]),
                baseline=values["baseline"],
                budget_seconds=values["budget_seconds"],
                excluded=[(item["name"], item["reason"]) for item in values["excluded"]],
                skipped=[(item["name"], item["cell_id"], item["reason"]) for item in values["skipped"]],
                unselected=[(item["name"], item["cell_id"]) for item in values["unselected"]],
                warnings=values["warnings"],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnreadableFile(f"cannot resume from {path}: {error}") from error
