"""Files of records: written whole or not at all, read back exactly, never skipped in silence.

Knows folders and JSON. It does not know what a record means (``schema``), how a baseline is laid out (``baseline``)
or how two records compare.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndbench.counted import counted
from ndbench.results.plan_form import check_plan
from ndbench.results.schema import Record, migrate

MOST_DIGITS = 300
"""Of a whole number: a larger one is no float, and beyond some thousands Python reads none."""


class UnreadableFile(ValueError):
    """A file that should hold JSON of ours and does not: absent, empty, cut in half, or not JSON."""


def dumps(value: Any, where: str = "value") -> str:
    """JSON text with a line a field and a line a list of numbers; floats as their shortest exact form.

    Raises ``ValueError`` naming the place of a NaN or infinity, which JSON cannot hold.
    """
    return "".join(_pieces(value, "", where)) + "\n"


def _pieces(value: Any, indent: str, where: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}; JSON holds finite numbers and null only")
    nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(x, dict | list) for x in value))
    if not nested or not value:
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, float) and not math.isfinite(item):
                    raise ValueError(f"{where}[{index}] is {item}; JSON holds finite numbers and null only")
        yield json.dumps(value, allow_nan=False)
        return
    inner = indent + " "
    if isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            assert isinstance(key, str), f"{where} has a key that is not text: {key!r}"
            yield f"{',' if number else ''}\n{inner}{json.dumps(key)}: "
            yield from _pieces(item, inner, f"{where}.{key}")
        yield f"\n{indent}}}"
    else:
        yield "["
        for number, item in enumerate(value):
            yield f"{',' if number else ''}\n{inner}"
            yield from _pieces(item, inner, f"{where}[{number}]")
        yield f"\n{indent}]"


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as JSON so that ``path`` holds either its old content or all of the new, even after a power cut.

    Written to a temporary file of the same folder, fsynced, renamed, and the folder fsynced. Raises ``ValueError``
    for a non-finite number and ``OSError`` (naming ``path``) when the folder cannot be written or the disk is full.
    """
    path = Path(path)
    write_text(path, dumps(value, path.name))


def write_text(path: str | Path, text: str) -> None:
    """As :func:`write_json`, for text. A link is followed; what is no regular file (a device, a pipe) is refused."""
    path = Path(path)
    if path.is_symlink():
        path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, f"cannot write {path}: it is not a regular file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error


def refuse_results(folder: str | Path) -> None:
    """Raises ``ValueError`` when ``folder`` cannot become a results folder; makes and changes nothing."""
    path = Path(folder).absolute()
    try:
        existing = next(above for above in (path, *path.parents) if above.exists())
        reason = None if existing.is_dir() else f"{existing} is not a folder"
        if reason is None and not os.access(existing, os.W_OK | os.X_OK):
            reason = f"no right to write in {existing}"
    except OSError as error:
        reason = str(error.strerror)
    if reason is not None:
        raise ValueError(f"results folder {path} cannot be written: {reason}")


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_text(path: str | Path) -> str:
    """The text in ``path``; raises :class:`UnreadableFile` naming the file. A pipe or a device would be waited for."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise UnreadableFile(f"cannot read {path}: it is not a regular file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFile(f"cannot read {path}: {error}") from error


def read_json(path: str | Path) -> Any:
    """The JSON value in ``path``; raises :class:`UnreadableFile` naming the file and what is wrong with it."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> Any:
    """As :func:`read_json`, for text that came from ``where``."""
    if not text.strip():
        raise UnreadableFile(f"cannot read {where}: the file is empty")
    try:
        return json.loads(
            text,
            parse_constant=lambda name: _refuse(f"{name}, which is not JSON", where),
            parse_int=lambda digits: _whole(digits, where),
        )
    except RecursionError as error:
        raise UnreadableFile(f"cannot read {where}: it is nested too deeply") from error
    except json.JSONDecodeError as error:
        cut = " (it looks cut off)" if error.pos >= len(text.rstrip()) - 1 else ""
        raise UnreadableFile(f"cannot read {where}: not JSON at line {error.lineno}, {error.msg}{cut}") from error


def _refuse(what: str, where: str) -> Any:
    raise UnreadableFile(f"cannot read {where}: it holds {what}")


def _whole(digits: str, where: str) -> int:
    if len(digits) > MOST_DIGITS:
        _refuse(f"a whole number of {len(digits)} digits", where)
    return int(digits)


def read_record(path: str | Path) -> Record:
    """The validated, migrated record in ``path``; raises ``UnreadableFile`` or ``RecordError`` naming the file."""
    return migrate(read_json(path), str(path))


def hardware_folder(name: str, count: int) -> str:
    """Folder of the baselines of ``count`` devices of a hardware file: ``cpu_x8``; h100_x8 with 4 is ``h100_x4``."""
    return f"{re.sub(r'_x[0-9]+$', '', name)}_x{count}"


_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+@-]*")


