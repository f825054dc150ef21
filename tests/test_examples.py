"""What an example says to someone who starts it in another way than its first lines ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.py"))])
def test_without_torchrun_an_example_says_how_to_start_it_in_one_line(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    script = str(EXAMPLES / name)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr == f"start it by torchrun: torchrun --nproc-per-node 8 {script}\n"
