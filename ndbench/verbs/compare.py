"""``ndbench compare``: two runs, or a run with the baseline as it stands now."""

from __future__ import annotations

import argparse
from pathlib import Path

from ndbench.arguments import UsageError
from ndbench.verbs.output import print_comparison, print_json


def main(args: argparse.Namespace) -> int:
    from ndbench.gate.stored import compare_run, compare_two
    from ndbench.results.fit import hardware_key
    from ndbench.results.sessions import read_baseline
    from ndbench.results.store import find_run

    results_dir = args.results_dir or Path("results")
    run = find_run(args.words[-1], results_dir)
    baseline = None
    if len(args.words) == 2 and Path(args.words[0]).is_file():
        from ndbench.config import GateConfig
        from ndbench.gate.foreign import comparison_with_file

        comparison = comparison_with_file(run, Path(args.words[0]), GateConfig())
    elif len(args.words) == 2:
        if args.baseline is not None:
            raise UsageError(f"compare: two runs and --baseline {args.baseline}: one of them is too much")
        comparison = compare_two(args.words[0], run, results_dir)
    else:
        records = run.records()
        if not records:
            raise ValueError(f"{run.path} holds no record: there is nothing to compare")
        baseline = read_baseline(
            args.baseline, hardware=hardware_key(records), suite=records[0]["suite"], results_dir=results_dir
        )
        comparison = compare_run(run, baseline)
    if args.json:
        print_json(comparison.to_json())
    else:
        print_comparison(comparison, run, baseline)
    return comparison.exit_code
