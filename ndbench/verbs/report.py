"""``ndbench report``: the verdict of a stored run again, on the console or as a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ndbench.verbs.output import print_comparison


def main(args: argparse.Namespace) -> int:
    from ndbench.compare.result import UNFINISHED
    from ndbench.gate.stored import as_it_stands, verdict_of
    from ndbench.report.facts import resume_command
    from ndbench.results.store import PairsFolder, find_run, write_text

    run = find_run(args.words[0], args.results_dir or Path("results"), pairs=True)
    plan = run.plan if run.has_plan else None
    comparison = as_it_stands(run, verdict_of(run))
    again = run.pairs.get("command") if isinstance(run, PairsFolder) else None
    if comparison.mode == UNFINISHED and plan is not None and not isinstance(run, PairsFolder):
        comparison.notes.insert(0, f"if nothing measures it any more, go on with: {resume_command(run.path)}")
    if args.html is not None or args.png is not None:
        from ndbench.report.files import write_files

        for path in write_files(
            run,
            comparison,
            html=args.html,
            png=args.png,
            results_dir=args.results_dir,
            source=args.baseline,
            again=again,
        ):
            print(path)
    if args.benchmark_json is not None:
        from ndbench.results.pytest_benchmark import to_pytest_benchmark
        from ndbench.results.store import write_json

        write_json(args.benchmark_json, to_pytest_benchmark(run.records()))
        print(args.benchmark_json)
    if args.markdown is None and (args.html or args.png or args.benchmark_json) is not None:
        return 0
    from ndbench.report.files import history_of

    records = run.records()
    baseline, remarks = history_of(run, records, comparison, args.results_dir, args.baseline, fetch=False)
    if args.markdown is None:
        print_comparison(comparison, run, baseline, remarks=remarks, draw=True, again=again)
        return 0
    from ndbench.report.markdown import render

    text = render(comparison, plan=plan, run_folder=run.path, records=records, baseline=baseline, again=again)
    if args.markdown == "-":
        print(text)
    else:
        write_text(args.markdown, text)
    return 0
