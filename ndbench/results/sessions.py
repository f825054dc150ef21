"""Reading a baseline: accepted sessions, oldest first, each with the records of its cells.

A baseline is a folder ``<hardware>/<suite>/<session>/`` with one file a cell and a ``session.json`` that says who
accepted it, when and why. It may also come from a git revision or from the folder of a run. Anything unreadable is an
error: a baseline that silently shrank would let every regression through.
"""

from __future__ import annotations

import functools
import io
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from ndbench.results.checks import RecordError
from ndbench.results.schema import SCHEMA_VERSION, Record, check_version, migrate
from ndbench.results.store import RunFolder, UnreadableFile, parse_json, read_text

MAX_SESSIONS = 8
"""Sessions of a cell that a comparison uses: the latest ones since its level was last accepted as changed."""

SHARED_FIELDS = ("run", "session", "suite", "cell", "cell_id", "cell_version", "fingerprint", "world")
"""Fields that all repeats of a cell have in common in one session: stored once."""


@dataclass(frozen=True)
class Session:
    """One accepted run, or the cells of it that were accepted."""

    session: str
    accepted: str
    """ISO-8601 UTC."""
    by: str | None
    reason: str
    commit: str | None
    dirty: bool | None
    cells: dict[str, list[Record]]
    restarted: tuple[str, ...] = ()
    """Cells whose level changed on purpose here: earlier sessions of them are no longer compared with."""
    improved: tuple[str, ...] = ()
    """Cells found faster or smaller than the sessions before; two such sessions in a row start a new level."""
    retired: tuple[str, ...] = ()
    """Cells that left the suite on purpose here."""

    def age_days(self, now: datetime | None = None) -> float:
        """Days since it was accepted."""
        moment = now or datetime.now(UTC)
        return (moment - datetime.fromisoformat(self.accepted)).total_seconds() / 86400


@dataclass(frozen=True)
class Baseline:
    """Accepted sessions in the order they were accepted; none means that there is no baseline."""

    source: str
    sessions: list[Session] = field(default_factory=list)
    accepted: bool = True
    """False for a run that stands in for a baseline: nothing can be accepted into it."""

    @functools.cached_property
    def cells(self) -> dict[str, str]:
        """``cell_id`` by name of every cell that is part of the baseline today (not retired since)."""
        found: dict[str, str] = {}
        for session in self.sessions:
            for name in session.retired:
                found.pop(name, None)
            for name, records in session.cells.items():
                found[name] = records[0]["cell_id"]
        return found

    def history(self, cell: str) -> list[Session]:
        """Every session that holds the cell, oldest first, since it was last retired."""
        held: list[Session] = []
        for session in self.sessions:
            if cell in session.retired:
                held = []
            if cell in session.cells:
                held.append(session)
        return held

    def segment(self, cell: str, limit: int = MAX_SESSIONS) -> list[Session]:
        """The latest sessions of the cell at its present level, oldest first.

        The level starts anew where a change was accepted on purpose, and at the first of two consecutive sessions
        that were both found improved (one alone may be luck).
        """
        held = self.history(cell)
        start = 0
        for index, session in enumerate(held):
            if cell in session.restarted:
                start = index
            elif index and cell in session.improved and cell in held[index - 1].improved and start < index - 1:
                start = index - 1
        return held[start:][-limit:]


def read_baseline(
    source: str | Path | None,
    *,
    hardware: str | None = None,
    suite: str | None = None,
    results_dir: str | Path = "results",
    cwd: str | Path = ".",
) -> Baseline:
    """The baseline at ``source``; the default place when it is null, where an absent folder means "none yet".

    ``source`` is a folder (of one suite, of one session, of a run, or one that holds ``<hardware>/<suite>``), or
    ``git:REF`` or ``git:REF:FOLDER``, which reads the default place (or FOLDER) as it was committed at REF, or
    ``wandb:ENTITY/PROJECT/NAME:ALIAS``, an artifact that ``ndbench wandb push`` sent. Raises
    ``ValueError`` when a named source is absent, or any file in it is unreadable.
    """
    if source is not None and str(source).startswith("wandb:"):
        from ndbench.results.wandb_source import from_wandb

        return from_wandb(str(source), hardware=hardware, suite=suite)
    default = baseline_folder(results_dir, hardware or "*", suite or "*")
    if source is not None and str(source).startswith("git:"):
        return _from_git(str(source), default, hardware, suite, Path(cwd))
    folder = default if source is None else Path(source)
    if not folder.is_dir():
        if source is None:
            return Baseline(str(folder))
        raise ValueError(
            f"baseline {source} is not a folder (a folder, git:REF or wandb:ENTITY/PROJECT/NAME:ALIAS is expected)"
        )
    if (folder / "plan.json").exists():
        return baseline_of_run(RunFolder(folder))
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.json"))}
    # names with a leading dot are sessions in the middle of being written or removed
    texts = {name: read_text(path) for name, path in files.items() if not name.startswith(".") and "/." not in name}
    return _baseline(texts, str(folder), hardware, suite, required=source is not None)


