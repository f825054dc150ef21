"""Every numeric key has a range, every key of names its names: a value that means nothing is refused by its key."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from ndbench.config import ModelConfig
from ndbench.matrix.expand import expand
from ndbench.matrix.keys import all_keys, type_of, typed
from ndbench.matrix.ranges import OWNED, RANGES, VALUES, check_range
from tests.cli.conftest import Command
from tests.cli.conftest import ndbench as ndbench
from tests.cli.conftest import no_process as no_process
from tests.matrix.conftest import Write

ZERO_MEANS_SOMETHING = {
    "parallelism.kept_blocks",
    "training.learning_rate",
    "training.weight_decay",
    "training.betas",
    "training.momentum",
    "training.warmup_steps",
    "training.decay_steps",
    "training.min_learning_rate_ratio",
    "training.seed",
    "data.seed",
    "measure.warmup",
    "measure.handicap",
    "measure.shuffle_seed",
    "gate.min_effect",
    "gate.resolve",
    "evaluation.fraction",
}
REST_OF_THE_WORLD = {f"parallelism.{axis}_size" for axis in ("dp_replicate", "dp_shard", "cp", "tp")}
"""Keys of which -1 means something."""


def numbers(kind: object) -> Iterator[object]:
    for member in typing.get_args(kind) or (kind,):
        yield from [member] if member in (int, float) else numbers(member) if typing.get_args(member) else ()


NUMERIC = [key for key in all_keys() if any(numbers(type_of(key)))]


def as_value_of(key: str, number: float) -> object:
    kind = str(type_of(key))
    return [number, number] if kind.startswith("list") else {"bf16": number} if kind.startswith("dict") else number


def test_every_number_of_the_schema_has_a_range() -> None:
    assert set(NUMERIC) == set(RANGES)


HUGE = 10**400


@pytest.mark.parametrize(
    ("number", "accepted"),
    [
        (0, ZERO_MEANS_SOMETHING),
        (-1, REST_OF_THE_WORLD),
        *((number, set()) for number in (math.nan, math.inf, -math.inf, 1e31, HUGE, -HUGE)),
    ],
    ids=["0", "-1", "nan", "inf", "-inf", "1e31", "huge", "-huge"],
)
def test_a_number_that_means_nothing_is_refused_by_its_key(number: float, accepted: set[str]) -> None:
    assert accepted <= set(NUMERIC)
    for key in NUMERIC:
        if key in accepted:
            typed(key, as_value_of(key, number))
            continue
        with pytest.raises(ValueError, match=f"^{key}") as refused:
            typed(key, as_value_of(key, number))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        "model.sliding_window=0",
        "model.sliding_window=-1",
        "model.intermediate_size=0",
        "model.head_dim=-1",
        "training.momentum=-1",
        "training.weight_decay=-1",
        "launcher.omp_num_threads=-1",
        "launcher.omp_num_threads=1000000",
        "launcher.name=abc",
        "tracker.name=abc",
        "tracker.mode=abc",
        "hardware.device=abc",
        "hardware.match='['",
        "parallelism.data_collectives=abc",
        "parallelism.tp_size=0",
        "gate.base=abc",
        "gate.base=git:",
        "model.tp_plan={a: 1}",
    ],
)
def test_a_value_that_means_nothing_is_exit_2_before_any_process(
    ndbench: Command, no_process: None, override: str
) -> None:
    key = override.partition("=")[0]
    for verb in ("show", "run"):
        result = ndbench(verb, override, "training.optimizer=sgd")
        assert result.code == 2, result
        assert key in result.err
        assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("git:no-such-revision", "git knows no commit 'no-such-revision' here"),
        ("git:--all", "git knows no commit '--all' here"),
        ("python:/nowhere", "there is no interpreter at /nowhere"),
    ],
)
def test_a_base_that_is_not_there_is_refused_before_it_is_needed(
    ndbench: Command, no_process: None, base: str, said: str
) -> None:
    result = ndbench("suite=smoke", f"gate.base={base}")
    assert result.code == 2
    assert result.err == f"ndbench: gate.base={base}: {said}\n"


@pytest.mark.parametrize("key", sorted(VALUES))
def test_a_name_that_is_none_is_refused_with_the_names(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}=abc is not one of {', '.join(VALUES[key])}"):
        typed(key, "abc")


def test_a_file_is_held_to_the_same_ranges(user: Write, tmp_path: Path) -> None:
    user("model/bad.yaml", "defaults: [llama_tiny]\nsliding_window: 0\n")
    with pytest.raises(ValueError, match=r"model\.sliding_window=0 must be at least 1 .*bad\.yaml"):
        expand(["model=bad", "hardware=cpu"], tmp_path)
    user("hardware/bad.yaml", "name: bad\npeak_flops: {bf16: -1}\n")
    with pytest.raises(ValueError, match=r"hardware\.peak_flops\.bf16=-1\.0 must be above 0 .*bad\.yaml"):
        expand(["hardware=bad"], tmp_path)


def test_momentum_that_the_optimizer_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"momentum=0\.9 is of no use to training\.optimizer=adamw"):
        expand(["training.momentum=0.9", "hardware=cpu"])
    assert expand(["training.momentum=0.9", "training.optimizer=sgd", "hardware=cpu"]).cells


@pytest.mark.parametrize("override", ["model.hf={num_hidden_layers: 1}", "+model.hf.num_hidden_layers=1"])
def test_what_the_schema_owns_cannot_be_overridden_below_it(override: str) -> None:
    with pytest.raises(ValueError, match=r"^model\.hf\.num_hidden_layers: use model\.num_hidden_layers$"):
        expand([override, "hardware=cpu"])


def test_a_models_file_cannot_override_what_the_schema_owns(user: Write, tmp_path: Path) -> None:
    user("model/two.yaml", "defaults: [llama_tiny]\nhf: {num_attention_heads: 3}\n")
    with pytest.raises(ValueError, match=r"model\.hf\.num_attention_heads: use model\.num_attention_heads .*two\.yaml"):
        expand(["model=two", "hardware=cpu"], tmp_path)


def test_every_shape_field_is_owned_by_the_schema() -> None:
    from ndbench.training.models import FIELDS

    assert {*FIELDS, "model_type"} == OWNED
    assert {field.name for field in dataclasses.fields(ModelConfig)} > OWNED


def test_an_optimizer_may_be_the_dotted_path_of_a_class() -> None:
    check_range("training.optimizer", "torch.optim.Adamax")
    with pytest.raises(ValueError, match=r"training\.optimizer=adamax is not one of adamw, sgd"):
        check_range("training.optimizer", "adamax")
