"""Tab completion: verbs, flags, groups, their options, keys and values; fast, and in a real bash."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ndbench.completion import answer, script, split
from ndbench.matrix.keys import all_keys
from ndbench.matrix.sources import GROUPS, find_sources
from tests.cli.conftest import Command


def complete(line: str) -> list[str]:
    return answer("zsh", line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ndbench sho", ["show "]),
        ("ndbench --debug sho", ["show "]),
        ("ndbench show --js", ["--json "]),
        ("ndbench --res", ["--resume "]),
        ("ndbench run --max", ["--max-failures "]),
        ("ndbench suite=hs", ["suite=hsdp_tp "]),
        ("ndbench show suite=hs", ["suite=hsdp_tp "]),
        ("ndbench show -m suite=smoke model=qwen3_t", ["model=qwen3_tiny "]),
        ("ndbench hardware=aut", ["hardware=auto "]),
        ("ndbench training.prec", ["training.precision="]),
        ("ndbench training.precision=b", ["training.precision=bf16 "]),
        ("ndbench -m training.precision=fp32,b", ["training.precision=fp32,bf16 "]),
        ("ndbench -m model=llama_tiny,mistral_t", ["model=llama_tiny,mistral_tiny "]),
        ("ndbench training.compile=t", ["training.compile=true "]),
        ("ndbench world", ["world_size="]),
        ("ndbench paral", ["parallelism.", "parallelism="]),
        ("ndbench 'suite=hs", ["suite=hsdp_tp "]),
        ("ndbench baseline ac", ["accept "]),
        ("ndbench baseline --results-dir elsewhere ac", ["accept "]),
        ("ndbench list eng", ["engines "]),
        ("ndbench import x.yaml training.prec", ["training.precision="]),
        ("ndbench completion z", ["zsh "]),
        ("ndbench report lat", ["latest "]),
        ("ndbench list suite=hs", []),
        ("ndbench doctor suite=hs", []),
        ("ndbench training.nothing=", []),
        ("ndbench --config-dir nowhere model=ll", []),
        ("ndbench suite=smoke sho", []),
    ],
)
def test_the_word_under_the_cursor_is_completed(line: str, expected: list[str]) -> None:
    assert complete(line) == expected


def test_every_group_option_and_key_can_be_reached() -> None:
    sources = find_sources()
    first = complete("ndbench ")
    assert {f"{group}=" for group in GROUPS} <= set(first)
    for group in GROUPS:
        assert {f"{group}={name} " for name in sources.names(group)} <= set(complete(f"ndbench {group}="))
    for key in all_keys():
        head = key.rpartition(".")[0]
        assert f"{key}=" in complete(f"ndbench {head}{'.' if head else ''}")


def test_a_users_own_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "zebra.yaml").write_text("name: zebra\n")
    assert complete(f"ndbench --config-dir {tmp_path} model=ze") == ["model=zebra "]
    assert complete(f"ndbench --config-dir={tmp_path} model=ze") == ["model=zebra "]


def test_runs_and_folders_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results/runs/20261130-061500-ab12cd").mkdir(parents=True)
    (tmp_path / "other/runs/20261201-061500-ef34ab").mkdir(parents=True)
    assert complete("ndbench --resume 2026") == ["20261130-061500-ab12cd "]
    assert complete("ndbench results.dir=other --resume 2026") == ["20261201-061500-ef34ab "]
    assert complete("ndbench compare latest --results-dir other 2026") == ["20261201-061500-ef34ab "]
    assert complete("ndbench --config-dir oth") == ["other/"]
    (tmp_path / "other/axolotl.yaml").touch()
    assert complete("ndbench import other/ax") == ["other/axolotl.yaml "]
    assert complete("ndbench --config-dir other/") == ["other/runs/"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ndbench", ["ndbench", ""]),
        ("ndbench  show ", ["ndbench", "show", ""]),
        ("ndbench 'a b", ["ndbench", "a b"]),
        ('ndbench "it\'s" x', ["ndbench", "it's", "x"]),
        ("ndbench a\\ b", ["ndbench", "a b"]),
        ("ndbench a\\", ["ndbench", "a"]),
    ],
)
def test_an_unfinished_line_is_split_like_a_shell_would(line: str, words: list[str]) -> None:
    assert split(line) == words


def test_nothing_on_the_line_can_make_completion_fail(ndbench: Command) -> None:
    for line in (
        "",
        "'",
        "ndbench =",
        "ndbench --config-dir",
        "ndbench --config-dir ",
        "ndbench model=\\",
        "ndbench \x00",
    ):
        assert ndbench("__complete", "bash", line).code == 0
    assert ndbench("__complete").code == 0


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_completion_takes_under_half_a_second_and_loads_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ndbench", "__complete", "bash", "ndbench show training."]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=60, env=_environment())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # one thread's CPU time: the wall clock of an idle machine, whatever else runs on this one
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5, seconds
    for line in ("ndbench ", "ndbench model=", "ndbench training.precision=", "ndbench baseline ", "ndbench --resume "):
        code = (
            "import sys; from ndbench.cli import main; main(['__complete', 'bash', sys.argv[1]]);"
            "heavy = {'torch', 'transformers', 'hydra', 'omegaconf', 'pandas', 'numpy', 'scipy', 'rich', 'yaml'};"
            "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
        )
        subprocess.run([sys.executable, "-c", code, line], cwd=tmp_path, check=True, timeout=30, env=_environment())


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ndbench show suite=hs", "hsdp_tp "),  # bash has cut the word at "="
        ("ndbench sho", "show "),
        ("ndbench training.steps", "training.steps="),
        ("ndbench --resu", "--resume "),
    ],
)
def test_bash_completes_with_the_printed_script(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ndbench"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ndbench "$@"\n')
    command.chmod(0o755)
    program = (
        f"{script('bash')}\n"
        "COMP_LINE=\"$1\" COMP_POINT=${#1} COMP_WORDBREAKS=$' \\t\\n\"\\'><=;|&(:'\n"
        "_ndbench ndbench\n"
        'printf "<%s>" "${COMPREPLY[@]}"'
    )
    environment = _environment() | {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env=environment,
    )
    assert (done.stdout, done.stderr) == (f"<{expected}>", "")


def test_both_scripts_are_printed_and_say_how_to_load_them(ndbench: Command) -> None:
    for shell in ("bash", "zsh"):
        assert f"__complete {shell}" in ndbench("completion", shell).out
        assert f'eval "$(ndbench completion {shell})"' in ndbench("completion", "-h").out
    assert ndbench("completion", "fish").code == 2
