"""``ndbench show``: the cells of a matrix, what they need, and why others are left out; runs nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ndbench.verbs.output import console, print_json

if TYPE_CHECKING:
    from ndbench.matrix.expand import Matrix


def main(args: argparse.Namespace) -> int:
    from ndbench.matrix.expand import expand
    from ndbench.report.cost import costs
    from ndbench.report.matrix import matrix_json, print_matrix
    from ndbench.results.store import refuse_results

    # a machine that is named may be any; without one the question is about this one
    elsewhere = any(word.startswith("hardware=") and word != "hardware=auto" for word in args.words)
    matrix = expand(args.words, args.config_dir, sweep=args.multirun, here=not elsewhere)
    _ask_peers(matrix)
    refuse_results(matrix.config.results.dir)
    found = costs(matrix.cells, matrix.config.results.dir)
    if args.json:
        print_json(matrix_json(matrix, found))
    else:
        print_matrix(matrix, found, console())
    return 0 if matrix.cells else 3


def _ask_peers(matrix: Matrix) -> None:
    """Set aside what an engine other than the bundled one refuses when it is asked for a plan, as a run does.

    The bundled engine is not asked: that would load torch and a model for every table.
    """
    peers = [cell for cell in matrix.cells if cell.config.engine.name != "ndbench"]
    if not peers:
        return
    from ndbench.run.start import ask_engines

    _, refused = ask_engines(peers)
    names = {cell.name for cell, _ in refused}
    matrix.cells = [cell for cell in matrix.cells if cell.name not in names]
    matrix.skipped += refused
