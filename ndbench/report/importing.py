"""What became of an imported configuration: every key with its fate, then the command lines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ndbench.importing.findings import ASSUMED, LOST, TRANSLATED, UNDERSTOOD
from ndbench.importing.translate import Imported

if TYPE_CHECKING:
    from ndbench.matrix.expand import Matrix

TITLES = {
    TRANSLATED: "translated",
    UNDERSTOOD: "understood, nothing to set",
    LOST: "not carried over",
    ASSUMED: "not in the file: what its tool does then",
}
STYLES = {TRANSLATED: "green", UNDERSTOOD: "dim", LOST: "yellow", ASSUMED: ""}


def print_imported(
    imported: Imported, matrix: Matrix | None, suite: Path | None, console: Console, train_refused: str | None = None
) -> None:
    """``matrix``: what the overrides make, None when the model is not known. ``suite``: the file that was written.

    ``train_refused``: why ``ndbench train`` would not take its line.
    """
    by_status = {status: [one for one in imported.findings if one.status == status] for status in TITLES}
    counts = ", ".join(f"{len(by_status[status])} {status}" for status in (TRANSLATED, UNDERSTOOD, LOST))
    keys = sum(len(by_status[status]) for status in (TRANSLATED, UNDERSTOOD, LOST))
    console.print(Text(f"{imported.tool} configuration {imported.path}: {keys} keys, {counts}"), style="bold")
    for status, title in TITLES.items():
        if not by_status[status]:
            continue
        console.print(Text(f"\n{title}"), style=f"bold {STYLES[status]}".strip())
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(overflow="fold", ratio=4)
        table.add_column(overflow="fold", ratio=6)
        for one in by_status[status]:
            said = [text for text in (" ".join(one.overrides), one.why) if text]
            table.add_row(Text(f"{_short(one.key)}: {one.value}" if one.value else one.key), Text("  ".join(said)))
        console.print(table)
    for note in imported.notes:
        console.print(Text(f"\nnote: {note}"), style="yellow", soft_wrap=not console.is_terminal)
    for title, command in _commands(imported, matrix, suite, train_refused):
        console.print(Text(f"\n{title}"), style="bold")
        console.print(Text(command), soft_wrap=True)


def _short(key: str) -> str:
    """Without its section where the key itself begins with it (``fsdp_config.fsdp_version``)."""
    section, _, name = key.partition(".")
    return name if name.startswith(section.removesuffix("config")) else key


def _commands(
    imported: Imported, matrix: Matrix | None, suite: Path | None, train_refused: str | None
) -> list[tuple[str, str]]:
    if matrix is None:
        return [("with the model added, this measures it:", f"{imported.command} model=FOLDER")]
    found = [("measure it:", imported.command)]
    if train_refused is not None:
        found.append(("ndbench train would refuse it:", train_refused))
    elif imported.train_command:
        comments = [f"# {lack}" for lack in imported.train_lacks]
        found.append(("train with it:", "\n".join([*comments, imported.train_command])))
    if suite is not None:
        found.append((f"{suite} is written:", f"ndbench suite={suite.stem} --config-dir {suite.parent.parent}"))
    names = [cell.name for cell in matrix.cells]
    names += [f"{cell.name}, which cannot run here: {reason}" for cell, reason in matrix.skipped]
    found.append(
        (f"it is one cell, {', '.join(names)}; its plan:", f"ndbench show {imported.command.removeprefix('ndbench ')}")
    )
    return found


def imported_json(imported: Imported, matrix: Matrix | None, train_refused: str | None = None) -> dict[str, Any]:
    """The same facts as plain data."""
    return {
        "tool": imported.tool,
        "file": imported.path,
        "overrides": list(imported.overrides),
        "train_overrides": list(imported.train_overrides),
        "command": imported.command if matrix is not None else None,
        "train_command": (imported.train_command or None) if train_refused is None else None,
        "train_refused": train_refused,
        "train_lacks": list(imported.train_lacks),
        "model_missing": imported.missing_model,
        "cells": []
        if matrix is None
        else [cell.name for cell in [*matrix.cells, *(cell for cell, _ in matrix.skipped)]],
        "keys": [dataclasses.asdict(finding) for finding in imported.findings],
        "notes": list(imported.notes),
    }
