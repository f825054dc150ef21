"""What several verbs print: a console for tables, JSON, and a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ndbench.compare.result import Comparison

WIDTH = 100
"""Columns of a table where there is no terminal to ask."""


def console() -> Console:
    from ndbench.report.output import make_console

    return make_console(WIDTH)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, allow_nan=False, default=str))


def print_comparison(comparison: Comparison, plan: dict[str, Any] | None, folder: Path) -> None:
    from ndbench.report.console import print_comparison

    print_comparison(comparison, plan=plan, run_folder=folder, console=console())
