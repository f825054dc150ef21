"""What several verbs print: a console for tables, JSON, and a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ndbench.compare.result import Comparison
    from ndbench.results.sessions import Baseline
    from ndbench.results.store import RunFolder

WIDTH = 100
"""Columns of a table where there is no terminal to ask."""


def console() -> Console:
    from ndbench.report.output import make_console

    return make_console(WIDTH)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, allow_nan=False, default=str))


def print_comparison(
    comparison: Comparison,
    run: RunFolder,
    baseline: Baseline | None,
    *,
    remarks: Sequence[str] = (),
    draw: bool = False,
    again: str | None = None,
) -> None:
    from ndbench.report.console import print_comparison

    print_comparison(
        comparison,
        plan=run.plan if run.has_plan else None,
        run_folder=run.path,
        records=run.records(),
        baseline=baseline,
        remarks=remarks,
        draw=draw,
        again=again,
        console=console(),
    )
