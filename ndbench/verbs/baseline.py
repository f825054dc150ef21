"""``ndbench baseline``: accept a run as the reference; list, show, tabulate or prune what is stored."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ndbench.arguments import UsageError
from ndbench.verbs.output import console, print_json


def main(args: argparse.Namespace) -> int:
    from ndbench.report import baselines as report
    from ndbench.results import baseline as stored
    from ndbench.results.sessions import read_baseline

    action, *rest = args.words
    results_dir = args.results_dir or Path("results")
    if action == "list":
        _no_more(action, rest)
        found = stored.list_baselines(results_dir)
        print_json(found) if args.json else report.print_list(found, results_dir, console(), _hardware_here())
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
        report.print_accepted(accepted, console())
        return accepted.exit_code
    if action == "prune":
        if args.keep is None:
            raise UsageError("baseline prune: --keep N is needed: how many latest sessions of each cell stay")
        folder = report.baseline_at(_one(action, rest, "FOLDER"), results_dir)
        report.print_pruned(stored.prune(folder, args.keep), folder, console())
        return 0
    if action == "table":
        _table(Path(rest[0]) if rest else None, results_dir / "baselines")
        return 0
    folder = report.baseline_at(rest[0] if rest else None, results_dir)
    described = stored.show(read_baseline(folder), args.session)
    print_json(described) if args.json else report.print_session(described, console())
    return 0


def _hardware_here() -> str | None:
    """The hardware file of this machine; null where it has none of one kind."""
    from ndbench.matrix.reading import read_yaml
    from ndbench.matrix.sources import find_sources
    from ndbench.measure.devices import detect, visible_devices

    devices = visible_devices()
    files = {stem: read_yaml(path) for stem, path in find_sources().files["hardware"].items()} if devices else {}
    try:
        return detect(files, devices)
    except ValueError:
        return None


def _table(file: Path | None, root: Path) -> None:
    """Print the performance table of the stored baselines, or fill ``file`` with it."""
    from ndbench.report import performance

    if file is None:
        console().print(performance.table(root), markup=False, highlight=False, soft_wrap=True)
        return
    try:
        old = file.read_text(encoding="utf-8")
        new = performance.rewrite(old, root)
    except (OSError, ValueError) as error:
        raise UsageError(f"baseline table: {file}: {error}") from error
    file.write_text(new, encoding="utf-8")
    console().print(f"{file}: {'filled anew' if new != old else 'is as the records have it'}", markup=False)


def _one(action: str, words: Sequence[str], what: str) -> str:
    if len(words) != 1:
        raise UsageError(f"baseline {action}: {what} is needed: ndbench baseline {action} {what} …")
    return words[0]


def _no_more(action: str, words: Sequence[str]) -> None:
    if words:
        raise UsageError(f"baseline {action}: '{words[0]}' is one word too many")
