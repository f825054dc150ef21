"""What may be compared with what, decided per metric from the records' own words.

Time and device memory need equal hardware; structure, FLOPs and tracked CPU memory need only the same cell; a host's
name or another software never makes anything incomparable, it is named instead. Decides nothing about size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ndbench.config import IDENTITY_GROUPS
from ndbench.results.schema import Record
from ndbench.results.sessions import MAX_SESSIONS, Baseline, Session


@dataclass(frozen=True)
class Reference:
    """The sessions of one cell that a run's repeats can be compared with, oldest first."""

    name: str
    """The cell's name in the baseline."""
    sessions: list[tuple[Session, list[Record]]]
    """Same configuration and same definition of the measurement, since the level last changed on purpose. Only the
    repeats that can be compared with: the ``ok`` ones, or the ``oom`` ones of a cell that did not fit."""
    timed: list[tuple[Session, list[Record]]]
    """The ``ok`` ones of the same hardware."""
    oldest: tuple[Session, list[Record]] | None
    """The oldest accepted session of the same cell and hardware, across changes of level: for drift."""
    problem: str | None = None
    """Why there is no session, in one sentence."""

    @property
    def latest(self) -> list[Record]:
        return self.sessions[-1][1]


def find_cell(name: str, cell_id: str, baseline: Baseline, planned: set[str]) -> str | None:
    """The baseline's name of a cell: its own, or that of a cell with the same configuration that the plan lacks."""
    known = baseline.cells
    if known.get(name) == cell_id:
        return name
    for other, other_id in known.items():
        if other_id == cell_id and other not in planned:
            return other
    return name if name in known else None


def reference(head: Record, name: str, baseline: Baseline) -> Reference:
    """The comparable sessions for a cell of which ``head`` is any repeat."""
    everything = [(session, usable(session.cells[name])) for session in baseline.history(name)]
    everything = [(session, group) for session, group in everything if group]
    if not everything:
        return Reference(name, [], [], None, "no repeat of the baseline ran to its end")
    level = {session.session for session in baseline.segment(name, limit=len(everything))}
    alike = [(session, group) for session, group in everything if _same_definition(group[0], head)]
    same = [(session, group) for session, group in alike if session.session in level]
    hardware = head["fingerprint"]["hardware"]
    comparable = [
        (session, group)
        for session, group in alike
        if group[0]["outcome"] == "ok" and group[0]["fingerprint"]["hardware"] == hardware
    ]
    timed = [(session, group) for session, group in comparable if session.session in level]
    problem = None if same else _definition_change(everything[-1][1][0], head, baseline.accepted)
    return Reference(name, same[-MAX_SESSIONS:], timed[-MAX_SESSIONS:], comparable[0] if comparable else None, problem)


def usable(records: Sequence[Record]) -> list[Record]:
    """The repeats of one session that a head can be compared with: oom where any is, else ok, else none."""
    return [r for r in records if r["outcome"] == "oom"] or [r for r in records if r["outcome"] == "ok"]


def _same_definition(a: Record, b: Record) -> bool:
    return (a["cell_id"], a["cell_version"]) == (b["cell_id"], b["cell_version"])


def _definition_change(base: Record, head: Record, accepted: bool) -> str:
    advice = "; accept a new baseline" if accepted else ""
    if base["cell_id"] == head["cell_id"]:
        return (
            f"the definition of the measurement changed (cell_version {base['cell_version']} → "
            f"{head['cell_version']}), so its figures cannot be compared{advice}"
        )
    changes = [
        change
        for group in IDENTITY_GROUPS
        for change in differences(_flat(group, base["cell"].get(group)), _flat(group, head["cell"].get(group)))
    ]
    return f"the cell is configured differently now ({shorten(changes) or 'cell_id differs'}){advice}"


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {key: item for name, inner in value.items() for key, item in _flat(f"{prefix}.{name}", inner).items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """``torch 2.11.0 → 2.13.0`` for every key whose value changed, appeared or went."""
    return [
        f"{key} {_said(before.get(key))} → {_said(after.get(key))}"
        for key in [*before, *(key for key in after if key not in before)]
        if before.get(key) != after.get(key)
    ]


def _said(value: Any) -> str:
    return "none" if value is None else str(value)[:60]


def shorten(changes: list[str], most: int = 4) -> str:
    """The first few changes in one line, and how many more there are."""
    rest = f" and {len(changes) - most} more" if len(changes) > most else ""
    return ", ".join(changes[:most]) + rest


def hardware_changes(base: Record, head: Record) -> list[str]:
    return differences(
        _flat_part(base["fingerprint"]["hardware"]),
        _flat_part(head["fingerprint"]["hardware"]),
    )


def software_changes(base: Record, head: Record) -> list[str]:
    """What is different about the software, in words: the verdict stands and names it."""
    return differences(
        _flat_part(base["fingerprint"]["software"]),
        _flat_part(head["fingerprint"]["software"]),
    )


def _flat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in part.items():
        flat |= _flat(key, value)
    return flat


def code_change(base: Record, head: Record) -> str | None:
    """``commit abc → def`` when the code under test differs or may (uncommitted or unknown code); else null."""
    before, after = base["code"], head["code"]
    if before["commit"] is None and after["commit"] is None:
        return "no commit is known on either side, so the code may differ"
    if before == after and after["dirty"] is False:
        return None
    if before["commit"] == after["commit"]:
        if not before["dirty"] and not after["dirty"]:
            return f"whether {(after['commit'] or 'unknown')[:10]} had uncommitted changes is not known"
        return f"uncommitted changes on {(after['commit'] or 'unknown')[:10]}"
    return f"commit {_commit(before)} → {_commit(after)}"


def _commit(code: Mapping[str, Any]) -> str:
    return f"{(code['commit'] or 'unknown')[:10]}{' (dirty)' if code['dirty'] else ''}"


def is_accelerator(record: Record) -> bool:
    """Whether the cell ran on a GPU; memory and the gate's defaults depend on it."""
    return bool((record["cell"].get("hardware") or {}).get("device", "cpu") != "cpu")
