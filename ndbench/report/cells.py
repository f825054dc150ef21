"""What a cell is, in words: whose engine ran it, which model it trained, and the title of its speed.

Knows cells and figures, no verdict's reasons and no medium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ndbench.compare.result import CellVerdict

BUNDLED = "ndbench"
"""``engine.name`` of the engine that nobody needs to be told about."""


def engine_of(name: str, engine: str | None) -> str:
    """The engine of a cell; empty for the bundled one, and where the cell's name says it."""
    return "" if engine is None or engine == BUNDLED or engine in name else engine


def named(name: str, engine: str | None) -> str:
    """A cell's name with the engine beside it: ``ddp2 (my_loop)``."""
    shown = engine_of(name, engine)
    return f"{name} ({shown})" if shown else name


def model_of(cell: Mapping[str, Any]) -> str:
    """The model in a cell's description; empty for a script, whose model is none of ours."""
    if (cell.get("engine_config") or {}).get("command"):
        return ""
    return str((cell.get("model") or {}).get("name", ""))


SCRIPT = "a script of its own"
"""In place of its model, batch and precision, which the configuration does not hold."""
STEPS = "steps/s"
TOKENS = "tokens/s"


def speed_title(cells: Sequence[CellVerdict]) -> str:
    """What a column of these cells' speeds holds: tokens/s, steps/s where no script says its tokens, or both."""
    measured = [cell.current for cell in cells if cell.current is not None and cell.current.step_seconds is not None]
    by_steps = sum(current.tokens_per_second is None for current in measured)
    if not by_steps:
        return TOKENS
    return STEPS if by_steps == len(measured) else "speed"


def under(title: str, speed: str) -> str:
    """A speed as it stands below that title: with its unit where the title has none."""
    if title == STEPS:
        return speed.removesuffix(f" {STEPS}")
    return f"{speed} {TOKENS}" if title == "speed" and speed[:1].isdigit() and not speed.endswith(STEPS) else speed
