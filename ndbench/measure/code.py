"""Which code was measured: the commit of the checkout that it lies in, and whether it had uncommitted changes.

ndbench's own engines are the package that was imported, wherever the command was started; code of the user's own is the
repository of the current folder. Asks git only, and imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ndbench
from ndbench.config import Cell
from ndbench.measure.devices import run_tool

OWN_ENGINES = ("ndbench", "accelerate", "torchtitan")
"""Engines whose code is in this package; a peer's library is named by its version."""

LIBRARIES = ("ndbench", "torch", "transformers")
"""Packages that a dotted path may name without being code of the user's: a record's ``software`` has their versions."""


def code_of(cell: Cell, cwd: str | Path = ".") -> dict[str, Any]:
    """``{"commit", "dirty"}`` of the code that a cell runs; both None where it lies in no checkout."""
    if is_users_code(cell):
        return code_version(cwd)
    root = package_checkout()
    return {"commit": None, "dirty": None} if root is None else code_version(root)


def is_users_code(cell: Cell) -> bool:
    """Whether a cell runs code of the user's own: a script, an engine, a model or an optimizer by its dotted path."""
    config = cell.config
    if config.engine.target is None and config.engine.name not in OWN_ENGINES:
        return True
    paths = (config.engine.target, config.model.target, config.training.optimizer)
    return any(path.replace(":", ".").split(".")[0] not in LIBRARIES for path in paths if path and _dotted(path))


def _dotted(path: str) -> bool:
    return "." in path or ":" in path


def package_folder() -> Path:
    """The folder of the ``ndbench`` that is imported."""
    return Path(ndbench.__file__).resolve().parent


def package_checkout(package: Path | None = None) -> Path | None:
    """The top folder of the git checkout that keeps the imported package (or ``package``); None for an installed copy.

    The package must be among git's files: a virtual environment may lie inside of a checkout.
    """
    package = package_folder() if package is None else package
    where = ("git", "-C", str(package))
    if run_tool(*where, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    top = run_tool(*where, "rev-parse", "--show-toplevel")
    return None if top is None else Path(top.rstrip("\n"))


def another_package(cwd: Path | None = None, package: Path | None = None) -> str | None:
    """One line where the current folder lies in a checkout of ndbench that is not the one imported; else None."""
    package = package_folder() if package is None else package
    here = (cwd or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        own = folder / "ndbench"
        if (own / "cli.py").is_file() and (own / "measure").is_dir():
            if own == package:
                return None
            return f"measures the ndbench installed in {package}, not this checkout's ({own}): pip install -e {folder}"
        if (folder / ".git").exists():
            break
    return None


def code_version(cwd: str | Path = ".") -> dict[str, Any]:
    """``{"commit", "dirty"}`` of the git checkout at ``cwd``; both None outside of one or without git.

    Untracked files do not make a checkout dirty: results are written beside the code.
    """
    commit = run_tool("git", "-C", str(cwd), "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    status = run_tool("git", "-C", str(cwd), "status", "--porcelain", "--untracked-files=no", timeout=20.0)
    return {"commit": commit.strip(), "dirty": None if status is None else bool(status.strip())}
