"""Which baseline a person means by a folder or by ``HARDWARE/SUITE``."""

from __future__ import annotations

from pathlib import Path


def baseline_at(name: str | Path | None, results_dir: str | Path = "results") -> Path:
    """Folder of one suite's baseline. ``name`` is that folder, or ``HARDWARE/SUITE`` below ``<results_dir>/baselines``,
    or null where there is only one.

    Raises ``ValueError`` naming those there are.
    """
    root = Path(results_dir) / "baselines"
    known = sorted({path.parent.parent.relative_to(root).as_posix() for path in root.glob("*/*/*/session.json")})
    if name is None and len(known) == 1:
        return root / known[0]
    for folder in [] if name is None else [Path(name), root / name]:
        if any(folder.glob("*/session.json")):
            return folder
    there_are = f"there are: {', '.join(known)}" if known else "there are none"
    if name is None:
        raise ValueError(f"name one of the {len(known)} baselines in {root}; {there_are}")
    raise ValueError(f"'{name}' is not a baseline: no folder with sessions, and not one in {root}; {there_are}")
