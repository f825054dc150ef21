"""The console that tables are printed on: readable in a log, quiet when the reader has gone."""

from __future__ import annotations

import os
import shutil
import sys
from typing import NoReturn

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """rich would exit with 1 here, which means "regressed"."""
        raise BrokenPipeError


LEAST_WIDTH = 24
"""Columns that are printed on at least; a narrower terminal breaks the lines itself."""


def make_console(width: int = 80) -> Console:
    """Standard output, as wide as ``COLUMNS`` says or the terminal is, else ``width`` columns."""
    said = os.environ.get("COLUMNS", "")
    asked = int(said) if said.isdecimal() and len(said) < 6 else 0  # 0 is how some say that they do not know
    if not asked and not sys.stdout.isatty():
        asked = width
    console = _Console(width=max(asked, LEAST_WIDTH) if asked else None, highlight=False, soft_wrap=False)
    if not asked and said:  # rich would take it
        console.width = shutil.get_terminal_size((width, 24)).columns
    if console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH
    return console
