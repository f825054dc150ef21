"""The command line: verbs to functions, errors to one readable line and an exit code. No logic of its own.

Every verb imports what it needs when it runs, so that ``--version``, completion, ``list`` and ``show`` start fast and
never load torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndbench.arguments import DEFAULT_VERB, UsageError, help_text, parse, parser, split_verb
from ndbench.failures import USAGE, Terminated, exit_of, open_streams, say, sigterm_raises

if TYPE_CHECKING:
    from rich.console import Console

    from ndbench.compare.result import Comparison

WIDTH = 100
"""Columns of a table where there is no terminal to ask."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises, and never ends the process by itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    with sigterm_raises():
        try:
            code = _dispatch(arguments)
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt, Terminated) as error:
            return exit_of(error, arguments)


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["__complete"]:
        from ndbench.completion import answer

        print("\n".join(answer(*arguments[1:4])))
        return 0
    verb, rest = split_verb(arguments)
    if verb is None and not rest:
        print(help_text(), file=sys.stderr)
        return USAGE
    if verb is None and set(rest) & {"-h", "--help"}:
        print(help_text())
        return 0
    verb = verb or DEFAULT_VERB
    parsed = parse(verb, rest)
    if parsed.help:
        print(parser(verb).format_help().rstrip())
        return 0
    if parsed.version:
        return _version()
    parsed.argv = arguments
    return _VERBS[verb](parsed)


def _run(args: argparse.Namespace) -> int:
    from ndbench.run.launch import Interrupted
    from ndbench.run.outer_world import refuse_outer_world

    refuse_outer_world(os.environ, args.argv)
    try:
        if args.resume is not None:
            from ndbench.run.runner import resume_run

            results_dir = _resume_from(args)
            return resume_run(args.resume, results_dir, max_failures=args.max_failures, console=_console())
        from ndbench.matrix.expand import expand
        from ndbench.run.start import run_matrix

        matrix = expand(args.words, args.config_dir, sweep=args.multirun)
        return run_matrix(matrix, max_failures=args.max_failures, console=_console())
    except Interrupted as error:
        if error.signum == signal.SIGINT:
            raise KeyboardInterrupt from error
        if error.signum == signal.SIGTERM:
            raise Terminated from error
        return say(f"ended by {signal.Signals(error.signum).name}", 128 + error.signum)


def _resume_from(args: argparse.Namespace) -> Path:
    """The results folder for ``--resume``, which takes no other override: the plan is the run's own."""
    folder = "results"
    for word in args.words:
        key, _, value = word.partition("=")
        if key != "results.dir":
            raise UsageError(f"--resume goes on with the plan of the run: '{word}' cannot change it (results.dir= may)")
        folder = value.strip("'\"")
    for flag, given in (("--config-dir", args.config_dir), ("--multirun", args.multirun)):
        if given:
            raise UsageError(f"--resume goes on with the plan of the run: {flag} cannot change it")
    return Path(folder)


def _show(args: argparse.Namespace) -> int:
    from ndbench.matrix.expand import expand
    from ndbench.report.cost import costs
    from ndbench.report.matrix import matrix_json, print_matrix

    # a machine that is named may be any; without one the question is about this one
    elsewhere = any(word.startswith("hardware=") for word in args.words)
    matrix = expand(args.words, args.config_dir, sweep=args.multirun, here=not elsewhere)
    found = costs(matrix.cells, matrix.config.results.dir)
    if args.json:
        _print_json(matrix_json(matrix, found))
    else:
        print_matrix(matrix, found, _console())
    return 0 if matrix.cells else 3


def _baseline(args: argparse.Namespace) -> int:
    from ndbench.report import baselines as report
    from ndbench.results import baseline as stored
    from ndbench.results.sessions import read_baseline

    action, *rest = args.words
    results_dir = args.results_dir or Path("results")
    if action == "list":
        _no_more(action, rest)
        found = stored.list_baselines(results_dir)
        _print_json(found) if args.json else report.print_list(found, results_dir, _console())
        return 0
    if action == "accept":
        from ndbench.gate.stored import accept_run

        accepted = accept_run(
            _one(action, rest, "RUN"),
            args.reason or "",
            results_dir=results_dir,
            folder=args.into,
            cells=args.cells,
            force=args.force,
            by=args.by,
        )
        report.print_accepted(accepted, _console())
        return accepted.exit_code
    if action == "prune":
        if args.keep is None:
            raise UsageError("baseline prune: --keep N is needed: how many latest sessions of each cell stay")
        folder = report.baseline_at(_one(action, rest, "FOLDER"), results_dir)
        report.print_pruned(stored.prune(folder, args.keep), folder, _console())
        return 0
    folder = report.baseline_at(rest[0] if rest else None, results_dir)
    described = stored.show(read_baseline(folder), args.session)
    _print_json(described) if args.json else report.print_session(described, _console())
    return 0


