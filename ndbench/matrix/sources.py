"""Where configuration files are: the shipped ``conf`` and ``suites``, and what ``--config-dir`` adds.

Knows folders and names only; reads no configuration and imports no Hydra, so that tab completion stays fast.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent

GROUPS = (
    "model",
    "hardware",
    "parallelism",
    "training",
    "data",
    "engine",
    "measure",
    "gate",
    "launcher",
    "tracker",
    "checkpoint",
    "evaluation",
    "suite",
)
"""Groups of configuration files; ``suite`` files lie in ``suites/``."""

SUITE_FOLDERS = ("suites", "suite")


def shipped(name: str) -> Path:
    """``conf`` or ``suites``: inside the installed package, else beside it in the repository."""
    packaged = PACKAGE / f"_{name}"
    return packaged if packaged.is_dir() else PACKAGE.parent / name


@dataclass(frozen=True)
class Sources:
    """Files by group and name. Build with :func:`find_sources`."""

    conf: Path
    files: dict[str, dict[str, Path]]
    config_dir: Path | None

    def names(self, group: str) -> list[str]:
        return sorted(self.files[group])

    def require(self, group: str, name: str) -> Path:
        """Path of a group's file; raises ``ValueError`` with close names when there is none."""
        if name not in self.files[group]:
            raise ValueError(
                f"{group}={name} is not known{close_to(name, self.files[group])}; "
                f"there are: {', '.join(self.names(group))}"
            )
        return self.files[group][name]


def find_sources(config_dir: str | Path | None = None) -> Sources:
    """The shipped files and the user's. Raises ``ValueError`` when ``config_dir`` is no folder, or when one of its
    files has the name of a shipped one (naming both)."""
    conf = shipped("conf")
    files = {group: _yaml_files(conf / group) for group in GROUPS if group != "suite"}
    files["suite"] = _yaml_files(shipped("suites"))
    folder = None
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise ValueError(f"--config-dir {config_dir} is not a folder")
        _refuse_same(folder / "config.yaml", conf / "config.yaml")
        for group in GROUPS:
            for name in SUITE_FOLDERS if group == "suite" else (group,):
                for stem, path in _yaml_files(folder / name).items():
                    if stem in files[group]:
                        _refuse_same(path, files[group][stem])
                    files[group][stem] = path
    return Sources(conf, files, folder)


def _yaml_files(folder: Path) -> dict[str, Path]:
    found = {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder.is_dir() else {}
    for path in found.values():
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for without an end
            raise ValueError(f"{path} is not a regular file")
    return found


def _refuse_same(user: Path, existing: Path) -> None:
    if user.is_file():
        raise ValueError(f"{user} has the name of {existing}: rename it, a file is never replaced in silence")


def close_to(name: str, known: Iterable[str]) -> str:
    """`` (did you mean a or b?)`` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
