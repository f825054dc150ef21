"""``pytest --ndbench-suite=NAME``: every cell of a suite is a test that fails when its verdict does.

The suite is measured once, when its first test runs, exactly as ``ndbench run`` would; the tests then read the verdict.
Nothing is imported until the option is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ndbench.compare.result import CellVerdict, Comparison

BROKEN = ("regressed", "invalid", "missing")
UNDECIDED = ("inconclusive", "incomparable")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ndbench", "benchmarks of parallel training")
    group.addoption("--ndbench-suite", metavar="NAME", help="turn the cells of this ndbench suite into tests")
    group.addoption(
        "--ndbench-override",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one more override of the suite, as on ndbench's command line; may be given several times",
    )
    group.addoption("--ndbench-config-dir", metavar="DIR", help="a folder of your own models, machines and suites")
    group.addoption(
        "--ndbench-benchmark-json", metavar="FILE", help="write the run in pytest-benchmark's format, to compare with"
    )


def pytest_collection(session: pytest.Session) -> None:
    if session.config.getoption("--ndbench-suite"):
        session.config.stash[_SUITE] = _Suite(session.config)


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    suite = config.stash.get(_SUITE, None)
    if suite is not None:
        items.extend(Cells.from_parent(session, name=f"ndbench:{suite.name}", suite=suite).collect())


class _Suite:
    """A suite that is measured when somebody first asks for its verdict."""

    def __init__(self, config: pytest.Config) -> None:
        self.name: str = config.getoption("--ndbench-suite")
        self._words = [f"suite={self.name}", *config.getoption("--ndbench-override")]
        self._config_dir: str | None = config.getoption("--ndbench-config-dir")
        self._json: str | None = config.getoption("--ndbench-benchmark-json")
        self._found: Comparison | None = None
        self._error: str | None = None

    def cells(self) -> Iterator[tuple[str, str | None]]:
        """(name, why it cannot run here) of every cell. Raises ``UsageError`` for what the user must change."""
        from ndbench.matrix.expand import expand

        try:
            matrix = expand(self._words, self._config_dir)
        except ValueError as error:
            raise pytest.UsageError(f"--ndbench-suite={self.name}: {error}") from error
        yield from ((cell.name, None) for cell in matrix.cells)
        yield from ((cell.name, reason) for cell, reason in matrix.skipped)

    def comparison(self) -> Comparison:
        """The verdict on the whole suite. Fails the test that asked when the run itself came to no verdict."""
        if self._found is None and self._error is None:
            try:
                self._found = self._measure()
            except ValueError as error:
                self._error = str(error)
        if self._found is None:
            pytest.fail(f"the suite was not measured: {self._error}", pytrace=False)
        return self._found

    def _measure(self) -> Comparison:
        from ndbench.compare.result import from_json
        from ndbench.matrix.expand import expand
        from ndbench.report.output import make_console
        from ndbench.results.store import find_run, read_json, write_json
        from ndbench.run.start import run_matrix

        matrix = expand(self._words, self._config_dir)
        run_matrix(matrix, max_failures=None, console=make_console(100))
        folder = find_run("latest", matrix.config.results.dir)
        found = from_json(read_json(folder.verdict_path))
        if self._json:
            from ndbench.results.pytest_benchmark import to_pytest_benchmark

            write_json(Path(self._json), to_pytest_benchmark(folder.records()))
        return found


_SUITE = pytest.StashKey[_Suite]()


class Cells(pytest.Collector):
    """The cells of one suite."""

    def __init__(self, suite: _Suite, **fields: Any) -> None:
        super().__init__(**fields)
        self.suite = suite

    def collect(self) -> list[CellTest]:
        return [
            CellTest.from_parent(self, name=name, suite=self.suite, reason=reason)
            for name, reason in self.suite.cells()
        ]


class CellTest(pytest.Item):
    """One cell: passes, fails, or is skipped, as its verdict says."""

    def __init__(self, suite: _Suite, reason: str | None, **fields: Any) -> None:
        super().__init__(**fields)
        self.suite, self.reason = suite, reason

    def runtest(self) -> None:
        if self.reason is not None:
            pytest.skip(self.reason)
        comparison = self.suite.comparison()
        cell = next((cell for cell in comparison.cells if cell.name == self.name), None)
        if cell is None:
            pytest.skip("it was not measured on this machine")
        self._judge(comparison, cell)

    def _judge(self, comparison: Comparison, cell: CellVerdict) -> None:
        said = "\n".join([f"{cell.verdict}: {reason}" for reason in cell.reasons] + cell.notes)
        if cell.verdict in BROKEN:
            pytest.fail(said, pytrace=False)
        if comparison.exit_code == 5 and cell.verdict == "inconclusive":
            pytest.fail(said, pytrace=False)
        if comparison.exit_code == 4 and cell.verdict in ("no_baseline", "new", "incomparable"):
            pytest.fail(comparison.exit_reason, pytrace=False)
        if comparison.exit_code == 3 and all(one.verdict not in BROKEN for one in comparison.cells):
            pytest.fail(comparison.exit_reason, pytrace=False)
        if cell.verdict in UNDECIDED:
            pytest.skip(said)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return Path(self.path), None, f"ndbench {self.suite.name}: {self.name}"
