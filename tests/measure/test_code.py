"""A record names the commit of the code that ran, wherever the command was started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ndbench.config import Cell, Config
from ndbench.measure import code as module
from ndbench.measure import doctor
from ndbench.measure.code import another_package, code_of, code_version, is_users_code, package_checkout

UNKNOWN = {"commit": None, "dirty": None}
ROOT = Path(__file__).parents[2]


def git(folder: Path, *command: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *identity, *command], check=True, capture_output=True, timeout=30)


def test_the_code_version_says_whether_the_checkout_is_dirty(tmp_path: Path) -> None:
    assert code_version(tmp_path) == {"commit": None, "dirty": None}
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("a = 1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "a")
    clean = code_version(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "results.json").write_text("{}")
    assert code_version(tmp_path)["dirty"] is False
    (tmp_path / "a.py").write_text("a = 2\n")
    assert code_version(tmp_path)["dirty"] is True


def committed(folder: Path, *files: str) -> str:
    """A repository with these files committed; its commit."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")
        git(folder, "add", file)
    git(folder, "commit", "-q", "--allow-empty", "-m", "a")
    commit: str = code_version(folder)["commit"]
    return commit


def cell(**paths: str) -> Cell:
    config = Config()
    for name, value in paths.items():
        group, _, key = name.partition("_")
        setattr(getattr(config, group), key, value)
    return Cell(name="c", suite="s", config=config)


def checkout_of_ndbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A checkout that the imported package is said to lie in."""
    commit = committed(tmp_path / "source", "ndbench/__init__.py", "ndbench/cli.py", "ndbench/measure/code.py")
    package = tmp_path / "source" / "ndbench"
    monkeypatch.setattr(module, "package_folder", lambda: package)
    return package, commit


@pytest.mark.parametrize(
    ("paths", "users"),
    [
        ({}, False),
        ({"engine_name": "accelerate"}, False),
        ({"engine_name": "torchtitan"}, False),
        ({"engine_target": "ndbench.gate.faulty.FaultyEngine"}, False),
        ({"training_optimizer": "torch.optim.Adagrad"}, False),
        ({"engine_name": "command"}, True),
        ({"engine_name": "registered_by_a_package"}, True),
        ({"engine_target": "loop.MyLoop"}, True),
        ({"model_target": "mine.models:build"}, True),
        ({"training_optimizer": "mine.Lion"}, True),
    ],
)
def test_the_commit_is_the_packages_and_for_code_of_the_users_that_of_the_current_folder(
    paths: dict[str, str], users: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, own = checkout_of_ndbench(tmp_path, monkeypatch)
    here = committed(tmp_path / "here", "train.py")
    assert own != here
    assert is_users_code(cell(**paths)) is users
    assert code_of(cell(**paths), tmp_path / "here") == {"commit": here if users else own, "dirty": False}


def test_an_edit_of_the_package_is_an_uncommitted_change_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, own = checkout_of_ndbench(tmp_path, monkeypatch)
    (package / "cli.py").write_text("edited")
    assert code_of(cell(), tmp_path) == {"commit": own, "dirty": True}


def test_a_copy_in_a_virtual_environment_has_no_commit_though_that_lies_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(tmp_path, "ndbench/__init__.py", "ndbench/cli.py", "ndbench/measure/code.py")
    installed = tmp_path / ".venv" / "lib" / "site-packages" / "ndbench"
    shutil.copytree(tmp_path / "ndbench", installed)
    assert package_checkout(tmp_path / "ndbench") == tmp_path.resolve()
    assert package_checkout(installed) is None
    monkeypatch.setattr(module, "package_folder", lambda: installed)
    assert code_of(cell(), tmp_path) == UNKNOWN


def test_a_worktree_of_an_a_b_is_known_by_its_own_commit(tmp_path: Path) -> None:
    source = tmp_path / "source"
    first = committed(source, "ndbench/__init__.py")
    git(source, "commit", "-q", "--allow-empty", "-m", "b")
    git(source, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"), first)
    found = package_checkout(tmp_path / "tree" / "ndbench")
    assert found is not None
    assert code_version(found)["commit"] == first != code_version(source)["commit"]


def test_a_checkout_whose_package_is_not_the_one_imported_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, _ = checkout_of_ndbench(tmp_path, monkeypatch)
    other = tmp_path / "other"
    committed(other, "ndbench/cli.py", "ndbench/measure/code.py", "docs/page.md")
    assert another_package(package.parent) is None
    assert another_package(tmp_path) is None
    committed(tmp_path / "other" / "theirs", "train.py")  # a repository of its own, inside
    assert another_package(other / "theirs") is None
    for folder in (other, other / "docs"):
        told = another_package(folder)
        assert told is not None
        assert f"measures the ndbench installed in {package}, not this checkout's" in told
        assert told.endswith(f"pip install -e {other.resolve()}")
    monkeypatch.chdir(other)
    (finding,) = doctor.code()
    assert (finding.level, finding.subject) == ("warn", "code")


def test_doctor_names_the_commit_or_that_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, commit = checkout_of_ndbench(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert doctor.code()[0].text == f"ndbench of {package.parent.resolve()}, {commit[:10]}"
    shutil.rmtree(package.parent / ".git")
    monkeypatch.setattr(doctor, "package_folder", lambda: package)
    assert doctor.code()[0].text == f"ndbench in {package}, in no checkout: records name no commit of it"


@pytest.mark.timeout(240)
def test_a_run_from_another_checkout_says_so_before_it_starts_and_names_no_commit_of_it(tmp_path: Path) -> None:
    """The whole way, with an installed copy that is in no checkout."""
    site, other = tmp_path / "site", tmp_path / "other"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ndbench", site / "ndbench", ignore=skip)
    for folder in ("conf", "suites"):
        shutil.copytree(ROOT / folder, site / "ndbench" / f"_{folder}")
    committed(other, "ndbench/cli.py", "ndbench/measure/code.py")
    words = ["hardware=cpu", "world_size=1", "model=llama_tiny", "training.steps=3", "measure.repeats=1"]
    start = f"import sys; sys.path.insert(0, {str(site)!r}); from ndbench.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", start, *words, "measure.warmup=1", "training.global_batch_size=2"],
        cwd=other,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert f"measures the ndbench installed in {site / 'ndbench'}, not this checkout's" in done.stdout, done.stderr
    (record,) = (other / "results" / "runs").glob("*/records/*")
    found: dict[str, Any] = json.loads(record.read_text())
    assert found["code"] == UNKNOWN
