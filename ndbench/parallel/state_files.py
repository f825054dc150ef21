"""Tensors in safetensors files, with checksums, written so that a crash at any moment leaves whole files or none.

A file is written as a stream, one tensor at a time, so a shard is never held in memory a second time. Its header also
says where each tensor lies in the global one, in the words of torch.distributed.checkpoint's Hugging Face reader,
which can therefore read a folder of ours too. Nothing is ever pickled. It knows nothing of models or of ranks.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BLOCK_BYTES = 64 * 2**20
"""A checksum covers this many bytes of a file, so that many ranks can check one file."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of the safetensors format."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class CheckpointError(ValueError):
    """What is wrong with a checkpoint, in one line that names the file or folder."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: a piece of the global tensor ``name``, beginning at ``offset``."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


def in_file_order(entries: Sequence[Entry]) -> list[Entry]:
    """Wide dtypes first, so that every tensor of a file begins at a multiple of its own item size."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


class TensorFile:
    """A safetensors file being written: first all ``entries`` are announced, then their tensors follow in that order.

    ``offsets=False`` leaves out where the pieces lie, for files that hold whole tensors only. After :meth:`close` the
    file is on the disk, and :attr:`record` has its size and checksums.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], offsets: bool = True) -> None:
        self.path, self._entries = path, list(entries)
        self._next, self._bytes, self._checksums = 0, 0, list[int]()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        if offsets:
            places = {entry.name: {"saved_offsets": list(entry.offset)} for entry in entries}
            header["__metadata__"] |= {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"}
        start = 0
        for entry in entries:
            assert entry.name not in header, f"{entry.name} twice in {path.name}"
            place = [start, start + entry.bytes]
            header[entry.name] = {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": list(entry.size),
                "data_offsets": place,
            }
            start = place[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with names_file(path):
            self._file = path.open("xb", buffering=0)
        self._put(memoryview(struct.pack("<Q", len(text)) + text))

    def close(self) -> None:
        """After the last tensor: bring the file to the disk."""
        assert self._next == len(self._entries), (self.path.name, self._next, len(self._entries))
        with names_file(self.path), self._file:
            os.fsync(self._file.fileno())

    def write(self, tensor: torch.Tensor) -> None:
        """The tensor of the next entry, from any device."""
        entry = self._entries[self._next]
        assert tensor.dtype == entry.dtype, (entry, tensor.dtype)
        assert tuple(tensor.shape) == entry.size, (entry, tensor.shape)
        self._next += 1
        if tensor.numel():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._put(memoryview(raw.numpy()))  # type: ignore[arg-type]

    def _put(self, data: memoryview) -> None:
        while len(data):
            room = BLOCK_BYTES - self._bytes % BLOCK_BYTES
            part, data = data[:room], data[room:]
            if room == BLOCK_BYTES:
                self._checksums.append(0)
            self._checksums[-1] = zlib.crc32(part, self._checksums[-1])
            self._bytes += len(part)
            with names_file(self.path):
                while len(part):
                    part = part[self._file.write(part) :]

    @property
    def record(self) -> dict[str, Any]:
        """``bytes`` of the file and the CRC-32 of each of its blocks."""
        return {"bytes": self._bytes, "checksums": self._checksums}


class FileSeries:
    """Several files (name, entries) written one after the other from one stream of tensors."""

    def __init__(self, folder: Path, files: Sequence[tuple[str, Sequence[Entry]]], offsets: bool = True) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self._folder, self._offsets = folder, offsets
        self._coming = [(name, list(entries)) for name, entries in files]
        self._file: TensorFile | None = None
        self._left = 0

    def write(self, tensor: torch.Tensor) -> None:
        """The next tensor; the file is on the disk when its last one was given."""
        if self._file is None:
            name, entries = self._coming.pop(0)
            self._file, self._left = TensorFile(self._folder / name, entries, self._offsets), len(entries)
        self._file.write(tensor)
        self._left -= 1
        if not self._left:
            self._file.close()
            self.records[self._file.path.name] = self._file.record
            self._file = None


def check_block(path: Path, record: dict[str, Any], block: int) -> None:
    """Raise :class:`CheckpointError` unless the bytes of that block are those that were written."""
    refuse_irregular(path)
    start = block * BLOCK_BYTES
    stop = min(start + BLOCK_BYTES, record["bytes"])
    checksum = 0
    with names_file(path), path.open("rb", buffering=0) as file:
        if (held := os.fstat(file.fileno()).st_size) != record["bytes"]:
            raise CheckpointError(f"{path} has {held} bytes, {record['bytes']} were written")
        file.seek(start)
        buffer = memoryview(bytearray(min(8 * 2**20, max(stop - start, 1))))
        left = stop - start
        while left:
            count = file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                raise CheckpointError(f"{path} ends {left} bytes early")
            checksum = zlib.crc32(buffer[:count], checksum)
            left -= count
    if checksum != record["checksums"][block]:
        raise CheckpointError(f"{path} is damaged: bytes {start} to {stop} are not those that were written")


def blocks(record: dict[str, Any]) -> range:
    """The indices of a file's blocks."""
    return range(-(-record["bytes"] // BLOCK_BYTES))


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """A whole small file on the disk, which others see at once or not at all; returns its record."""
    draft = path.with_name(f"{path.name}.part")
    with names_file(path):
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    starts = range(0, len(data), BLOCK_BYTES)
    return {"bytes": len(data), "checksums": [zlib.crc32(data[start : start + BLOCK_BYTES]) for start in starts]}


def sync_folder(folder: Path) -> None:
    """What was created in, renamed in or removed from ``folder`` survives a power failure."""
    with names_file(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a folder; under another name first, so that a half deleted one is never taken for a checkpoint."""
    with names_file(folder):
        if not folder.name.startswith("."):
            folder = folder.rename(folder.with_name(f".{folder.name}.removed"))
        shutil.rmtree(folder)


def overlap(
    offset: Sequence[int], size: Sequence[int], other_offset: Sequence[int], other_size: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...], int] | None:
    """Where two boxes meet, as slices of the first and of the second, and the number of elements; None if nowhere."""
    mine, theirs, count = [], [], 1
    for a, length, b, other_length in zip(offset, size, other_offset, other_size, strict=True):
        start, stop = max(a, b), min(a + length, b + other_length)
        if stop <= start:
            return None
        mine.append(slice(start - a, stop - a))
        theirs.append(slice(start - b, stop - b))
        count *= stop - start
    return tuple(mine), tuple(theirs), count


def refuse_irregular(path: Path) -> None:
    """Raise :class:`CheckpointError` for a pipe or a device, of which reading has no end."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file")


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """An ``OSError`` inside becomes a :class:`CheckpointError` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
