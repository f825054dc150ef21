from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from rich.console import Console

from ndbench.gate.ab import remarks, run_ab
from ndbench.gate.refs import merge_base, open_side, resolve_commit


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "src" / "pkg").mkdir(parents=True)
    (folder / "tools").mkdir()
    git(tmp_path, "init", "-q", "-b", "main", "repo")
    for number in (1, 2):
        (folder / "src" / "pkg" / "__init__.py").write_text(f"VALUE = {number}\n")
        (folder / "tools" / "keep").write_text("")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", str(number))
    return folder


def value_of(side_python: str, cwd: Path, environment: dict[str, str]) -> str:
    command = [side_python, "-c", "import pkg; print(pkg.VALUE)"]
    return subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_each_revision_is_imported_from_its_own_worktree_and_nothing_is_left_behind(repository: Path) -> None:
    for rev, value in (("HEAD~1", "1"), ("HEAD", "2")):
        with open_side("base", f"git:{rev}", cwd=repository) as side:
            assert value_of(side.python, side.cwd, side.environment) == value
            assert side.commit == resolve_commit(rev, repository)
            root = side.pythonpath[0]
        assert not root.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_side_starts_in_the_same_folder_of_its_worktree(repository: Path) -> None:
    with open_side("base", "git:HEAD", cwd=repository / "tools") as side:
        assert side.cwd.name == "tools"
        assert value_of(side.python, side.cwd, side.environment) == "2"


def test_the_setup_command_runs_in_the_worktree_and_its_failure_is_said(repository: Path) -> None:
    with open_side("base", "git:HEAD", setup="echo built > marker", cwd=repository) as side:
        assert (side.cwd / "marker").read_text() == "built\n"
    failing = open_side("base", "git:HEAD", setup="echo no compiler >&2; exit 3", cwd=repository)
    with pytest.raises(ValueError, match="ended with exit code 3 at git:HEAD: no compiler"):
        failing.__enter__()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_worktree_is_removed_when_the_measurement_fails(repository: Path) -> None:
    roots = []

    def interrupted() -> None:
        with open_side("base", "git:HEAD", cwd=repository) as side:
            roots.append(side.cwd)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not roots[0].exists()


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ("nothing", "is not a reference: git:REV"),
        ("git:", "is not a reference"),
        ("git:-x", "is not a reference"),
        ("git:absent", "git knows no commit 'absent' here"),
        ("set:", "is not a reference"),
        ("set:compile", "'compile' is not KEY=VALUE"),
        ("python:/no/such/python", "there is no interpreter"),
    ],
)
def test_a_wrong_reference_is_said_in_one_line(ref: str, said: str, repository: Path) -> None:
    with pytest.raises(ValueError, match=said):
        open_side("base", ref, cwd=repository).__enter__()


def test_a_shallow_clone_says_what_to_fetch(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    with pytest.raises(ValueError, match=r"this clone is shallow: fetch the whole history \(fetch-depth: 0\)"):
        open_side("base", "git:HEAD~1", cwd=tmp_path / "shallow").__enter__()


def test_outside_of_a_repository_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a git repository"):
        open_side("base", "git:main", cwd=tmp_path).__enter__()


def test_the_engine_of_the_repository_one_stands_in_is_found_without_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    text = "class Loop:\n    def refuse(self, cell):\n        return 'asked: {}'\n"
    for name, folder in (("refs_flat_loop", tmp_path), ("refs_src_loop", tmp_path / "src")):
        (folder / f"{name}.py").write_text(text.format(name))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    for name in ("refs_flat_loop", "refs_src_loop"):
        words = [f"engine.target={name}.Loop", "world_size=1", "hardware=cpu"]
        with pytest.raises(ValueError, match=f"asked: {name}"):
            run_ab(words, "here", "here", console=Console(quiet=True))
    assert sys.path == before
    with pytest.raises(ValueError, match=r"No module named 'refs_no_loop'; its folder must be on PYTHONPATH"):
        run_ab(["engine.target=refs_no_loop.Loop", "hardware=cpu"], "here", "here", console=Console(quiet=True))


def test_settings_are_overrides_of_one_side(tmp_path: Path) -> None:
    with open_side("head", "set:training.compile=true 'model.hf={a: 1}'", cwd=tmp_path) as side:
        assert side.overrides == ("training.compile=true", "model.hf={a: 1}")
        assert side.python == sys.executable


def test_an_interpreter_without_ndbench_is_refused_by_name(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True, with_pip=False)
    with pytest.raises(ValueError, match="ndbench must be installed there too"):
        open_side("base", f"python:{tmp_path / 'bare'}", cwd=tmp_path).__enter__()


def test_a_venv_stays_itself_though_its_python_is_a_link(tmp_path: Path) -> None:
    """Following the link would start the interpreter without the venv's packages."""
    link = tmp_path / "venv" / "bin"
    link.mkdir(parents=True)
    (link / "python").symlink_to(sys.executable)
    environment = os.environ.get("PYTHONPATH")
    site = Path(sys.executable).parent.parent
    if (site / "pyvenv.cfg").is_file():
        with pytest.raises(ValueError, match=str(link / "python")):
            open_side("base", f"python:{link / 'python'}", cwd=tmp_path).__enter__()
    else:
        with open_side("base", f"python:{link / 'python'}", cwd=tmp_path) as side:
            assert side.python == str(link / "python")
    assert os.environ.get("PYTHONPATH") == environment


def test_the_merge_base_is_where_the_branch_left(repository: Path) -> None:
    fork = git(repository, "rev-parse", "HEAD")
    git(repository, "checkout", "-q", "-b", "work")
    (repository / "x").write_text("")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "work")
    assert merge_base(repository) == (fork, "main")


def test_the_same_commit_on_both_sides_and_work_left_out_are_told(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)

    def told(base: str, head: str) -> list[str]:
        with open_side("base", base) as one, open_side("head", head) as other:
            return remarks([one, other])

    assert told("git:HEAD~1", "git:HEAD") == []
    commit = resolve_commit("HEAD", repository)
    assert commit is not None
    assert told("git:main", "git:HEAD") == [f"both sides are commit {commit[:12]}: what differs is noise"]
    (repository / "tools" / "keep").write_text("changed")
    assert told("git:HEAD~1", "here") == []
    (line,) = told("git:HEAD~1", "git:HEAD")
    assert "git:HEAD is without your uncommitted changes; 'here', the default head, has them" in line
