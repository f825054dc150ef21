"""Ranks run the code of the process that starts them, whatever lies in the folder it is started in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ndbench

HELPER = """
import json, os, sys

def tell(path):
    import ndbench
    names = ("PYTHONPATH", "PYTHONSAFEPATH", "NDBENCH_ENVIRONMENT")
    open(path, "w").write(json.dumps([ndbench.__file__, {name: os.environ.get(name) for name in names}]))
"""
DRIVER = """
import multiprocessing, sys
from helper import tell

if __name__ == "__main__":
    if sys.argv[1] == "run":
        from ndbench.run.launch import start_fork_server
        start_fork_server([], "forkserver")
        rank = multiprocessing.get_context("forkserver").Process(target=tell, args=(sys.argv[2],))
        rank.start()
        rank.join()
    else:
        from ndbench.measure.pace import measure_pace
        measure_pace("cpu", 1)
"""


@pytest.mark.parametrize("what", ["run", "pace"])
def test_another_copy_in_the_current_folder_is_not_taken(what: str, tmp_path: Path) -> None:
    script, here = tmp_path / "bin", tmp_path / "checkout"
    script.mkdir()
    (script / "helper.py").write_text(HELPER)
    (script / "driver.py").write_text(DRIVER)
    (here / "ndbench").mkdir(parents=True)
    for name in ("ndbench/__init__.py", "signal.py"):  # the latter for Python's own helpers
        (here / name).write_text(f"open({str(tmp_path / 'wrong')!r}, 'w').write('imported')\n")
    root = str(Path(ndbench.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"PYTHONPATH": root}
    subprocess.run(
        [sys.executable, str(script / "driver.py"), what, str(tmp_path / "told")],
        cwd=here, env=environment, check=True, timeout=120,
    )  # fmt: skip
    assert not (tmp_path / "wrong").exists()
    if what == "run":
        file, variables = json.loads((tmp_path / "told").read_text())
        assert file == ndbench.__file__
        assert variables == {"PYTHONPATH": root, "PYTHONSAFEPATH": None, "NDBENCH_ENVIRONMENT": None}
