"""The loop over pairs and the choice of base, with measurements made up; one real A/B at the end."""

from __future__ import annotations

import io
import json
import math
import random
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ndbench.cli import main
from ndbench.compare.confirm import minimal_paired_effect
from ndbench.compare.result import MetricVerdict
from ndbench.compare.statistics import variance
from ndbench.config import Cell, GateConfig
from ndbench.gate import confirm as module
from ndbench.gate.ab import package_remarks
from ndbench.gate.confirm import choose_base, code_is_elsewhere, confirm_suspects, find_suspects
from ndbench.gate.loop import Confirmed, confirm, confirm_rule
from ndbench.gate.pairs import CPU, WALL, Bench, Pair
from ndbench.gate.refs import Side
from ndbench.matrix.expand import expand
from ndbench.report.console import print_comparison
from ndbench.report.markdown import render
from ndbench.results.store import RunFolder
from ndbench.run.plan import Plan
from tests.compare.helpers import baseline_of, decide
from tests.records import a_cell, repeats

ROOT = Path(__file__).parents[2]
Measure = Callable[[Bench, Cell, Cell, int], Pair]


def made_up(slower: dict[str, float], sd: float = 0.01, cpu: bool = True, fails: str | None = None) -> Measure:
    rng = random.Random(0)

    def measure(bench: Bench, base: Cell, head: Cell, index: int) -> Pair:
        if head.name == fails and index == 2:
            return Pair(failed="head oom: out of memory")
        effect = slower.get(head.name, 0.0)
        ratios = {WALL: rng.gauss(effect, sd)}
        return Pair(ratios | ({CPU: rng.gauss(effect, sd / 2)} if cpu else {}))

    return measure


def loop(names: list[str], measure: Measure, device: str = "cpu", **gate: Any) -> tuple[Confirmed, list[str]]:
    cells = {name: (a_cell(name, device=device), a_cell(name, device=device)) for name in names}
    said: list[str] = []
    bench = Bench(*[None] * 4)  # type: ignore[arg-type]
    return confirm(bench, cells, GateConfig(**gate), say=said.append, measure=measure), said


def test_a_slow_cell_is_confirmed_at_the_first_look_and_the_others_are_let_go() -> None:
    found, _ = loop(["a", "b", "c"], made_up({"a": 0.2}))
    verdicts = {name: {m.metric: m.verdict for m in made} for name, made in found.metrics().items()}
    assert verdicts["a"] == {WALL: "regressed", CPU: "regressed"}
    assert verdicts["b"] == verdicts["c"] == {WALL: "pass", CPU: "pass"}
    assert {name: len(pairs) for name, pairs in found.pairs.items()} == {"a": 6, "b": 6, "c": 6}


def test_only_what_is_open_goes_on_to_the_second_look() -> None:
    found, _ = loop(["slow", "unclear"], made_up({"slow": 0.3, "unclear": 0.035}, sd=0.02))
    assert len(found.pairs["slow"]) == 6
    assert len(found.pairs["unclear"]) == 12


def test_cells_that_were_let_go_still_count_in_the_correction_of_the_second_look() -> None:
    found, _ = loop(["unclear", "b", "c"], made_up({"unclear": 0.035}, sd=0.02))
    assert [len(found.pairs[name]) for name in ("unclear", "b", "c")] == [12, 6, 6]
    wall = found.ratios("unclear", WALL)
    error = math.sqrt(variance(wall) / 12)
    least = found.decisions["unclear"][WALL].minimal_effect
    assert least == pytest.approx(minimal_paired_effect(error, 12, 0.005 / (3 * 2)))


def test_on_a_gpu_ten_and_twenty_pairs_decide_and_one_percent_counts() -> None:
    found, _ = loop(["a"], made_up({"a": 0.03}, cpu=False), device="cuda")
    assert len(found.pairs["a"]) == 10
    (metric,) = found.metrics()["a"]
    assert metric.verdict == "regressed"
    assert confirm_rule(a_cell(device="cuda"), GateConfig()).min_effect == 0.01
    assert confirm_rule(a_cell(), GateConfig()).resolve == 0.08
    assert confirm_rule(a_cell(), GateConfig(resolve=0.2)).resolve == 0.2


