"""Do steps take longer with a tracker than without? ``python -m tests.micro.tracker_ab --residencies N --seconds S``

Both sides' ranks are there at once and take turns of one step in ABBA order, so a busy machine hits both alike; one
side's cell has ``tracker=none``, the other's ``tracker=wandb``. Prints wall and CPU time of a step, on against off.
What the turns cannot see, a tracker that goes on working after its run beside the next one, is looked for at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import psutil

from ndbench.cli import main as ndbench
from ndbench.compare.statistics import mean_interval
from ndbench.config import TrackerConfig
from ndbench.gate.stored import compare_run
from ndbench.report.tracker import push_run
from ndbench.results.store import RunFolder

CELL = ["model=llama_tiny", "world_size=2", "parallelism.dp_shard_size=2", "training.global_batch_size=8"]
"""Two ranks of one thread each: a rank with threads of its own burns CPU time while its threads wait for cores."""
QUANTITIES = {"tokens_per_second": "wall time", "cpu_seconds_per_step": "CPU time"}


def leftovers(folder: Path) -> list[psutil.Process]:
    """Processes that a tracker started for this folder and that are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("WANDB_DATA_DIR", "").startswith(str(folder)):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def compared(results: Path, residencies: int, seconds: float) -> dict[str, list[float]]:
    """Log ratios on / off of a step's time by quantity, one a residency."""
    ratios: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    while min(len(found) for found in ratios.values()) < residencies:
        base, head = "set:tracker=none", "set:tracker=wandb tracker.mode=offline"
        words = [*CELL, f"results.dir={results}", f"gate.residency={seconds}", "--base", base, "--head", head]
        code = ndbench(["ab", *words])
        if code not in (0, 1, 5):
            raise SystemExit(f"ndbench ab ended with {code}")
        path = max((results / "ab").glob("*/pairs.json"), key=lambda found: found.stat().st_mtime)
        (cell,) = json.loads(path.read_text())["cells"].values()
        for pair in cell["pairs"]:
            for name in QUANTITIES:
                if pair.get(name) is not None:
                    ratios[name].append(float(pair[name]))
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--residencies", type=int, default=12, help="independent pairs, at least")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch)
        for name, ratios in compared(results, given.residencies, given.seconds).items():
            interval = mean_interval(ratios)
            assert interval is not None, "two residencies at least"
            low, high = (math.expm1(value) for value in interval)
            effect = math.expm1(fmean(ratios))
            said = "within noise" if low <= 0 <= high else "NOT within noise"
            print(f"{QUANTITIES[name]}: {effect:+.2%} [{low:+.2%}, {high:+.2%}], {len(ratios)} residencies: {said}")
        run = RunFolder(max((results / "ab").glob("*/head"), key=lambda found: found.stat().st_mtime))
        print(push_run(run, compare_run(run, None), TrackerConfig(name="wandb", mode="offline")))
        left = leftovers(run.path)
        print(f"processes of the tracker after it has answered: {len(left)}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
