"""The index of a checkpoint (which tensor lies where, and everything that is no tensor) and the marker of a whole one.

Both are JSON. The marker is written last and has the index's hash, the index has every file's checksums: each byte of
a checkpoint is accounted for. What is read here is judged, never trusted: a wrong file is a :class:`CheckpointError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ndbench.parallel.state_files import DTYPES, CheckpointError, names_file, overlap, refuse_irregular, write_bytes

FORMAT = 1
INDEX, MARKER = "checkpoint.json", "complete.json"
NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


Piece = tuple[str, tuple[int, ...], tuple[int, ...]]
"""File, offset and size of a part of a tensor."""


@dataclass(frozen=True)
class Stored:
    """A saved tensor: its global shape and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Index:
    """A checkpoint's index, read and checked."""

    folder: Path
    files: dict[str, dict[str, Any]]
    tensors: dict[str, Stored]
    rest: dict[str, Any]
    """``step``, ``mode``, ``degrees``, ``optimizer``, ``values``, ``random``, ``progress``."""


def merge(fragments: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks wrote, together: ``files``, ``tensors`` and the optimizer's plain ``values``."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for fragment in fragments:
        files |= fragment["files"]
        for name, tensor in fragment["tensors"].items():
            known = tensors.setdefault(name, {**tensor, "pieces": []})
            assert (known["dtype"], known["shape"]) == (tensor["dtype"], tensor["shape"]), name
            places = [piece[1] for piece in known["pieces"]]
            known["pieces"] += [piece for piece in tensor["pieces"] if piece[1] not in places]
        for name, value in fragment["values"].items():
            values.setdefault(name, {}).update(value)
    return {"files": files, "tensors": tensors, "values": values}


def write_index(folder: Path, content: dict[str, Any], serial: int) -> None:
    """Write the index, then the marker that makes the folder a checkpoint."""
    data = json.dumps({"format": FORMAT, **content}, allow_nan=False, separators=(",", ":")).encode()
    write_bytes(folder / INDEX, data)
    marker = {
        "format": FORMAT,
        "step": content["step"],
        "serial": serial,
        "index_bytes": len(data),
        "index_sha256": hashlib.sha256(data).hexdigest(),
    }
    write_bytes(folder / MARKER, json.dumps(marker).encode())


def read_index(folder: Path) -> Index:
    """The index of the checkpoint ``folder``. Raises :class:`CheckpointError` naming the file that is not right."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    path = folder / INDEX
    marker = _read_marker(folder)
    if marker is None:
        raise CheckpointError(f"{folder} is no whole checkpoint: {MARKER} is missing")
    refuse_irregular(path)
    with names_file(path):
        data = path.read_bytes()
    if (len(data), hashlib.sha256(data).hexdigest()) != (marker["index_bytes"], marker["index_sha256"]):
        raise CheckpointError(f"{path} is damaged: it is not what {MARKER} says was written")
    try:
        return _parse(folder, json.loads(data))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not the index of a checkpoint: {type(error).__name__} {error}") from error


def _parse(folder: Path, content: dict[str, Any]) -> Index:
    files = {str(name): dict(record) for name, record in content["files"].items()}
    for name, record in files.items():
        if Path(name).name != name or name.startswith("."):
            raise CheckpointError(f"{folder / INDEX} names the file '{name}', which is not in its folder")
        if not isinstance(record["bytes"], int) or not isinstance(record["checksums"], list):
            raise TypeError(f"{name} has no checksums")
    tensors = {}
    for name, item in content["tensors"].items():
        shape = _integers(item["shape"])
        pieces = tuple((str(file), _integers(offset), _integers(size)) for file, offset, size in item["pieces"])
        tensors[name] = Stored(DTYPES[item["dtype"]], shape, pieces)
        for file, offset, size in pieces:
            if file not in files:
                raise CheckpointError(f"{folder / INDEX} has no file '{file}', where a part of {name} should be")
            if any(a + b > c for a, b, c in zip(offset, size, shape, strict=True)):
                raise ValueError(f"a piece of {name} lies outside of it")
        if not _disjoint(pieces):
            raise ValueError(f"pieces of {name} overlap")
        found = sum(math.prod(size) for _, _, size in pieces)
        if found != math.prod(shape):
            raise CheckpointError(f"{folder / INDEX} has {found} of the {math.prod(shape)} elements of {name}")
    for name in tensors:
        if name.startswith("optimizer/"):
            content["values"][name.split("/", 2)[1]].items()
    rest = {key: content[key] for key in ("step", "mode", "degrees", "optimizer", "values", "random", "progress")}
    return Index(folder, files, tensors, rest)


def _disjoint(pieces: Sequence[Piece]) -> bool:
    """Do no two pieces share an element? In order of their first row, so that few are compared."""
    active: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: each[1]):
        _, offset, size = piece
        active = [each for each in active if not offset or each[1][0] + each[2][0] > offset[0]]
        if any(overlap(offset, size, *each[1:]) for each in active):
            return False
        active.append(piece)
    return True


def _integers(values: list[Any]) -> tuple[int, ...]:
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise TypeError(f"{values} is no shape")
    return tuple(values)


def _read_marker(folder: Path) -> dict[str, Any] | None:
    path = folder / MARKER
    refuse_irregular(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    try:
        marker = json.loads(data)
        version = marker["format"]
        if version == FORMAT:
            return {
                "serial": int(marker["serial"]),
                "step": int(marker["step"]),
                "index_bytes": int(marker["index_bytes"]),
                "index_sha256": str(marker["index_sha256"]),
            }
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not the marker of a checkpoint") from error
    raise CheckpointError(f"{path} has format {version!r}, this version reads {FORMAT}")


def whole_checkpoints(parent: Path, damaged: Callable[[CheckpointError], None] | None = None) -> list[tuple[int, Path]]:
    """The checkpoints in ``parent`` with the serial number they were completed as, oldest first.

    Only those that have their marker. One that cannot be read is given to ``damaged``; without it
    :class:`CheckpointError` is raised: which one is the newest is then not known.
    """
    if not parent.is_dir():
        return []
    found = []
    for folder in parent.iterdir():
        if not NAME.fullmatch(folder.name):
            continue
        try:
            marker = _read_marker(folder)
        except CheckpointError as error:
            if damaged is None:
                raise
            damaged(error)
            continue
        if marker is not None:
            found.append((marker["serial"], folder))
    return sorted(found)


def free_name(parent: Path, step: int) -> Path:
    """A folder for a checkpoint of ``step`` that does not exist yet: nothing is ever overwritten."""
    folder, again = parent / f"step-{step:08d}", 1
    while folder.exists():
        again += 1
        folder = parent / f"step-{step:08d}-{again}"
    return folder