@pytest.mark.parametrize(("asked", "resolve"), [([], 0.08), (["gate.resolve=0.2"], 0.2)])
def test_turns_resolve_eight_percent_from_the_command_line_too(asked: list[str], resolve: float) -> None:
    matrix = expand(["model=llama_tiny", "hardware=cpu", *asked])
    assert confirm_rule(matrix.cells[0], matrix.config.gate).resolve == resolve
    assert confirm_rule(matrix.cells[0], matrix.cells[0].config.gate).resolve == resolve


def test_an_a_b_says_its_interval_its_other_side_and_its_command() -> None:
    found, _ = loop(["fsdp8"], made_up({"fsdp8": 0.2}))
    cpu_only = {"fsdp8": [metric for metric in found.metrics()["fsdp8"] if metric.metric == CPU]}
    comparison = decide(repeats(), replace(baseline_of(repeats()), source="git:main"), confirmed=cpu_only)
    stream = io.StringIO()
    again = "ndbench ab model=x --base git:main --head here"
    print_comparison(replace(comparison, mode="ab"), again=again, console=Console(file=stream, width=100))
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    assert any(re.fullmatch(r"how surely  95 % interval \+\d.*% to \+\d.*%, p < 0.0001", line) for line in lines), lines
    assert "since       against git:main" in lines
    assert f"again       {again}" in lines
    assert again in render(replace(comparison, mode="ab"), again=again)


def test_of_two_configurations_no_baseline_is_to_be_accepted() -> None:
    other = repeats(cell=a_cell("fsdp8", learning_rate=1.0))
    found = decide(other, replace(baseline_of(repeats()), accepted=False))
    assert "accept" not in found.cells[0].reasons[0]
    assert "accept a new baseline" in decide(other, baseline_of(repeats())).cells[0].reasons[0]


def test_the_reported_change_is_that_of_tokens_and_of_cpu_seconds() -> None:
    found, _ = loop(["a"], made_up({"a": 0.2}, sd=1e-6))
    wall, cpu = found.metrics()["a"]
    assert wall.change == pytest.approx(1 / 1.2214 - 1, abs=1e-3)
    assert cpu.change == pytest.approx(0.2214, abs=1e-3)
    assert wall.low is not None
    assert wall.high is not None
    assert wall.low <= wall.change <= wall.high


def test_a_pair_that_fails_makes_the_cell_invalid_and_the_others_go_on() -> None:
    found, said = loop(["a", "b"], made_up({"b": 0.3}, fails="a"))
    (metric,) = found.metrics()["a"]
    assert (metric.metric, metric.verdict) == ("outcome", "invalid")
    assert "out of memory" in metric.reason
    assert any(m.verdict == "regressed" for m in found.metrics()["b"])
    assert any("head oom" in line for line in said)


def test_pairs_decide_in_place_of_stored_repeats_both_ways() -> None:
    slow, sessions = repeats(seconds=0.3), [repeats(seconds=0.1)] * 3
    assert decide(slow, baseline_of(*sessions)).exit_code == 1
    equal = [MetricVerdict(WALL, "pass", "pairs are equal", 0.0, details={"log_effect": 0.0})]
    cleared = decide(slow, baseline_of(*sessions), confirmed={"fsdp8": equal})
    assert (cleared.exit_code, cleared.verdict) == (0, "pass")
    red = [MetricVerdict(WALL, "regressed", "pairs differ", -0.1, details={"log_effect": 0.1})]
    assert decide(repeats(), baseline_of(repeats()), confirmed={"fsdp8": red}).exit_code == 1


def test_pairs_that_are_equal_never_hide_another_metric() -> None:
    fat = repeats(seconds=0.3, peak=300 * 2**20)
    equal = [MetricVerdict(WALL, "pass", "pairs are equal", 0.0, details={"log_effect": 0.0})]
    assert decide(fat, baseline_of(repeats()), confirmed={"fsdp8": equal}).exit_code == 1


