"""Records as a pandas frame, one row a repeat, and its Parquet export.

Reads files through ``store`` and ``baseline``; decides nothing.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndbench.results.schema import Record
from ndbench.results.store import UnreadableFile, read_json, read_record

if TYPE_CHECKING:
    import pandas


def load(path: str | Path, strict: bool = True) -> pandas.DataFrame:
    """One row a repeat, from a run folder, a baseline folder, a whole results folder (its runs), or a single file.

    Columns are the record's fields with their path joined by dots (``cell.name``, ``steps.loss``,
    ``metrics.tokens_per_second.value``), lists as lists; each metric's value also stands under its bare name
    (``tokens_per_second``). An unreadable file raises ``UnreadableFile`` or ``RecordError`` naming it; with
    ``strict=False`` it is left out with a warning that names it.
    """
    import pandas

    rows = [_row(record) for record in read_records(path, strict)]
    return pandas.DataFrame(rows)


def read_records(path: str | Path, strict: bool = True) -> list[Record]:
    """The records that :func:`load` makes rows of."""
    path = Path(path)
    files = _record_files(path)
    records: list[Record] = []
    for file in files:
        try:
            records += _records_of_file(file)
        except ValueError as error:
            if strict:
                raise
            warnings.warn(f"left out: {error}", stacklevel=3)
    return records


def _record_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UnreadableFile(f"cannot read {path}: there is no such file or folder")
    if (path / "records").is_dir():
        return sorted((path / "records").glob("*.json"))
    if (path / "runs").is_dir():
        return sorted((path / "runs").glob("*/records/*.json"))
    if (path / "session.json").is_file():
        return _cells_of_session(path)
    files = sorted(path.glob("*/records/*.json"))
    for session in sorted(path.rglob("session.json")):
        files += _cells_of_session(session.parent)
    return files or sorted(path.glob("*.json"))


def _cells_of_session(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.json") if file.name != "session.json")


def _records_of_file(file: Path) -> list[Record]:
    from ndbench.results.sessions import records_of_cell_file

    value = read_json(file)
    if isinstance(value, dict) and "repeats" in value:
        return records_of_cell_file(value, str(file))
    return [read_record(file)]


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {}
    _flatten(record, "", row)
    for name, entry in record["metrics"].items():
        row.setdefault(name, entry["value"])
    return row


def _flatten(value: dict[str, Any], prefix: str, row: dict[str, Any]) -> None:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            _flatten(item, f"{prefix}{key}.", row)
        else:
            row[prefix + key] = item


def to_parquet(path: str | Path, target: str | Path) -> Path:
    """Write the frame of :func:`load` as a Parquet file; objects and lists of objects become JSON text.

    Raises ``ValueError`` naming the extra to install when pyarrow is not there.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ValueError("Parquet needs pyarrow, which is not installed: pip install 'ndbench[parquet]'") from error
    frame = load(path)
    for name in frame.columns:
        if any(_is_nested(value) for value in frame[name]):
            frame[name] = [None if value is None else json.dumps(value) for value in frame[name]]
    frame.to_parquet(Path(target))
    return Path(target)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(x, dict | list) for x in value))
