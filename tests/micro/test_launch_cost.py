"""What a repeat costs beside its training steps: launch, set-up, yardstick, report; and the first step's excess.

Limits are for two otherwise idle cores; the best of several launches is taken, since neighbours only lengthen them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ndbench.matrix.expand import expand
from ndbench.run import launch as launching
from ndbench.run.progress import StepCounter
from ndbench.run.task import Task

FIXED_SECONDS = 1.5
"""Wall time of an 8-rank repeat less all its training steps, once the fork server is up."""
BARE_SECONDS = 0.6
"""A launch of eight ranks that make one all-reduce and end, on two idle cores; a slower machine gets its factor."""
LAUNCHES = 5
"""At most so many are tried."""


def bare_rank() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


def bare_launch() -> float:
    """Seconds of a launch that does nothing, by the same agent and fork server."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=8,
        run_id="bare",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    began = time.perf_counter()
    elastic_launch(config, bare_rank)()
    return time.perf_counter() - began


def launch_once(layout: str, folder: Path) -> tuple[float, float]:
    """Fixed cost and first-step excess of one 8-rank repeat of ``hsdp_tp``, in seconds."""
    (cell,) = expand(["suite=hsdp_tp", "hardware=cpu", f"cells={layout}"]).cells
    folder.mkdir()
    task = Task(cell, 1, 0, False, 0.0, folder, os.getpid(), started=time.time())
    task.save()
    StepCounter(task.counter_path, create=True)
    began = time.perf_counter()
    result = launching.launch(task, cell.world_size, 120.0, "forkserver")
    wall = time.perf_counter() - began
    assert result.outcome == "ok", result.reason
    seconds = [max(ranks) for ranks in zip(*(report.seconds for report in result.reports), strict=True)]
    return wall - sum(seconds), seconds[0] - median(seconds[3:])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "excess_limit"), [("fsdp8", 1.0), ("hsdp2x2_tp2", 2.0)])
def test_a_repeat_of_eight_ranks_costs_little_beside_its_steps(
    benchmark: Any, tmp_path: Path, layout: str, excess_limit: float
) -> None:
    launching.start_fork_server(launching.model_modules(["llama"]), "forkserver")
    bare_launch()  # waits for the fork server's imports
    found: list[tuple[float, float]] = []
    bare = [bare_launch()]

    def slowness() -> float:
        return max(1.0, min(bare) / BARE_SECONDS)

    def several() -> None:
        for attempt in range(LAUNCHES):
            found.append(launch_once(layout, tmp_path / str(attempt)))
            bare.append(bare_launch())
            fixed, excess = (min(values) for values in zip(*found, strict=True))
            if fixed < FIXED_SECONDS * slowness() and excess < excess_limit * slowness():
                return

    benchmark.pedantic(several, rounds=1)
    benchmark.extra_info["fixed_seconds"] = [fixed for fixed, _ in found]
    benchmark.extra_info["first_step_excess_seconds"] = [excess for _, excess in found]
    benchmark.extra_info["bare_seconds"] = bare
    assert min(fixed for fixed, _ in found) < FIXED_SECONDS * slowness(), (found, bare)
    assert min(excess for _, excess in found) < excess_limit * slowness(), (found, bare)
