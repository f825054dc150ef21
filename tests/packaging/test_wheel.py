"""What is installed is whole: the wheel and the sdist hold the configuration, and work away from the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    find_spec("hatchling") is None or not (ROOT / "pyproject.toml").is_file(), reason="needs hatchling and the sources"
)


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=240, env=inherited | environment
    )


def build(kind: str, folder: Path) -> Path:
    done = run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [built] = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel in it, for PYTHONPATH, ahead of any editable install."""
    target = tmp_path_factory.mktemp("installed")
    done = run(
        *(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"),
        *("--target", str(target), str(wheel)),
        cwd=target,
    )
    assert done.returncode == 0, done.stderr
    return target


def yaml_files(folder: str) -> set[str]:
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.yaml")}


def test_the_wheel_holds_every_configuration_file_and_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "suites"):
        assert yaml_files(folder)
        assert {f"ndbench/_{folder}/{name}" for name in yaml_files(folder)} <= names
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ndbench").rglob("*.py")}
    assert modules <= names
    assert "ndbench/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "results", "conf/"))]
    assert not [name for name in names if name.endswith((".pyc", ".txt")) and ".dist-info" not in name]


def test_the_sdist_holds_sources_configuration_tests_and_constraints(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("conf", "suites"):
        assert {f"{folder}/{name}" for name in yaml_files(folder)} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "ndbench/cli.py"} <= names
    assert "tests/packaging/test_wheel.py" in names


def test_the_installed_wheel_shows_a_suite_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = run(
        *(sys.executable, "-m", "ndbench", "show", "suite=smoke", "--json"),
        cwd=tmp_path,
        PYTHONPATH=str(installed),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert [cell["name"] for cell in json.loads(done.stdout)["cells"]] == ["ddp2", "fsdp2"]
    assert list(tmp_path.iterdir()) == []


def test_the_installed_wheel_reads_its_own_files_and_the_users(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "ours.yaml").write_text("defaults: [llama_tiny]\nname: ours\n")
    command = (sys.executable, "-m", "ndbench", "list", "models", "--config-dir", "mine", "--json")
    done = run(*command, cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    models = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert models["ours"]["yours"]
    assert Path(models["llama_tiny"]["file"]).is_relative_to(installed / "ndbench" / "_conf")

    (tmp_path / "mine" / "model" / "llama_8b.yaml").write_text("name: llama_8b\n")
    clash = run(*command, cwd=tmp_path, PYTHONPATH=str(installed))
    assert clash.returncode == 2
    assert str(tmp_path / "mine" / "model" / "llama_8b.yaml") in clash.stderr
    assert str(installed / "ndbench" / "_conf" / "model" / "llama_8b.yaml") in clash.stderr


def test_every_version_that_was_tested_is_named_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert all(re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", line) for line in lines)
    assert pinned["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *(entry for extra in extras.values() for entry in extra)]:
        name = re.match(r"[A-Za-z0-9-]+", requirement)
        assert name is not None
        if name[0] != project["name"]:  # an extra of our own: checked where it is defined
            assert name[0].lower() in pinned, f"{requirement} has no tested version in constraints.txt"


OFFLINE = """
import fcntl, os, socket, struct, sys
interface = struct.pack("16sh", b"lo", 1 | 64)  # IFF_UP and IFF_RUNNING: gloo's ranks talk over it
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
    fcntl.ioctl(link, 0x8914, interface)  # SIOCSIFFLAGS
    try:
        link.connect(("192.0.2.1", 9))
    except OSError:
        pass
    else:
        sys.exit("there is a way out of this namespace")
os.execv(sys.executable, [sys.executable, "-m", "ndbench", *sys.argv[1:]])
"""


def can_unshare() -> bool:
    try:
        return subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False, timeout=30).returncode == 0
    except OSError:
        return False


@pytest.mark.timeout(300)
@pytest.mark.skipif(not can_unshare(), reason="needs unshare and the right to make a network namespace")
def test_the_installed_wheel_measures_in_an_empty_folder_without_a_network(installed: Path, tmp_path: Path) -> None:
    done = run(
        *("unshare", "-rn", sys.executable, "-c", OFFLINE, "suite=smoke"),
        cwd=tmp_path,
        PYTHONPATH=str(installed),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = (tmp_path / "results" / "runs").iterdir()
    records = [json.loads(path.read_text()) for path in (folder / "records").iterdir()]
    assert sorted((record["cell"]["name"], record["outcome"]) for record in records) == [
        ("ddp2", "ok"),
        ("fsdp2", "ok"),
    ]
    assert {record["cell"]["data"]["name"] for record in records} == {"source"}
    accepted = run(
        *(sys.executable, str(installed / "bin" / "ndbench"), "baseline", "accept", "latest", "--reason", "first"),
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
    assert accepted.returncode == 0, accepted.stderr
    listed = run(
        *(sys.executable, "-m", "ndbench", "baseline", "list", "--json"), cwd=tmp_path, PYTHONPATH=str(installed)
    )
    assert [entry["suite"] for entry in json.loads(listed.stdout)] == ["smoke"]
