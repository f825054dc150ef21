"""The console that tables are printed on: readable in a log, quiet when the reader has gone."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """rich would exit with 1 here, which means "regressed"."""
        raise BrokenPipeError


def make_console(width: int) -> Console:
    """Standard output; ``width`` columns where it is no terminal and ``COLUMNS`` does not say otherwise."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Console(width=None if known else width, highlight=False, soft_wrap=False)
