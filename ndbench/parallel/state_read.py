"""Reading slices: a rank takes from the files just the parts of tensors that it holds, whoever wrote them.

Files are opened by the safetensors library alone, which reads a header and raw numbers and never runs anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ndbench.parallel.state_files import DTYPE_NAMES, CheckpointError, names_file, overlap
from ndbench.parallel.state_index import Stored
from ndbench.parallel.state_pieces import Piece


class Slices:
    """The tensors of the safetensors files in ``folder``, by slice; files stay open until :meth:`close`."""

    def __init__(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        self.folder, self.tensors = folder, tensors
        self.bytes_read = 0
        self._open: dict[str, Any] = {}

    def read(self, piece: Piece, name: str | None = None) -> None:
        """Fill ``piece.tensor`` from the stored tensor of its name, or of ``name``."""
        name = name or piece.entry.name
        stored = self.tensors[name]
        found = 0
        with torch.no_grad():
            for file, offset, size in stored.pieces:
                meet = overlap(piece.entry.offset, piece.entry.size, offset, size)
                if meet is None:
                    continue
                mine, theirs, count = meet
                values = self._slice(file, name, size, theirs)
                piece.tensor[mine].copy_(values)
                self.bytes_read += values.nbytes
                found += count
        if found != math.prod(piece.entry.size):
            raise CheckpointError(f"{self.folder} has {found} of {math.prod(piece.entry.size)} elements of {name}")

    def check(self, file: str) -> None:
        """Raise :class:`CheckpointError` unless ``file`` has all pieces that it should have, in their shapes."""
        for name, stored in self.tensors.items():
            for where, _, size in stored.pieces:
                if where == file:
                    self._lazy(file, name, size)

    def _lazy(self, file: str, name: str, size: tuple[int, ...]) -> Any:
        path = self.folder / file
        try:
            with names_file(path):
                if file not in self._open:
                    self._open[file] = safe_open(path, framework="pt")
                lazy = self._open[file].get_slice(name)
                found = (tuple(lazy.get_shape()), lazy.get_dtype())
        except SafetensorError as error:
            raise CheckpointError(f"{path} is no safetensors file with {name}: {error}") from error
        if found != (size, DTYPE_NAMES[self.tensors[name].dtype]):
            raise CheckpointError(f"{path} has {name} as {found[1]} {list(found[0])}, {list(size)} was written")
        return lazy

    def _slice(self, file: str, name: str, size: tuple[int, ...], part: tuple[slice, ...]) -> torch.Tensor:
        lazy = self._lazy(file, name, size)
        values: torch.Tensor = lazy[part] if part else lazy[...]
        return values

    def close(self) -> None:
        self._open.clear()
