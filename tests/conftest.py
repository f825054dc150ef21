"""What every test needs: device locks of its own, so that two test sessions on one machine do not wait in line."""

from __future__ import annotations

import os
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
