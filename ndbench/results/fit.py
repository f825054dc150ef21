"""Whether a run can become a reference: the reasons for which accepting refuses one, for whoever offers it as well.

Reads records and what is stored; writes nothing.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndbench.counted import counted
from ndbench.results.schema import Record
from ndbench.results.sessions import baseline_folder, holds_sessions, read_baseline
from ndbench.results.store import hardware_folder


def handicap_of(cell: Mapping[str, Any]) -> float:
    """The slowdown planted in a cell as a record describes it: ``measure.handicap`` where its name matches
    ``measure.handicap_cells``, else zero."""
    measure = cell.get("measure") or {}
    patterns = str(measure.get("handicap_cells") or "*").split(",")
    return float(measure.get("handicap") or 0.0) if any(fnmatch.fnmatchcase(cell["name"], p) for p in patterns) else 0.0


def unfit(records: Sequence[Record]) -> str | None:
    """Why the repeats of a cell cannot be a reference, else null: all must be ok, or all out of memory."""
    outcomes = sorted({record["outcome"] for record in records})
    if outcomes not in (["ok"], ["oom"]):
        bad = [record for record in records if record["outcome"] != "ok"]
        of = f"{len(bad)} of {counted(len(records), 'repeat')}"
        return f"{of} {bad[0]['outcome']}: {bad[0]['reason'] or 'no reason recorded'}"
    if handicap := max(handicap_of(record["cell"]) for record in records):
        return f"measure.handicap={handicap:g} was planted in it"
    broken = [record for record in records if record["steps"] and record["steps"]["nonfinite"]]
    if broken:
        return f"step {broken[0]['steps']['nonfinite'][0]} of repeat {broken[0]['repeat']} is not finite"
    for part in ("hardware", "software"):
        if any(record["fingerprint"][part] != records[0]["fingerprint"][part] for record in records):
            return f"its repeats were measured on different {part}"
    if any(record["cell_id"] != records[0]["cell_id"] for record in records):
        return "its repeats have different configurations"
    return None


def by_cell(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The launched repeats of each cell: one that was not launched, after one that ran out of memory, says nothing."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["outcome"] != "skipped":
            found.setdefault(record["cell"]["name"], []).append(record)
    return found


def hardware_key(records: Sequence[Record]) -> str:
    """Folder name of the hardware that a run was made for: its name and device count, such as ``cpu_x8``."""
    hardware = records[0]["cell"].get("hardware") or {}
    count = hardware.get("device_count") or max(record["world"]["size"] for record in records)
    return hardware_folder(hardware.get("name", "unknown"), count)


@dataclass(frozen=True)
class Standing:
    """How a run stands to the baseline that it would be accepted into."""

    refused: dict[str, str] = field(default_factory=dict)
    """Why, by cell, accepting would not take it."""
    accepted: tuple[str, ...] = ()
    """Cells that are in the baseline already, from this run."""
    session: Path | None = None
    """The folder that holds those."""
    problem: str | None = None
    """Why accepting would refuse whatever cell is named."""

    def takes(self, name: str) -> bool:
        """Whether accepting the cell would add something."""
        return self.problem is None and name not in self.refused and name not in self.accepted


def standing(records: Sequence[Record], results_dir: str | Path) -> Standing:
    """Of a run with these records, to the baseline below ``results_dir``."""
    if not records:
        return Standing(problem="no record: there is nothing to accept")
    cells = by_cell(records)
    refused = {name: why for name, group in cells.items() if (why := unfit(group)) is not None}
    folder = baseline_folder(results_dir, hardware_key(records), records[0]["suite"])
    try:
        sessions = read_baseline(folder).sessions if holds_sessions(folder) else []
    except ValueError as error:  # what accepting would say, too
        return Standing(refused, problem=str(error))
    own = next((session for session in sessions if session.session == records[0]["session"]), None)
    if own is None:
        return Standing(refused)
    return Standing(refused, tuple(sorted(set(own.cells) & set(cells))), folder / own.session)