def _ab(args: argparse.Namespace) -> int:
    from ndbench.gate.ab import run_ab
    from ndbench.run.outer_world import refuse_outer_world

    refuse_outer_world(os.environ, args.argv)
    if not args.base:
        raise UsageError("ab: --base REF is needed: git:REV, python:PATH, set:'KEY=VALUE …' or here")
    return run_ab(
        args.words,
        args.base,
        args.head or "here",
        setup=args.setup,
        config_dir=args.config_dir,
        sweep=args.multirun,
        console=_console(),
    )


def _compare(args: argparse.Namespace) -> int:
    from ndbench.gate.stored import compare_run, compare_two
    from ndbench.results.baseline import hardware_key
    from ndbench.results.sessions import read_baseline
    from ndbench.results.store import find_run

    results_dir = args.results_dir or Path("results")
    run = find_run(args.words[-1], results_dir)
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
        _print_json(comparison.to_json())
    else:
        _print_comparison(comparison, run.plan if run.plan_path.is_file() else None, run.path)
    return comparison.exit_code


def _report(args: argparse.Namespace) -> int:
    from ndbench.compare.result import from_json
    from ndbench.gate.stored import compare_run
    from ndbench.results.store import find_run, read_json, write_text

    run = find_run(args.words[0], args.results_dir or Path("results"))
    plan = run.plan if run.plan_path.is_file() else None
    # a run that was ended in the middle has no verdict yet: show what it has, compared with nothing
    comparison = from_json(read_json(run.verdict_path)) if run.verdict_path.is_file() else compare_run(run, None)
    if args.html is not None or args.png is not None:
        from ndbench.report.files import write_files

        for path in write_files(
            run, comparison, html=args.html, png=args.png, results_dir=args.results_dir, source=args.baseline
        ):
            print(path)
    if args.benchmark_json is not None:
        from ndbench.results.pytest_benchmark import to_pytest_benchmark
        from ndbench.results.store import write_json

        write_json(args.benchmark_json, to_pytest_benchmark(run.records()))
        print(args.benchmark_json)
    if args.markdown is None:
        if args.html is None and args.png is None and args.benchmark_json is None:
            _print_comparison(comparison, plan, run.path)
        return 0
    from ndbench.report.markdown import render

    text = render(comparison, plan=plan, run_folder=run.path)
    if args.markdown == "-":
        print(text)
    else:
        write_text(args.markdown, text)
    return 0


def _print_comparison(comparison: Comparison, plan: dict[str, Any] | None, folder: Path) -> None:
    from ndbench.report.console import print_comparison

    print_comparison(comparison, plan=plan, run_folder=folder, console=_console())


def _wandb(args: argparse.Namespace) -> int:
    from ndbench.report.sending import send

    print(
        send(
            args.words[1],
            args.results_dir or Path("results"),
            project=args.project,
            entity=args.entity,
            offline=args.offline,
            timeout=args.timeout,
        )
    )
    return 0


def _list(args: argparse.Namespace) -> int:
    from ndbench.report.catalog import entries, print_entries

    found = entries(args.words[0], args.config_dir)
    _print_json(found) if args.json else print_entries(args.words[0], found, _console())
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from ndbench.matrix.overrides import read_yaml
    from ndbench.matrix.sources import find_sources
    from ndbench.report.doctor import main as examine

    hardware = find_sources(args.config_dir).files["hardware"]
    return examine(
        args.results_dir or Path("results"),
        {name: read_yaml(path) for name, path in hardware.items()},
        as_json=args.json,
        yardstick=not args.quick,
    )


def _selftest(args: argparse.Namespace) -> int:
    import dataclasses

    from ndbench.gate.selftest import run_selftest
    from ndbench.report.selftest import print_selftest
    from ndbench.run.outer_world import refuse_outer_world

    refuse_outer_world(os.environ, args.argv)
    console = _console()

    def tell(line: str) -> None:
        if not args.json:
            console.print(line, markup=False, soft_wrap=True)

    found = run_selftest(tell, tuple(args.words))
    _print_json(dataclasses.asdict(found) | {"passed": found.passed}) if args.json else print_selftest(found, console)
    return 0 if found.passed else 1


def _completion(args: argparse.Namespace) -> int:
    from ndbench.completion import script

    print(script(args.words[0]))
    return 0


def _version() -> int:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from ndbench import __version__

    parts = []
    for package in ("torch", "transformers", "hydra-core"):
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{package} {version(package)}")
    print(f"ndbench {__version__} ({', '.join([*parts, f'Python {platform.python_version()}'])})")
    return 0


_VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "show": _show,
    "baseline": _baseline,
    "ab": _ab,
    "compare": _compare,
    "report": _report,
    "wandb": _wandb,
    "list": _list,
    "doctor": _doctor,
    "selftest": _selftest,
    "completion": _completion,
}


def _one(action: str, words: Sequence[str], what: str) -> str:
    if len(words) != 1:
        raise UsageError(f"baseline {action}: {what} is needed: ndbench baseline {action} {what} …")
    return words[0]


def _no_more(action: str, words: Sequence[str]) -> None:
    if words:
        raise UsageError(f"baseline {action}: '{words[0]}' is one word too many")


def _console() -> Console:
    from ndbench.report.output import make_console

    return make_console(WIDTH)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, allow_nan=False, default=str))
