"""Code of the user's own, by its dotted path: what cannot be loaded is said in one line, and never a success."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ndbench import dotted
from ndbench.cli import main
from ndbench.config import ModelConfig, TrainingConfig
from ndbench.engines.bundled_refusals import refuse_training


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nothing", "is not a dotted path"),
        ("json.nothing", "has no attribute 'nothing'"),
        ("no_such_module.Thing", "No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_loaded_is_named(path: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"engine.target '{path}' .*{why}"):
        dotted.load(path, "engine.target", "Class")
    assert dotted.load("json:dumps", "engine.target", "Class") is __import__("json").dumps


def test_a_module_that_ends_the_process_measures_nothing_and_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text("import sys\nsys.exit(0)\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from ndbench.cli import main;"
        "sys.exit(main(['show', 'engine.target=ending.Foo', 'engine.name=x', 'world_size=1', 'hardware=cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "engine.target 'ending.Foo' cannot be imported: it calls sys.exit(0)" in done.stderr


def test_code_that_ends_the_process_later_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ndbench.cli._dispatch", lambda _: sys.exit(0))
    assert main(["list"]) == 2
    assert "called sys.exit(0)" in capsys.readouterr().err


@pytest.mark.parametrize("betas", [[0.9], [0.9, 0.95, 0.99], [2.0, 0.9], [0.9, -0.1], [0.9, float("nan")]])
def test_betas_are_two_and_below_one(betas: list[float]) -> None:
    (reason,) = refuse_training(TrainingConfig(betas=betas), ModelConfig(model_type="llama"))
    assert "two numbers from 0 to below 1" in reason
