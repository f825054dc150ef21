"""What ``docs/suites.md`` shows is true: its files are suites, and each command has the cells that stand behind it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ndbench.cli import main
from ndbench.matrix.expand import expand
from ndbench.matrix.reading import read_yaml
from ndbench.matrix.sources import find_sources
from ndbench.matrix.suite import SuiteConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "suites.md").read_text()
README = (ROOT / "README.md").read_text()


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def written(folder: Path, page: str = PAGE) -> list[str]:
    """The page's files below ``folder``; their names, which stand in their first line."""
    names = []
    for block in blocks("yaml", page):
        if (found := re.match(r"# (\S+\.yaml)\b", block)) is None:
            assert page is not PAGE
            continue
        name = found[1]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(block)
        names.append(name)
    return names


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_shows_the_cells_behind_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    command, _, names = line.partition("#")
    program, *words = shlex.split(command)
    assert program == "ndbench"
    assert words[0] == "show"
    if "--json" not in words:
        words.append("--json")
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert not names or [cell["name"] for cell in shown["cells"]] == names.strip().split(", ")
    told = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("The same as JSON") :]))
    assert {*shown, *shown["cells"][0], "reason"} == told


def test_the_readmes_example_is_a_suite(tmp_path: Path) -> None:
    written(tmp_path, README)
    cells = expand(["suite=mine", "hardware=cpu"], tmp_path / "DIR").cells
    assert [cell.name for cell in cells] == ["fsdp8-fp32", "fsdp4_tp2-fp32", "fsdp8-bf16", "fsdp4_tp2-bf16"]
    assert {cell.config.model.name for cell in cells} == {"mine"}


def test_a_warning_of_the_page_is_said(tmp_path: Path) -> None:
    written(tmp_path)
    [warning] = expand(["suite=pairs", "hardware=cpu"], tmp_path / "mine").warnings
    assert f"`{warning}`" in PAGE


def test_every_file_of_the_page_is_used_and_every_key_of_a_suite_explained(tmp_path: Path) -> None:
    names = written(tmp_path)
    suites = [name for name in names if "/suites/" in name]
    assert {f"suite={Path(name).stem}" for name in suites} <= {word for line in COMMANDS for word in line.split()}
    find_sources(tmp_path / "mine")
    keys = {name for name in SuiteConfig.__dataclass_fields__ if name != "name"}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == keys
    assert {key for name in suites for key in read_yaml(tmp_path / name)} == keys - {"gate"}
