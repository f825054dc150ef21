"""A folder of a user's own files, the matrix of a suite in it, and a machine without GPUs whatever it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ndbench.matrix.expand import Matrix, expand

Write = Callable[[str, str], Path]


def matrix_of(user: Write, tmp_path: Path, text: str, *overrides: str, sweep: bool = False) -> Matrix:
    user("suites/x.yaml", text)
    return expand(["suite=x", "hardware=cpu", *overrides], tmp_path, sweep=sweep)


def names(matrix: Matrix) -> list[str]:
    return [cell.name for cell in matrix.cells]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from ndbench.matrix import resolve

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    resolve.visible.cache_clear()


@pytest.fixture
def user(tmp_path: Path) -> Write:
    """``user("suites/x.yaml", text)`` writes a file; its folder is ``tmp_path``."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write
