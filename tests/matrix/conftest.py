"""A folder of a user's own files, and a machine without GPUs whatever it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[str, str], Path]


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
