"""GitHub's workflow commands: one line a cell that someone has to look at, shown on the page of the job.

Everything measured is escaped: a log that contains ``::error`` cannot give commands.
"""

from __future__ import annotations

from ndbench.compare.result import Comparison
from ndbench.report import facts

LEVELS = {"regressed": "error", "invalid": "error", "missing": "error", "inconclusive": "warning", "improved": "notice"}
MOST = 10
"""GitHub shows ten annotations of a kind for a step; the last line counts the rest."""


def lines(comparison: Comparison) -> list[str]:
    """The commands, most severe first, and the exit line when no cell says why the run fails."""
    told = [cell for cell in facts.by_severity(comparison.cells) if cell.verdict in LEVELS]
    found = [
        _command(LEVELS[cell.verdict], f"{cell.name}: {facts.word(cell.verdict)}", "; ".join(cell.reasons))
        for cell in told[:MOST]
    ]
    if len(told) > MOST:
        found.append(_command("notice", "ndbench", f"{len(told) - MOST} more cells; see the summary"))
    if comparison.exit_code and not any(LEVELS[cell.verdict] == "error" for cell in told):
        found.append(_command("error", "ndbench", facts.exit_line(comparison)))
    return found


def annotate(comparison: Comparison) -> None:
    """Print the commands: GitHub reads them from standard output."""
    for line in lines(comparison):
        print(line)


def _command(level: str, title: str, message: str) -> str:
    return f"::{level} title={_escape(title, property_too=True)}::{_escape(message)}"


def _escape(text: str, property_too: bool = False) -> str:
    text = facts.printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if property_too else text
