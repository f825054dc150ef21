"""``ndbench import``: a configuration of another trainer as a run of ndbench, with what became of each key."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ndbench.arguments import UsageError, is_override
from ndbench.verbs.output import console, print_json

if TYPE_CHECKING:
    from ndbench.importing.translate import Imported
    from ndbench.matrix.expand import Matrix


def main(args: argparse.Namespace) -> int:
    from ndbench.importing.translate import import_file, suite_file
    from ndbench.matrix.expand import expand
    from ndbench.report.importing import imported_json, print_imported
    from ndbench.results.store import write_text

    files = [word for word in args.words if not is_override(word)]
    given = [word for word in args.words if is_override(word)]
    if len(files) != 1:
        raise UsageError(f"import: '{files[1]}' is one file too many")
    if any(word.startswith(("suite=", "~")) for word in given):
        raise UsageError("import: suite= and deletions cannot be given: the result is a single run")
    imported = import_file(files[0], given, args.world_size)
    # what the model is must be known before anything can be said of the whole
    matrix = None if imported.missing_model else expand(imported.overrides, args.config_dir)
    refused = None if matrix is None else _train_refuses(imported, matrix, args.config_dir)
    if args.output is not None and matrix is not None:
        path, content = suite_file(imported, args.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, content)
    if args.json:
        print_json(imported_json(imported, matrix, refused))
    else:
        suite = path if args.output is not None and matrix is not None else None
        print_imported(imported, matrix, suite, console(), refused)
    if imported.missing_model:
        raise ValueError(f"{imported.path}: {imported.missing_model}")
    return 0


def _train_refuses(imported: Imported, matrix: Matrix, config_dir: Path | None) -> str | None:
    """Why the line for training would not run where the one that measures does; None when it would."""
    from ndbench.matrix.expand import expand
    from ndbench.run.train_checks import train_refusal

    if not imported.train_overrides:
        return None
    try:
        training = expand(imported.train_overrides, config_dir)
    except ValueError as error:
        return str(error)
    # that this machine lacks the devices is said of the line that measures
    known = {reason for _, reason in matrix.skipped}
    skipped = [reason for _, reason in training.skipped if reason not in known]
    cells = [*training.cells, *(cell for cell, _ in training.skipped)]
    refusals = [reason for cell in cells if (reason := train_refusal(cell.config)) is not None]
    return next(iter([*refusals, *skipped]), None)
