"""What every test needs: device locks of its own, so that two test sessions on one machine do not wait in line.

And quiet: ranks that a test has left behind with the process groups of many layouts would slow what comes after.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("tmp")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    variable = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)  # for the processes that tests start
    yield
    tempfile.tempdir = before
    if variable is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = variable


MOST_THREADS = 80
"""Of a rank of the pool: the process groups of about six layouts."""


def _close_pools(threads: int) -> None:
    module = sys.modules.get("tests.parity.pool")
    if module is not None:
        module.close_crowded(threads)


@pytest.fixture(autouse=True)
def _pools_stay_small() -> Iterator[None]:
    yield
    _close_pools(MOST_THREADS)


@pytest.fixture(scope="module", autouse=True)
def _pools_end_with_their_module() -> Iterator[None]:
    yield
    _close_pools(0)
