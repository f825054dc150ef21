"""A step under context parallelism traces without ranks or memory: no device synchronisation, no shape from data."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.context import trace_fake


def test_a_step_of_64_ranks_traces_under_fake_tensors_with_the_calls_of_the_closed_form() -> None:
    command = [sys.executable, "-m", trace_fake.__name__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    n, layers = trace_fake.WORLD_SIZE, trace_fake.LAYERS
    rotations = layers * ((n - 1) + (n - 2) + (n - 1))
    exchanges = layers * 4
    assert json.loads(done.stdout) == {
        "ring": {"send": rotations, "recv_": rotations},
        "ulysses": {"all_to_all_single": exchanges, "wait_tensor": exchanges},
    }
