"""What the two sides of an A/B are: ``git:REV``, ``python:PATH``, ``set:'k=v …'`` or ``here``.

Turns a reference into an interpreter, a folder to start in, a PYTHONPATH and overrides. Starts no measurement.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = "here"
KINDS = "git:REV, python:PATH, set:'KEY=VALUE …' or here"


@dataclass(frozen=True)
class Side:
    """One side as it can be started."""

    label: str
    """``base`` or ``head``."""
    ref: str
    python: str
    cwd: Path
    pythonpath: tuple[Path, ...] = ()
    """Put first on PYTHONPATH."""
    overrides: tuple[str, ...] = ()
    commit: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        inherited = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        if self.pythonpath:
            environment["PYTHONPATH"] = os.pathsep.join([*map(str, self.pythonpath), *inherited])
        return environment


@contextlib.contextmanager
def importable(sides: Sequence[Side]) -> Iterator[None]:
    """While the sides' engines are asked here what they refuse: their code is found as it is there, from the current
    folder first. After all that is installed, so that nothing of this process is hidden."""
    here = Path.cwd()
    paths = [here, *([here / "src"] if (here / "src").is_dir() else [])]
    paths += [path for side in reversed(sides) for path in side.pythonpath]
    before = list(sys.path)
    sys.path.extend(str(path) for path in paths if str(path) not in before)
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def open_side(label: str, ref: str, *, setup: str | None = None, cwd: Path | None = None) -> Iterator[Side]:
    """A side ready to start; a worktree is removed again at the end.

    ``setup`` is a command run in a worktree before anything is measured there, for packages that need building.
    Raises ``ValueError`` naming what is wrong with the reference.
    """
    start = (cwd or Path.cwd()).resolve()
    kind, _, value = ref.partition(":")
    if ref == HERE:
        yield Side(label, ref, sys.executable, start)
    elif kind == "set" and value.strip():
        yield Side(label, ref, sys.executable, start, overrides=tuple(_overrides(ref, value)))
    elif kind == "python" and value:
        yield Side(label, ref, _interpreter(ref, value), start)
    elif kind == "git" and value and not value.startswith("-"):
        with _worktree(ref, value, start) as (root, commit):
            top = Path(_git(start, "rev-parse", "--show-toplevel")).resolve()
            inside = root / start.relative_to(top)
            inside.mkdir(parents=True, exist_ok=True)  # the folder may be younger than the revision
            paths = [path for path in (inside, root, root / "src") if path.is_dir()]
            side = Side(label, ref, sys.executable, inside, tuple(dict.fromkeys(paths)), commit=commit)
            if setup:
                _run_setup(setup, side, root)
            yield side
    else:
        raise ValueError(f"--{label} {ref!r} is not a reference: {KINDS}")


def _overrides(ref: str, text: str) -> list[str]:
    words = shlex.split(text)
    bad = [word for word in words if "=" not in word]
    if bad:
        raise ValueError(f"{ref}: '{bad[0]}' is not KEY=VALUE")
    return words


def _interpreter(ref: str, value: str) -> str:
    """The interpreter of a venv's folder or of a path; not resolved, for a venv's python is a link."""
    path = Path(value).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    found = shutil.which(str(path))
    if found is None:
        raise ValueError(f"{ref}: there is no interpreter at {path}")
    absolute = os.path.abspath(found)  # noqa: PTH100 - Path.resolve would follow the link out of the venv
    probe = subprocess.run(
        [absolute, "-c", "import ndbench.gate.agent"], capture_output=True, text=True, timeout=120, check=False, cwd="/"
    )
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"{ref}: {absolute} cannot measure, ndbench must be installed there too ({last})")
    return absolute


def resolve_commit(rev: str, cwd: Path) -> str | None:
    """The full commit of a revision of the repository at ``cwd``; null when git knows none."""
    done = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout.strip() if done.returncode == 0 else None


def uncommitted(cwd: Path) -> bool:
    """Has a file that git keeps at ``cwd`` changed since the last commit?"""
    return bool(_git(cwd, "status", "--porcelain", "--untracked-files=no"))


def refuse_base(ref: str, cwd: Path) -> None:
    """Raises ``ValueError`` when ``gate.base`` names a revision or an interpreter that is not there; starts nothing."""
    kind, _, value = ref.partition(":")
    if kind == "git" and (value.startswith("-") or resolve_commit(value, cwd) is None):
        raise ValueError(f"gate.base={ref}: git knows no commit '{value}' here")
    path = Path(value).expanduser()
    if kind == "python" and shutil.which(str(path / "bin" / "python" if path.is_dir() else path)) is None:
        raise ValueError(f"gate.base={ref}: there is no interpreter at {path}")


def merge_base(cwd: Path) -> tuple[str, str] | None:
    """(commit, what it was merged with): where this branch left the default branch; null when there is none."""
    for branch in ("origin/HEAD", "origin/main", "origin/master", "main", "master"):
        if resolve_commit(branch, cwd) is None:
            continue
        done = subprocess.run(
            ["git", "merge-base", "HEAD", branch], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode == 0:
            return done.stdout.strip(), branch
    return None


def _git(cwd: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    except FileNotFoundError as error:
        raise ValueError("git:REV needs the git program, which is not installed") from error
    if done.returncode != 0:
        raise ValueError(f"git {arguments[0]} in {cwd}: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


@contextlib.contextmanager
def _worktree(ref: str, rev: str, cwd: Path) -> Iterator[tuple[Path, str]]:
    """A detached worktree of ``rev`` in a temporary folder, and its commit."""
    _git(cwd, "rev-parse", "--show-toplevel")
    commit = resolve_commit(rev, cwd)
    if commit is None:
        shallow = _git(cwd, "rev-parse", "--is-shallow-repository") == "true"
        hint = "; this clone is shallow: fetch the whole history (fetch-depth: 0)" if shallow else ""
        raise ValueError(f"{ref}: git knows no commit '{rev}' here{hint}")
    parent = Path(tempfile.mkdtemp(prefix="ndbench-ab-"))
    root = parent / commit[:12]
    try:
        _git(cwd, "worktree", "add", "--detach", "--quiet", str(root), commit)
        yield root.resolve(), commit
    finally:
        with contextlib.suppress(ValueError):  # never hide what went wrong above
            _git(cwd, "worktree", "remove", "--force", str(root))
        shutil.rmtree(parent, ignore_errors=True)
        with contextlib.suppress(ValueError):
            _git(cwd, "worktree", "prune")


def _run_setup(command: str, side: Side, root: Path) -> None:
    done = subprocess.run(
        command, shell=True, cwd=root, env=side.environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no output"]
        raise ValueError(f"--setup {command!r} ended with exit code {done.returncode} at {side.ref}: {last[0]}")