def test_two_configurations_measured_next_to_each_other_are_compared_in_speed_only() -> None:
    other = repeats(cell=a_cell("fsdp8", learning_rate=1.0))
    red = [MetricVerdict(WALL, "regressed", "pairs differ", -0.1, details={"log_effect": 0.1})]
    comparison = decide(other, baseline_of(repeats()), confirmed={"fsdp8": red})
    assert comparison.exit_code == 1
    assert any(note.startswith("only speed was compared") for note in comparison.cells[0].notes)


def a_plan(names: list[str], **gate: Any) -> Plan:
    cells = {name: a_cell(name) for name in names}
    return Plan("r", "hsdp_tp", [], cells, {}, [], GateConfig(**({"confirm": "on"} | gate)), None, None)


def test_suspects_are_the_largest_slowdowns_against_the_stored_baseline() -> None:
    sizes = {"a": 0.1, "b": 0.2, "c": 0.104, "d": 0.15}
    head = [r for name, seconds in sizes.items() for r in repeats(name, seconds=seconds)]
    base = [r for name in sizes for r in repeats(name)]
    comparison = decide(head, baseline_of(base))
    assert find_suspects(a_plan(list(sizes)), comparison) == (["b", "d"], [])
    assert find_suspects(a_plan(list(sizes), min_effect=0.02), comparison) == (["b", "d", "c"], [])


def run_folder(tmp_path: Path, records: list[Any]) -> RunFolder:
    folder = RunFolder.create(tmp_path, "r")
    for record in records:
        folder.write_record(record)
    return folder


def test_without_a_base_that_can_be_run_the_stored_rule_decides_and_it_is_said(tmp_path: Path) -> None:
    head, baseline = repeats(seconds=0.3), baseline_of(repeats(commit="b" * 40))
    folder = run_folder(tmp_path, head)
    outcome = confirm_suspects(a_plan(["fsdp8"]), folder, baseline, decide(head, baseline), print, cwd=tmp_path)
    assert outcome.metrics == {}
    assert outcome.notes == [
        "speed of fsdp8 was decided by the stored sessions, not by pairs: the baseline's commit is not in a git "
        "repository here; set gate.base"
    ]


@pytest.mark.parametrize("gate", [{"confirm": "off"}, {"mode": "off"}])
def test_it_can_be_off(tmp_path: Path, gate: dict[str, str]) -> None:
    head, baseline = repeats(seconds=0.3), baseline_of(repeats())
    outcome = confirm_suspects(
        a_plan(["fsdp8"], **gate), run_folder(tmp_path, head), baseline, decide(head, baseline), print
    )
    assert (outcome.metrics, outcome.notes) == ({}, [])


def commit_in(folder: Path) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "init", "-q", "-b", "main", "."], cwd=folder, check=True)
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "x"], cwd=folder, check=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_base_is_the_baselines_commit_else_the_merge_base_and_another_software_is_not_run(tmp_path: Path) -> None:
    commit = commit_in(tmp_path)
    heads = {"fsdp8": repeats()[0]}

    def base(asked: str | None = None, **fields: Any) -> str:
        found = choose_base(asked, baseline_of(repeats(**fields)), ["fsdp8"], heads, tmp_path)
        return found if isinstance(found, str) else f"{found.ref} ({found.why})"

    assert base(commit=commit) == f"git:{commit} (the baseline's commit)"
    assert base(commit=commit, dirty=True).startswith(f"git:{commit} (the merge base with main; the baseline had")
    assert base(commit="b" * 40).endswith("is of a commit not here)")
    assert "another software (torch 2.11.0 → 2.13.0)" in base(commit=commit, torch="2.11.0")
    assert base("python:/old", torch="2.11.0") == "python:/old (gate.base)"


