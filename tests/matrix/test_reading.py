"""What a YAML file may not be is said in one line, with its name and the key, and at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ndbench.matrix.expand import expand
from ndbench.matrix.reading import read_yaml
from tests.cli.conftest import Command
from tests.cli.conftest import ndbench as ndbench
from tests.matrix.conftest import Write, matrix_of, names

TWO = "settings: {all: {world_size: 2}}\nlayouts: {2: [ddp2]}\n"


def refused(user: Write, tmp_path: Path, text: str) -> str:
    """What is said of the suite ``x``, less the file that it begins with."""
    path = user("suites/x.yaml", text)
    with pytest.raises(ValueError) as said:
        expand(["suite=x", "hardware=cpu"], tmp_path)
    line = str(said.value)
    assert "\n" not in line
    assert line.startswith(str(path))
    assert "cpu.yaml" not in line, "a shipped file is not to blame"
    return line.removeprefix(str(path)).removeprefix(" cannot be read").removeprefix(": ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layouts: {2: [ddp2], 2: [tp2]}\n", "layouts.2 is given twice (again in line 1)"),
        (
            "axes:\n  training.steps: [4]\n  training.steps: [8]\n",
            "axes.training.steps is given twice (again",
        ),
        ("settings: {all: {world_size: 2}}\nsettings: {cpu: {}}\n", "settings is given twice (again in line 2)"),
        ("points: {a: {training: {steps: 4, steps: 8}}}\n", "points.a.training.steps is given twice"),
        ("settings: {all: {training.steps: 4, training: {steps: 8}}}\n", "training.steps is given twice: once dotted"),
        ("points: {a: {training: {steps: 8}, training.steps: 4}}\n", "training.steps is given twice: once dotted"),
        ("include: [{training: {steps: 8}, training.steps: 4}]\n", "training.steps is given twice: once dotted"),
        ("settings: {all: {model.hf: {a: 1}, model.hf.a: 2}}\n", "model.hf.a is given twice: model.hf is given, too"),
    ],
)
def test_a_key_that_is_given_twice_is_named(user: Write, tmp_path: Path, text: str, said: str) -> None:
    assert refused(user, tmp_path, text).startswith(said)


@pytest.mark.parametrize("text", ["hidden_size: 64\nhidden_size: 32\n", "hf:\n  a: 1\n  a: 2\n"])
def test_a_key_given_twice_in_another_file_is_named_too(user: Write, tmp_path: Path, text: str) -> None:
    path = user("model/twice.yaml", f"defaults: [llama_tiny]\n{text}")
    user("model/above.yaml", "defaults: [twice]\n")
    for name in ("twice", "above"):
        with pytest.raises(ValueError, match=r"(hidden_size|hf\.a) is given twice") as said:
            expand([f"model={name}", "hardware=cpu"], tmp_path)
        assert str(said.value).startswith(str(path))


def test_a_merge_key_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert read_yaml(path)["b"] == {"x": 1, "y": 3}


def test_numbers_and_dates_are_read_as_hydra_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1e-3\nb: 2020-01-01\nc: .5\nd: 1_000\ne: 3.0e+2\nf: 12:30\ng: .inf\n")
    assert read_yaml(path) == {
        "a": 1e-3,
        "b": "2020-01-01",
        "c": 0.5,
        "d": 1000,
        "e": 300.0,
        "f": 750,
        "g": float("inf"),
    }


def bomb(depth: int, width: int, merge: bool = False) -> str:
    lines = ["settings:", "  a0: &a0 {x: 1}"]
    for level in range(1, depth):
        item = f"*a{level - 1}"
        many = "[" + ", ".join([item] * width) + "]"
        lines.append(f"  a{level}: &a{level} " + (f"{{<<: {many}}}" if merge else many))
    return "\n".join(lines) + "\n"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("group", ["suites", "model"])
def test_aliases_of_aliases_are_refused_at_once(user: Write, tmp_path: Path, merge: bool, group: str) -> None:
    user(f"{group}/x.yaml", bomb(30, 10, merge))
    chosen = "suite=x" if group == "suites" else "model=x"
    with pytest.raises(ValueError, match=r"x\.yaml cannot be read: .* more than 100,000 values when its aliases"):
        expand([chosen, "hardware=cpu"], tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("settings: &a {all: *a}\n", "settings.all is an alias of what it stands in"),
        ("settings: {all: {training.steps: '???'}}\n", "settings.all.training.steps is '???', which stands for"),
        ("settings:\n all:\n  training.steps: ???\n", "settings.all.training.steps is '???', which stands for"),
        ("settings: {all: {training.steps: 2020-01-01}}\n", "training.steps=2020-01-01 is not a whole number"),
        (
            f"settings: {{all: {{training.steps: {'9' * 6000}}}}}\n",
            "settings.all.training.steps is a whole number",
        ),
        (
            f"settings: {{all: {{training.steps: 0x{'f' * 6000}}}}}\n",
            "settings.all.training.steps is a whole number",
        ),
        (f"settings: {'[' * 100_000}\n", "it is nested too deeply"),
        (f"settings: {'{a: ' * 100_000}\n", "it is nested too deeply"),
        ("settings: {all: !!set {a, b}}\n", "settings.all is a !!set, which no setting is"),
        ("settings: {all: !!python/object:os.system {}}\n", "settings.all is a !!python/object:os.system"),
        ("settings: {all: {training.steps: '${nothing}'}}\n", "Interpolation key 'nothing' not found"),
        ("layouts: {two: [ddp2]}\n", "layouts.two: 'two' is not a world size; expected is a mapping of world sizes"),
        ("layouts: {true: [ddp2]}\n", "layouts.True: 'True' is not a world size"),
        ("layouts: null\n", "layouts is null, expected is a mapping of world sizes to lists of layouts"),
        ("layouts: [ddp2]\n", "layouts is '['ddp2']', expected is a mapping of world sizes"),
        ("factorise: tp\n", "factorise is 'tp', expected is a list of axes, as [dp_shard, tp]"),
        ("factorise: [[tp]]\n", "factorise holds '['tp']', expected is a list of axes"),
        ("exclude: 'tp == 1'\n", "exclude is 'tp == 1', expected is a list of expressions, as ['tp == 1']"),
        ("include: {tp: 1}\n", "include is '{'tp': 1}', expected is a list of expressions"),
        ("axes: [a]\n", "axes is '['a']', expected is a mapping of keys to lists of values"),
        ("points: null\n", "points is null, expected is a mapping of names to keys and values"),
        ("points: {1: {training.steps: 3}}\n", "points has the key 1, which is not text: quote it"),
        ("settings: {all: {1: 3}}\n", "settings has the key 1, which is not text: quote it"),
        ("settings: {cpu: [3]}\n", "settings.cpu is '[3]', expected is a mapping"),
        ("gate: true\n", "gate is true, expected is a mapping of keys of gate to values"),
        ("axis: {}\n", "there is no 'axis' in a suite (did you mean axes?)"),
    ],
    ids=lambda text: text[:40],
)
@pytest.mark.timeout(60)
def test_a_suite_that_cannot_be_read_is_one_line_with_its_key(
    user: Write, tmp_path: Path, text: str, said: str
) -> None:
    assert refused(user, tmp_path, text).startswith(said)


def test_a_broken_suite_does_not_stop_another(user: Write, tmp_path: Path) -> None:
    user("suites/broken.yaml", "layouts: null\n")
    assert names(matrix_of(user, tmp_path, TWO)) == ["ddp2"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["suites/pipe.yaml", "suite/pipe.yaml", "model/pipe.yaml"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(ndbench: Command, tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    for argv in (["show", "suite=smoke"], ["list", "models"], ["list", "suites"]):
        result = ndbench(*argv, "--config-dir", "mine")
        assert (result.code, result.err) == (2, f"ndbench: {path} is not a regular file\n")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_yaml(path)
