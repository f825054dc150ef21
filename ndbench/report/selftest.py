"""What ``ndbench selftest`` found, as a table and a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ndbench.gate.selftest import Selftest


def print_selftest(found: Selftest, console: Console) -> None:
    """One line a fault, then what can be seen here and under which load."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("planted", "must", "gate", "said"):
        table.add_column(name, overflow="fold")
    for row in found.rows:
        quiet = row.planted.startswith("no")
        word = ("quiet" if row.caught else "ALARM") if quiet else ("caught" if row.caught else "missed")
        style = "green" if row.caught else "bold red" if row.must else "yellow"
        table.add_row(row.planted, "yes" if row.must else "no", Text(word, style=style), Text(row.said))
    console.print(table)
    load = ", ".join(f"{value:.1f}" for value in found.load)
    lines = [
        f"smallest slowdown that these {found.pairs} pairs show in nine of ten cases: {found.smallest:.1%}",
        f"{found.cell}, {found.seconds:.0f} s, load of the machine {load}",
        "PASSED" if found.passed else "FAILED: a fault that must be caught was not, or the gate cried wolf",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
