"""The log of a training run: one JSON line an optimizer step, in the order of the steps, each step once.

Written by rank 0 alone. It knows nothing of what the fields mean.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from pathlib import Path
from typing import Any


def read_log(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The lines of a log up to step ``last``; what a killed run left half written, or a disk spoiled, is not a line."""
    if not path.is_file():
        return []
    found = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and (last is None or line.get("step", 0) <= last):
            found.append(line)
    return found


class TrainingLog:
    """Appends to ``path``. Lines beyond step ``last`` that are there already are dropped: those steps come again."""

    def __init__(self, path: Path, last: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = "".join(_text(line) for line in read_log(path, last))
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        temporary.write_text(kept, encoding="utf-8")
        temporary.replace(path)
        self._stream = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """One line; a number that is not finite is null."""
        self._stream.write(_text(line))
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _text(line: dict[str, Any]) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
