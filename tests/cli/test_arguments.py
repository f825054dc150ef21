"""Verb, flags and overrides are told apart in any order, and never abbreviated."""

from __future__ import annotations

import itertools
import keyword
import pkgutil
from pathlib import Path

import pytest

import ndbench.verbs
from ndbench.arguments import RESULTS_DIR, VERBS, UsageError, flags_of, parse, split_verb
from tests.cli.conftest import Command


def test_flags_and_overrides_mix_in_any_order() -> None:
    pieces = [["suite=smoke"], ["--max-failures", "2"], ["-m"], ["+training.steps=3"], ["--config-dir", "mine"]]
    for order in itertools.permutations(pieces):
        parsed = parse("run", list(itertools.chain(*order)))
        assert sorted(parsed.words) == ["+training.steps=3", "suite=smoke"]
        assert (parsed.max_failures, parsed.multirun, str(parsed.config_dir)) == (2, True, "mine")


@pytest.mark.parametrize(
    ("argv", "verb", "rest"),
    [
        (["suite=smoke"], None, ["suite=smoke"]),
        (["run", "suite=smoke"], "run", ["suite=smoke"]),
        (["--debug", "show", "suite=smoke"], "show", ["--debug", "suite=smoke"]),
        (["--config-dir", "show", "list", "models"], "list", ["--config-dir", "show", "models"]),
        (["--config-dir=x", "list", "models"], "list", ["--config-dir=x", "models"]),
        (["--resume", "run"], None, ["--resume", "run"]),
        (["~tracker", "show"], None, ["~tracker", "show"]),
        (["-h"], None, ["-h"]),
        ([], None, []),
    ],
)
def test_the_first_word_is_the_verb_unless_it_is_an_override(
    argv: list[str], verb: str | None, rest: list[str]
) -> None:
    assert split_verb(argv) == (verb, rest)


def test_values_that_look_like_flags_or_hold_equals_signs_stay_overrides() -> None:
    words = ["parallelism.dp_shard_size=-1", "engine.command=python train.py --lr=1", "cells='a,b'"]
    assert parse("run", words).words == words


def test_no_flag_may_be_shortened() -> None:
    for verb in VERBS:
        for flag in flags_of(verb):
            for name in flag.names:
                if (
                    name.startswith("--")
                    and len(name) > 4
                    and name[:-1] not in {n for f in flags_of(verb) for n in f.names}
                ):
                    with pytest.raises(UsageError):
                        parse(verb, [name[:-1], *(["1"] if flag.metavar else [])])


def test_every_verb_has_a_module_with_a_main_and_every_module_is_a_verb() -> None:
    modules = {info.name.rstrip("_") for info in pkgutil.iter_modules(ndbench.verbs.__path__)} - {"output"}
    assert modules == set(VERBS)
    assert all(callable(ndbench.verbs.function_of(verb)) for verb in VERBS)
    assert not any(keyword.iskeyword(info.name) for info in pkgutil.iter_modules(ndbench.verbs.__path__))


def test_every_verb_has_help_and_the_main_help_has_every_verb(ndbench: Command) -> None:
    main = ndbench("-h")
    assert main.code == 0
    for verb, known in VERBS.items():
        assert verb in main.out
        result = ndbench(verb, "-h")
        assert result.code == 0
        assert known.usage.split("\n")[0] in result.out
        for flag in flags_of(verb):
            assert all(name in result.out for name in flag.names)
    assert ndbench("suite=smoke", "-h").out == main.out


def test_help_stays_within_a_terminal(ndbench: Command) -> None:
    for argv in (["-h"], *([verb, "-h"] for verb in VERBS)):
        assert max(len(line) for line in ndbench(*argv).out.splitlines()) <= 115


@pytest.mark.parametrize("verb", [verb for verb in VERBS if RESULTS_DIR in VERBS[verb].flags])
def test_the_results_folder_is_said_in_both_ways(verb: str) -> None:
    words = {"baseline": ["accept", "r"], "wandb": ["push", "r"], "doctor": []}.get(verb, ["r"])
    for said in (["results.dir=some/where"], ["--results-dir", "some/where"], ["results.dir='some/where'"]):
        parsed = parse(verb, [*words, *said])
        assert (parsed.results_dir, parsed.words) == (Path("some/where"), words)
    assert parse(verb, words).results_dir is None
