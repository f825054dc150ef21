"""The form of a stored plan, as far as comparing and reporting read it; what made it and what runs it is ``run/``'s."""

from __future__ import annotations

from typing import Any

from ndbench.config import IDENTITY_GROUPS
from ndbench.results.checks import CELL, INTEGER, OPEN, TEXT, Check, RecordError, holding, list_of, mapping_of, nullable

_LEFT_OUT = list_of(holding({"name": TEXT, "reason": TEXT}))

_CELLS = list_of(holding({"name": TEXT}))

OPTIONAL: dict[str, Check] = {
    "run": TEXT,
    "suite": TEXT,
    "overrides": list_of(TEXT),
    "repeats": mapping_of(INTEGER),
    "gate": nullable(OPEN),
    "baseline": nullable(TEXT),
    "excluded": _LEFT_OUT,
    "skipped": _LEFT_OUT,
    "unselected": _CELLS,
    "warnings": list_of(TEXT),
}


def check_plan(plan: Any, where: str) -> dict[str, Any]:
    """The plan itself when it can be read, else ``RecordError`` naming ``where`` and the field."""
    OPEN(plan, where)
    if "cells" not in plan:
        raise RecordError(f"{where} is not a plan: it has no cells")
    for key, check in OPTIONAL.items():
        if key in plan:
            check(plan[key], f"{where}: {key}")
    list_of(CELL)(plan["cells"], f"{where}: cells")
    for index, cell in enumerate(plan["cells"]):
        at = f"{where}: cells[{index}]"
        nullable(TEXT)(cell.get("cell_id"), f"{at}.cell_id")
        if not cell.get("cell_id"):  # it is made of these
            holding({key: OPEN for key in IDENTITY_GROUPS if key != "world_size"} | {"world_size": INTEGER})(cell, at)
    checked: dict[str, Any] = plan
    return checked
