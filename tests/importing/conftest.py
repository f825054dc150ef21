"""Files of other tools, written as text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ndbench.config import Config
from ndbench.importing.translate import Imported
from ndbench.matrix.compose import Composer
from ndbench.matrix.keys import set_value, typed
from ndbench.matrix.overrides import parse_overrides
from ndbench.matrix.resolve import fill
from ndbench.matrix.sources import find_sources
from tests.cli.conftest import ndbench

__all__ = ["ndbench"]

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write("base_model: x")`` -> path of the file."""

    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


@cache
def _composer() -> Composer:
    return Composer(find_sources())


def config_of(imported: Imported) -> Config:
    """The cell's configuration as the overrides make it; each group of files is composed once for all tests."""
    request = parse_overrides(imported.overrides, find_sources())
    config = _composer().config({"hardware": "h100"} | request.groups)
    for key, value in request.values.items():
        set_value(config, key, typed(key, value))
    assert fill(config, {key[6:] for key in request.values if key.startswith("model.")}) == []
    return config