def holds_sessions(folder: Path) -> bool:
    """Whether anything was ever stored in a suite's folder: what lacks its ``session.json`` is damaged, not absent."""
    return any("/." not in path.as_posix() for path in folder.glob("*/*.json"))


def stored_suites(root: Path) -> list[Path]:
    """Folders ``<hardware>/<suite>`` below ``root`` that hold sessions, damaged ones included."""
    found = {path.parent.parent for path in root.glob("*/*/*/*.json")}
    return sorted(
        f for f in found if not any(part.startswith(".") for part in f.relative_to(root).parts) and holds_sessions(f)
    )


def baseline_folder(results_dir: str | Path, hardware: str, suite: str) -> Path:
    """``<results.dir>/baselines/<hardware>/<suite>``."""
    return Path(results_dir) / "baselines" / hardware / suite


def _from_git(source: str, default: Path, hardware: str | None, suite: str | None, cwd: Path) -> Baseline:
    ref, _, given = source.removeprefix("git:").partition(":")
    if not ref or ref.startswith("-"):
        raise ValueError(f"baseline '{source}' names no revision: git:REF or git:REF:FOLDER is expected")
    folder = given or default.as_posix()
    revision = _git(cwd, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if revision is None:
        raise ValueError(f"baseline '{source}': git knows no commit '{ref}' here")
    tree = revision.decode().strip()
    top = Path((_git(cwd, "rev-parse", "--show-toplevel") or b"").decode().strip())
    absolute = (cwd / folder).resolve()
    if not absolute.is_relative_to(top.resolve()):
        raise ValueError(f"baseline '{source}': {absolute} is outside the repository {top}")
    inside = absolute.relative_to(top.resolve()).as_posix()
    archive = _git(top, "archive", "--format=tar", f"{tree}:{inside}" if inside != "." else tree)
    if archive is None:
        if given:
            raise ValueError(f"baseline '{source}': there is no folder {inside} at {tree[:12]}")
        return Baseline(f"git:{ref}:{inside} ({tree[:12]})")
    texts: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() and member.name.endswith(".json") else None
            if stream is not None:
                texts[member.name] = stream.read().decode("utf-8", errors="replace")
    return _baseline(texts, f"git:{ref}:{inside} ({tree[:12]})", hardware, suite, required=bool(given))


def _git(cwd: Path, *arguments: str) -> bytes | None:
    """What a git command printed, or null when it failed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, check=False, timeout=60)
    except FileNotFoundError as error:
        raise ValueError("baseline=git:REF needs the git program, which is not installed") from error
    return done.stdout if done.returncode == 0 else None


def _baseline(
    texts: Mapping[str, str], source: str, hardware: str | None, suite: str | None, required: bool
) -> Baseline:
    """A baseline from the texts of its JSON files, by path below the folder with ``/`` between the parts."""
    folders = {str(PurePosixPath(name).parent) for name in texts if PurePosixPath(name).name == "session.json"}
    _refuse_headless(texts, folders, source)
    below = f"{hardware}/{suite}/"
    if any(folder.startswith(below) for folder in folders):
        folders = {folder for folder in folders if folder.startswith(below)}
    elif suite and any(folder.startswith(f"{suite}/") for folder in folders):
        folders = {folder for folder in folders if folder.startswith(f"{suite}/")}
    elif len({str(PurePosixPath(folder).parent) for folder in folders}) > 1:
        listed = ", ".join(sorted({str(PurePosixPath(folder).parent) for folder in folders}))
        raise ValueError(f"baseline {source} holds several baselines ({listed}) but none for {below.rstrip('/')}")
    if required and not folders:
        raise ValueError(f"baseline {source} holds no session.json: no session was ever accepted there")
    sessions = [_session(texts, folder, source) for folder in sorted(folders)]
    return Baseline(source, sorted(sessions, key=lambda session: (session.accepted, session.session)))


def _refuse_headless(texts: Mapping[str, str], folders: set[str], source: str) -> None:
    """A session whose ``session.json`` is gone would be no session, and its cells would pass for never measured."""
    suites = {PurePosixPath("."), *(PurePosixPath(folder).parent for folder in folders)}
    for name in sorted(texts):
        folder = PurePosixPath(name).parent
        if str(folder) not in folders and folder.name and folder.parent in suites:
            raise UnreadableFile(f"cannot read {source}: {folder} holds {name} but no session.json")


def _session(texts: Mapping[str, str], folder: str, source: str) -> Session:
    prefix = "" if folder == "." else f"{folder}/"
    where = f"{source}/{prefix}session.json"
    head = parse_session(parse_json(texts[f"{prefix}session.json"], where), where)
    cells: dict[str, list[Record]] = {}
    for name in head["cells"]:
        file = f"{prefix}{name}.json"
        if file not in texts:
            raise UnreadableFile(f"cannot read {source}/{file}: session.json lists the cell but the file is not there")
        cells[name] = records_of_cell_file(parse_json(texts[file], f"{source}/{file}"), f"{source}/{file}")
    return Session(
        session=head["session"],
        accepted=head["accepted"],
        by=head.get("by"),
        reason=head["reason"],
        commit=head.get("commit"),
        dirty=head.get("dirty"),
        cells=cells,
        restarted=tuple(head.get("restarted", ())),
        improved=tuple(head.get("improved", ())),
        retired=tuple(head.get("retired", ())),
    )


def parse_session(head: Any, where: str) -> dict[str, Any]:
    """The content of a ``session.json`` when it is whole; raises ``RecordError`` naming what is not."""
    if not isinstance(head, dict):
        raise RecordError(f"{where} is not a session: an object is expected")
    check_version(head.get("schema_version", SCHEMA_VERSION), where)
    for key, kind in (("session", str), ("accepted", str), ("reason", str), ("cells", list)):
        if not isinstance(head.get(key), kind):
            raise RecordError(f"{where} lacks {key} (or it is not a {kind.__name__})")
    try:
        aware = datetime.fromisoformat(head["accepted"]).tzinfo is not None
    except ValueError as error:
        raise RecordError(f"{where}: accepted is {head['accepted']!r}, not an ISO-8601 time") from error
    if not aware:
        raise RecordError(f"{where}: accepted is {head['accepted']!r}, which has no time zone")
    return head


def records_of_cell_file(value: Any, where: str) -> list[Record]:
    """The records in a baseline's cell file (shared fields once, the rest a repeat), validated and migrated."""
    if not isinstance(value, dict) or not isinstance(value.get("repeats"), list) or not value["repeats"]:
        raise RecordError(f"{where} is not a cell of a baseline: it holds no repeats")
    shared = {key: item for key, item in value.items() if key != "repeats"}
    return [
        migrate({**shared, **repeat} if isinstance(repeat, dict) else repeat, f"{where} repeat {index}")
        for index, repeat in enumerate(value["repeats"])
    ]


def cell_file(records: list[Record]) -> dict[str, Any]:
    """Inverse of :func:`records_of_cell_file`. Informational parts of the fingerprint are those of the first repeat."""
    first = records[0]
    shared = {"schema_version": SCHEMA_VERSION} | {key: first[key] for key in SHARED_FIELDS}
    return {**shared, "repeats": [{k: v for k, v in record.items() if k not in shared} for record in records]}


def baseline_of_run(run: RunFolder, records: list[Record] | None = None) -> Baseline:
    """A run as a baseline of one session, for comparing two runs."""
    by_cell: dict[str, list[Record]] = {}
    for record in run.records() if records is None else records:
        by_cell.setdefault(record["cell"]["name"], []).append(record)
    if not by_cell:
        raise ValueError(f"{run.path} holds no record: there is nothing to compare with")
    first = min((r for group in by_cell.values() for r in group), key=lambda record: record["start"])
    name = first["run"]
    session = Session(
        session=name,
        accepted=_aware(max(r["end"] for group in by_cell.values() for r in group)),
        by=None,
        reason=f"run {name}",
        commit=first["code"]["commit"],
        dirty=first["code"]["dirty"],
        cells=by_cell,
    )
    return Baseline(f"run {name}", [session], accepted=False)


def _aware(moment: str) -> str:
    parsed = datetime.fromisoformat(moment)
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).isoformat()
