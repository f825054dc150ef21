"""How often the gate is right on this machine: ``python -m tests.micro.gate_rates`` (hours; not part of the tests).

A/A runs of a whole suite through the confirm stage, and turn-taking A/Bs of one cell with a planted slowdown, each N
times with seeds of their own. Prints one table with the load they were measured under, and keeps every experiment in
``rates.json``, so that the figures in the README can be made again. Everything goes through the command line, as a
user's would.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

LIMIT_SECONDS = 3 * 3600.0
"""Of one command; a run of eight cells with pairs for all of them takes less."""

WALL = "tokens_per_second"

Experiment = dict[str, Any]


def ndbench(folder: Path, *words: str) -> int:
    """Run the command line and keep what it says below ``folder``; its exit code."""
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"$ ndbench {shlex.join(words)}\n")
        log.flush()
        command = [sys.executable, "-m", "ndbench", *words]
        return subprocess.run(command, stdout=log, stderr=log, timeout=LIMIT_SECONDS, check=False).returncode


def newest(folder: Path) -> Path:
    return max((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.name)


def measured(kind: str, seed: int, code: int, folder: Path, load: float, began: float) -> Experiment:
    """What one experiment came to, from the verdict it wrote; without one it has failed."""
    path = folder / "verdict.json"
    verdict = json.loads(path.read_text()) if path.is_file() else {"cells": [], "counts": {}}
    return {
        "kind": kind,
        "seed": seed,
        "exit_code": code,
        "cells": {cell["name"]: cell["verdict"] for cell in verdict["cells"]},
        "effects": {
            cell["name"]: {
                metric["metric"]: metric["details"]["log_effect"]
                for metric in cell["metrics"]
                if metric["details"].get("confirmed")
            }
            for cell in verdict["cells"]
        },
        "pairs": sum(
            max((len(m["details"]["pairs"]) for m in cell["metrics"] if m["details"].get("confirmed")), default=0)
            for cell in verdict["cells"]
        ),
        "load": [load, os.getloadavg()[0]],
        "seconds": time.monotonic() - began,
    }


def unchanged(args: argparse.Namespace, results: Path) -> list[Experiment]:
    """The suite against a baseline of the same code, every suspect confirmed by pairs of that code with itself."""
    words = [f"suite={args.suite}", "hardware=cpu", f"results.dir={results}", *args.override]
    code = ndbench(results, "run", *words, "gate.mode=off")
    if code != 0:
        raise SystemExit(f"the suite itself does not run here (exit code {code}): see {results / 'log.txt'}")
    ndbench(results, "baseline", "accept", "latest", "--reason", "A/A", "--results-dir", str(results))
    gate = ["gate.confirm=on", "gate.base=here", f"gate.residency={args.residency}"]
    found = []
    for seed in range(args.seed, args.seed + args.experiments):
        load, began = os.getloadavg()[0], time.monotonic()
        code = ndbench(results, "run", *words, *gate, f"measure.shuffle_seed={seed}")
        found.append(measured("nothing, whole suite", seed, code, newest(results / "runs"), load, began))
        say(found[-1])
    return found


def slowed(args: argparse.Namespace, results: Path, slowdown: float) -> list[Experiment]:
    """One cell, both sides resident, the head's turns slowed down inside the step."""
    words = [f"suite={args.suite}", "hardware=cpu", f"cells={args.cell}", f"results.dir={results}", *args.override]
    sides = ["--base", "here", "--head", f"set:measure.handicap={slowdown}"]
    found = []
    for seed in range(args.seed, args.seed + args.experiments):
        load, began = os.getloadavg()[0], time.monotonic()
        extra = [f"gate.residency={args.residency}", f"measure.shuffle_seed={seed}"]
        code = ndbench(results, "ab", *words, *extra, *sides)
        found.append(measured(f"{slowdown:.0%} slower, {args.cell}", seed, code, newest(results / "ab"), load, began))
        say(found[-1])
    return found


def say(one: Experiment) -> None:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(one["cells"].values()).items())
    said = f"{counts or 'no verdict'}, {one['pairs']} pairs, {one['seconds']:.0f} s, load {one['load'][0]:.1f}"
    print(f"{one['kind']}, seed {one['seed']}: {said}", flush=True)


def verdict_of(one: Experiment) -> str:
    """The verdict of an experiment: red when any cell is; pass only when every cell is."""
    present = set(one["cells"].values())
    order = ("regressed", "invalid", "missing", "inconclusive", "pass", "improved")
    return next((word for word in order if word in present), "failed")


def table(found: list[Experiment]) -> str:
    """One row a kind of experiment, as Markdown."""
    lines = [
        "| planted | experiments | regressed | inconclusive | pass | other | pairs each | wall time | load | hours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(one["kind"] for one in found):
        group = [one for one in found if one["kind"] == kind]
        counts = Counter(verdict_of(one) for one in group)
        other = len(group) - sum(counts[word] for word in ("regressed", "inconclusive", "pass"))
        effects = [cell[WALL] for one in group for cell in one["effects"].values() if WALL in cell]
        loads = [value for one in group for value in one["load"]]
        lines.append(
            f"| {kind} | {len(group)} | {counts['regressed']} | {counts['inconclusive']} | {counts['pass']} | "
            f"{other} | "
            f"{median(one['pairs'] for one in group):g} | {f'{median(effects):+.1%}' if effects else 'none'} | "
            f"{min(loads):.1f} to {max(loads):.1f} | {sum(one['seconds'] for one in group) / 3600:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.micro.gate_rates", description=__doc__)
    parser.add_argument("--experiments", type=int, default=10, help="of each kind (10)")
    parser.add_argument("--suite", default="hsdp_tp")
    parser.add_argument("--cell", default="fsdp8", help="the cell that is slowed down (fsdp8)")
    parser.add_argument("--slowdowns", type=float, nargs="*", default=[0.2, 0.1], help="0.2 0.1")
    parser.add_argument("--residency", type=float, default=25.0, help="seconds for which both sides take turns (25)")
    parser.add_argument(
        "--seed", type=int, default=1000, help="of the first experiment; one more for each other (1000)"
    )
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="more for every command")
    parser.add_argument("--no-suite", action="store_true", help="leave out the A/A runs of the whole suite")
    parser.add_argument("results", type=Path, help="a new folder for everything that is measured")
    args = parser.parse_args()
    args.results.mkdir(parents=True)
    cores = len(os.sched_getaffinity(0))
    print(f"{args.experiments} experiments each, seeds from {args.seed}, {cores} cores", flush=True)
    found: list[Experiment] = []
    kinds = [] if args.no_suite else [lambda: unchanged(args, args.results)]
    kinds += [lambda slowdown=slowdown: slowed(args, args.results, slowdown) for slowdown in args.slowdowns]
    for kind in kinds:
        found += kind()
        (args.results / "rates.json").write_text(
            json.dumps({"arguments": sys.argv[1:], "experiments": found}, indent=1)
        )
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
