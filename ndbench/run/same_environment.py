"""Whether a run can be gone on with here: its later repeats must be measured on what its earlier ones were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ndbench.compare.comparability import differences, shorten
from ndbench.config import Cell
from ndbench.results.schema import Record


def refuse_other_environment(
    run: str,
    records: Sequence[Record],
    code: Callable[[Cell], Mapping[str, Any]],
    cell_version: str,
    fingerprint: Callable[[Cell], Mapping[str, Any]],
    cells: Mapping[str, Cell],
    left: int,
) -> None:
    """Raises ``ValueError`` with one line naming what changed since ``records`` were measured.

    ``left``: repeats that are still to be measured. A cell whose repeats mix two versions of torch, two commits or two
    machines can neither be compared nor accepted.
    """
    for record in records:
        name = record["cell"]["name"]
        if name not in cells:
            continue
        now = fingerprint(cells[name])
        changes = [
            *differences(record["fingerprint"]["software"], now["software"]),
            *differences(record["fingerprint"]["hardware"], now["hardware"]),
            *differences(_commit(record["code"]), _commit(code(cells[name]))),
        ]
        if record["cell_version"] != cell_version:
            changes.append("ndbench's own definition of the measurement")
        if changes and not left:
            raise ValueError(
                f"run {run} is complete, all its {len(records)} repeats are measured, on something else than is here "
                f"({shorten(changes)}): ndbench report {run} shows its verdict, ndbench compare {run} decides anew"
            )
        if changes:
            raise ValueError(
                f"run {run} has {len(records)} repeats measured on something else ({shorten(changes)}): go on with it "
                "there, or start a new run here"
            )


def _commit(code: Mapping[str, Any]) -> dict[str, Any]:
    commit = code["commit"]
    return {"commit": commit and commit[:10], "uncommitted changes": code["dirty"]}
