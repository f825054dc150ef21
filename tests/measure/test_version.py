"""The measurement's version follows its code, not its comments."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import ndbench
from ndbench.measure import version
from ndbench.measure.version import MEASUREMENT_SOURCES, NOT_DEFINING, measurement_version, stripped_source

PACKAGE = Path(ndbench.__file__).parent


def test_comments_and_docstrings_do_not_change_the_measurement() -> None:
    plain = "def f(x):\n    return x + 1\n"
    commented = '"""Module."""\n# why\ndef f(x):\n    """What."""\n    return (x +\n            1)\n'
    assert stripped_source(plain) == stripped_source(commented)


def test_code_changes_the_measurement() -> None:
    assert stripped_source("def f(x):\n    return x + 1\n") != stripped_source("def f(x):\n    return x + 2\n")


def test_the_measurement_has_one_version_in_a_process() -> None:
    assert measurement_version() == measurement_version()
    assert len(measurement_version()) == 12


def test_every_measuring_module_is_part_of_the_version_or_left_out_by_name() -> None:
    """A new module in ``measure/`` fails here until it is in one of the two lists."""
    there = {path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "measure").glob("*.py")}
    assert there <= set(MEASUREMENT_SOURCES) | set(NOT_DEFINING), "say whether it defines a metric"
    assert not set(MEASUREMENT_SOURCES) & set(NOT_DEFINING)
    assert {name for name in MEASUREMENT_SOURCES if not (PACKAGE / name).is_file()} == set()


def test_a_change_in_any_of_them_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = measurement_version()
    for source in MEASUREMENT_SOURCES:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text((PACKAGE / source).read_text())
    monkeypatch.setattr(version, "__file__", str(tmp_path / "measure" / "version.py"))
    monkeypatch.setattr(version, "stripped_source", cache(stripped_source))
    assert measurement_version() == original
    seen = {original}
    for source in MEASUREMENT_SOURCES:
        text = (tmp_path / source).read_text()
        (tmp_path / source).write_text(f"{text}\nMORE = 1\n")
        seen.add(measurement_version())
        (tmp_path / source).write_text(text)
    assert len(seen) == 1 + len(MEASUREMENT_SOURCES)
