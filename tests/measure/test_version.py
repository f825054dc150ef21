"""The measurement's version follows its code, not its comments."""

from __future__ import annotations

from ndbench.measure.version import measurement_version, stripped_source


def test_comments_and_docstrings_do_not_change_the_measurement() -> None:
    plain = "def f(x):\n    return x + 1\n"
    commented = '"""Module."""\n# why\ndef f(x):\n    """What."""\n    return (x +\n            1)\n'
    assert stripped_source(plain) == stripped_source(commented)


def test_code_changes_the_measurement() -> None:
    assert stripped_source("def f(x):\n    return x + 1\n") != stripped_source("def f(x):\n    return x + 2\n")


def test_the_measurement_has_one_version_in_a_process() -> None:
    assert measurement_version() == measurement_version()
    assert len(measurement_version()) == 12