def check_name(name: str, what: str = "cell name") -> str:
    """``name`` when it can be a file name on every machine; raises ``ValueError`` otherwise."""
    if not _SAFE_NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} cannot be a file name: use letters, digits and _ . , = + @ -")
    return name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, wherever it lies: ``<results.dir>/runs/<run>/`` or an unpacked CI artifact."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @classmethod
    def create(cls, results_dir: str | Path, run: str) -> RunFolder:
        """A new folder for ``run``; raises ``FileExistsError`` when another run has the name already."""
        folder = cls(Path(results_dir) / "runs" / check_name(run, "run"))
        folder.path.parent.mkdir(parents=True, exist_ok=True)
        folder.path.mkdir()
        folder.records_dir.mkdir()
        return folder

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def verdict_path(self) -> Path:
        return self.path / "verdict.json"

    @property
    def has_verdict(self) -> bool:
        """Whether there is one, readable or not."""
        return self.verdict_path.exists()

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.md"

    @property
    def records_dir(self) -> Path:
        return self.path / "records"

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as plain data; raises ``ValueError`` naming the file, and what in it is not as it must be."""
        return check_plan(read_json(self.plan_path), str(self.plan_path))

    @property
    def has_plan(self) -> bool:
        """Whether there is one, readable or not."""
        return self.plan_path.exists()

    def record_path(self, cell: str, repeat: int) -> Path:
        return self.records_dir / f"{check_name(cell)}.r{repeat}.json"

    def log_dir(self, cell: str, repeat: int) -> Path:
        return self.path / "logs" / f"{check_name(cell)}.r{repeat}"

    def profile_dir(self, cell: str, repeat: int) -> Path:
        """Traces of a profiled step, one a rank (``rank<i>.json.gz``), and ``breakdown.json``."""
        return self.path / "profiles" / f"{check_name(cell)}.r{repeat}"

    def write_record(self, record: Record) -> Path:
        """Store a record under its cell and repeat; atomic, so a reader never sees half of it."""
        path = self.record_path(record["cell"]["name"], record["repeat"])
        write_json(path, record)
        return path

    def records(self) -> list[Record]:
        """Every record of the run, ordered by cell and repeat; an unreadable one is an error naming its file."""
        shared: dict[str, Any] = {}
        records = [_share(read_record(path), shared) for path in sorted(self.records_dir.glob("*.json"))]
        return sorted(records, key=lambda record: (record["cell"]["name"], record["repeat"]))


@dataclass(frozen=True)
class PairsFolder(RunFolder):
    """The folder of an A/B, ``<results.dir>/ab/<run>/``: its verdict is of both sides, its plan and records are the
    head's, as a comparison has them."""

    @property
    def plan_path(self) -> Path:
        return self.path / "head" / "plan.json"

    @property
    def records_dir(self) -> Path:
        return self.path / "head" / "records"

    @property
    def pairs(self) -> dict[str, Any]:
        """The content of ``pairs.json``; empty when the A/B was killed before it could write one."""
        path = self.path / "pairs.json"
        found = read_json(path) if path.is_file() else {}
        return found if isinstance(found, dict) else {}


def _share(record: Record, shared: dict[str, Any]) -> Record:
    """Let equal cell descriptions and fingerprints be one object: thousands of records then fit in little memory."""
    for key in ("cell", "fingerprint"):
        record[key] = shared.setdefault(json.dumps(record[key], sort_keys=True), record[key])
    return record


MOST_NAMED = 5
"""Runs that an error names."""


def find_run(name: str | Path, results_dir: str | Path = "results", *, pairs: bool = False) -> RunFolder:
    """The run meant by a path, a run's name, the beginning of one that only one run has, or ``latest``.

    With ``pairs`` also an A/B, which can be looked at, but neither accepted nor resumed. Raises ``ValueError`` naming
    the runs there are.
    """
    if Path(name).is_dir():
        return _checked_run(Path(name), pairs)
    runs = Path(results_dir) / "runs"
    folders = [*_folders(runs), *(_folders(Path(results_dir) / "ab") if pairs else ())]
    found = {folder.name: folder for folder in sorted(folders, key=lambda folder: folder.name)}
    known = list(found)
    if str(name) == "latest" and known:
        return _run_at(found[known[-1]])
    matching = [run for run in known if run.startswith(str(name))]
    if len(matching) == 1:
        return _run_at(found[matching[0]])
    if len(matching) > 1:
        listed = f"the latest {MOST_NAMED} are " if len(matching) > MOST_NAMED else ""
        listed += ", ".join(matching[-MOST_NAMED:])
        raise ValueError(f"'{name}' is the beginning of {len(matching)} runs: {listed}")
    listed = f"the latest are {', '.join(known[-MOST_NAMED:])}" if known else "there are none"
    many = counted(len(known), "run")
    raise ValueError(f"no run '{name}': it is not a folder, and not among the {many} in {runs} ({listed})")


def _folders(parent: Path) -> list[Path]:
    return [folder for folder in parent.iterdir() if folder.is_dir()] if parent.is_dir() else []


def _run_at(path: Path) -> RunFolder:
    return PairsFolder(path) if path.parent.name == "ab" else RunFolder(path)


def _checked_run(path: Path, pairs: bool) -> RunFolder:
    if pairs and (path / "head" / "plan.json").is_file():
        return PairsFolder(path)
    if (path / "plan.json").exists() or (path / "records").is_dir():
        return RunFolder(path)
    inside = [plan.parent for plan in sorted(path.glob("*/plan.json"))]  # an artifact often has one folder around it
    if len(inside) == 1:
        return RunFolder(inside[0])
    raise ValueError(
        f"{path} is not a run folder: it has neither plan.json nor records/, and {counted(len(inside), 'run')} in it"
    )
