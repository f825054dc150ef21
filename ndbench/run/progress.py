"""How far a repeat has come, seen from outside: rank 0 stores a step number in shared memory, the parent reads it.

Storing eight bytes in a mapped page costs no system call, so the measured window is not disturbed.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_FORMAT = struct.Struct("<q")


class StepCounter:
    """A step number in a file that both sides map; -1 before the first step has begun."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.write_bytes(_FORMAT.pack(-1))
        with path.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), _FORMAT.size)

    def set(self, step: int) -> None:
        _FORMAT.pack_into(self._map, 0, step)

    def get(self) -> int:
        (step,) = _FORMAT.unpack_from(self._map, 0)
        return int(step)