def test_a_repository_that_is_not_the_measured_codes_has_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its merge base would run the same ndbench twice and call that a confirmation."""
    commit = commit_in(tmp_path)
    own, users = a_cell(), a_cell()
    users.config.model.target = "mine.models:build"
    assert code_is_elsewhere(users, tmp_path) is None
    monkeypatch.setattr(module, "package_checkout", lambda: tmp_path)
    assert code_is_elsewhere(own, tmp_path) is None
    monkeypatch.setattr(module, "package_checkout", lambda: tmp_path / "source")
    assert "is that of" in (code_is_elsewhere(own, tmp_path) or "")
    monkeypatch.setattr(module, "package_checkout", lambda: None)
    assert "no commit here would change" in (code_is_elsewhere(own, tmp_path) or "")
    head, baseline = repeats(seconds=0.3), baseline_of(repeats(commit=commit))
    plan = a_plan(["fsdp8"], confirm="on")
    outcome = confirm_suspects(plan, run_folder(tmp_path, head), baseline, decide(head, baseline), print, tmp_path)
    (note,) = outcome.notes
    assert "not by pairs: ndbench is a copy in " in note


def test_a_side_that_imports_another_ndbench_than_it_names_is_told(tmp_path: Path) -> None:
    class Told:
        def __init__(self, side: Side, package: Path) -> None:
            self.side, self.facts = side, {"package": str(package)}

    tree, site = tmp_path / "tree", tmp_path / "site-packages" / "ndbench"
    base = Side("base", "git:main", "python", tree, (tree,), commit="a" * 40)
    pairs = {"c": (a_cell(), a_cell())}
    assert package_remarks([Told(base, tree / "ndbench")], pairs) == []  # type: ignore[list-item]
    (line,) = package_remarks([Told(base, site)], pairs)  # type: ignore[list-item]
    assert line == f"base git:main measures the ndbench installed in {site}: that commit has none"
    for file in ("cli.py", "measure/x.py"):
        (tree / "ndbench" / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / "ndbench" / file).write_text("")
    (line,) = package_remarks([Told(Side("head", "here", "python", tree), site)], pairs)  # type: ignore[list-item]
    assert line.startswith(f"head here measures the ndbench installed in {site}, not this checkout's")
    pairs["c"][0].config.engine.name = pairs["c"][1].config.engine.name = "command"
    assert package_remarks([Told(base, site)], pairs) == []  # type: ignore[list-item]


SMALL = ["--config-dir", "tests/run/conf", "suite=two", "world_size=2", "cells=*seq16", "gate.confirm=off"]
ENGINE = ["engine.name=small", "engine.target=tests.run.engines.SmallEngine", "+engine.options.seconds=0.01"]


@pytest.mark.timeout(280)
def test_an_a_b_of_a_setting_that_doubles_the_step_is_red_and_keeps_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where both sides find the engine
    words = [*SMALL, *ENGINE, f"results.dir={tmp_path}", "gate.residency=1"]
    assert main(["ab", *words, "--base", "here", "--head", "set:measure.handicap=1.0"]) == 1
    (folder,) = (tmp_path / "ab").iterdir()
    assert len(RunFolder(folder / "base").records()) == len(RunFolder(folder / "head").records()) >= 6
    pairs = json.loads((folder / "pairs.json").read_text())["cells"]["ddp2-seq16"]
    assert all(pair[CPU] > 0.3 for pair in pairs["pairs"])


def test_a_cell_that_is_regressed_already_is_no_suspect_in_the_note(tmp_path: Path) -> None:
    """Beside REGRESSED, "1 suspect was not confirmed" reads as if it were not."""
    for seconds, said in ((0.3, "speed of fsdp8 was decided by the stored sessions"), (0.13, "1 suspect was not")):
        head, baseline = repeats(seconds=seconds), baseline_of(repeats())
        comparison = decide(head, baseline)
        assert comparison.verdict == ("regressed" if seconds == 0.3 else "inconclusive")
        (note,) = confirm_suspects(
            a_plan(["fsdp8"]), run_folder(tmp_path / str(seconds), head), baseline, comparison, print, cwd=tmp_path
        ).notes
        assert note.startswith(said)
