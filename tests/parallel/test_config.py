"""Degrees, names and refusals: every rule names the numbers, and nothing here needs torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.mesh import rank_grid, rank_grid_text

LLAMA = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_attention_heads=8, num_key_value_heads=4)


def refusals(
    degrees: tuple[int, int, int, int] = (1, 1, 1, 1),
    model: ModelConfig = LLAMA,
    training: TrainingConfig | None = None,
    **options: object,
) -> str:
    config = ParallelismConfig(*degrees, **options)  # type: ignore[arg-type]
    return "; ".join(config.refuse(model, training or TrainingConfig(global_batch_size=16, sequence_length=128)))


@pytest.mark.parametrize(
    ("degrees", "name"),
    [
        ((1, 1, 1, 1), "single"),
        ((8, 1, 1, 1), "ddp8"),
        ((1, 8, 1, 1), "fsdp8"),
        ((2, 4, 1, 1), "hsdp2x4"),
        ((1, 4, 1, 2), "fsdp4_tp2"),
        ((2, 1, 2, 2), "ddp2_cp2_tp2"),
        ((2, 2, 1, 2), "hsdp2x2_tp2"),
        ((1, 1, 4, 1), "cp4"),
        ((1, 1, 1, 4), "tp4"),
    ],
)
def test_a_layout_has_a_readable_name(degrees: tuple[int, int, int, int], name: str) -> None:
    assert ParallelismConfig(*degrees).layout == name


def test_minus_one_is_the_rest_of_the_world() -> None:
    assert ParallelismConfig(1, -1, 1, 2).resolved(8).dp_shard_size == 4
    assert ParallelismConfig(-1, 1, 1, 1).resolved(1).dp_replicate_size == 1


@pytest.mark.parametrize(
    ("degrees", "world", "message"),
    [
        ((-1, -1, 1, 1), 8, "more than one degree of -1: dp_replicate, dp_shard"),
        ((1, 0, 1, 1), 8, "dp_shard_size is 0"),
        ((1, -1, 1, 3), 8, r"world_size 8 is not a multiple of dp_replicate 1 x cp 1 x tp 3 = 3"),
        ((2, 2, 1, 1), 8, r"dp_replicate 2 x dp_shard 2 x cp 1 x tp 1 = 4 ranks, but world_size is 8"),
        ((1, 1, 1, 1), 0, "world_size is 0"),
    ],
)
def test_degrees_that_do_not_fit_the_world_are_refused(
    degrees: tuple[int, int, int, int], world: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(*degrees).resolved(world)


def test_a_valid_layout_is_not_refused() -> None:
    assert refusals((1, 2, 2, 2)) == ""
    assert refusals((8, 1, 1, 1)) == ""


def test_heads_and_kv_heads_divide_by_tp() -> None:
    assert "8 attention heads do not divide by tp 3" in refusals((1, 1, 1, 3))
    assert "4 kv heads do not divide by tp 8" in refusals((1, 1, 1, 8))


def test_the_intermediate_size_divides_by_tp() -> None:
    model = ModelConfig(vocab_size=256, intermediate_size=190, num_attention_heads=8, num_key_value_heads=8)
    assert "intermediate_size 190 does not divide by tp 4" in refusals((1, 1, 1, 4), model)


def test_families_that_keep_attention_whole_need_no_divisible_heads() -> None:
    model = ModelConfig(model_type="phi3", intermediate_size=192, num_attention_heads=6, num_key_value_heads=3)
    assert refusals((1, 1, 1, 4), model) == ""


def test_an_odd_vocabulary_is_fine_but_an_empty_shard_is_not() -> None:
    odd = ModelConfig(vocab_size=131, num_attention_heads=8, num_key_value_heads=8)
    assert refusals((1, 1, 1, 8), odd) == ""
    tiny = ModelConfig(vocab_size=9, num_attention_heads=8, num_key_value_heads=8)
    assert "vocab_size 9 over tp 8 leaves a rank without a token" in refusals((1, 1, 1, 8), tiny)


def test_the_global_batch_divides_by_the_batch_ranks() -> None:
    training = TrainingConfig(global_batch_size=12)
    assert "global_batch_size 12 is not a multiple of the dp_replicate 2 x dp_shard 4 = 8" in refusals(
        (2, 4, 1, 1), training=training
    )


def test_the_micro_batch_divides_what_a_rank_has() -> None:
    training = TrainingConfig(global_batch_size=16, micro_batch_size=3)
    assert "micro_batch_size 3 does not divide the 8 sequences" in refusals((2, 1, 1, 1), training=training)


@pytest.mark.parametrize(
    ("degrees", "length", "expected"),
    [
        ((1, 1, 2, 1), 126, "sequence_length 126 is not a multiple of 4"),
        ((1, 1, 1, 4), 126, "sequence_length 126 does not divide by tp 4"),
        ((1, 1, 2, 4), 132, "sequence_length 132 is not a multiple of 8"),
        ((1, 1, 2, 4), 136, ""),
    ],
)
def test_the_sequence_divides_by_what_shards_it(degrees: tuple[int, int, int, int], length: int, expected: str) -> None:
    found = refusals(degrees, training=TrainingConfig(sequence_length=length))
    assert expected in found
    assert bool(found) == bool(expected)


def test_without_sequence_parallel_tp_does_not_shard_the_sequence() -> None:
    assert refusals((1, 1, 1, 4), training=TrainingConfig(sequence_length=126), sequence_parallel=False) == ""


def test_an_unknown_context_method_is_refused() -> None:
    assert "cp_method is 'rings'" in refusals((1, 1, 2, 1), cp_method="rings")


def test_a_model_of_the_users_needs_a_plan_for_tp_and_has_no_context_parallelism() -> None:
    model = ModelConfig(model_type=None, target="mine.model")
    assert "tp 2 on model.target=mine.model needs a model.tp_plan" in refusals((1, 1, 1, 2), model)
    assert "cp 2 needs a transformers model" in refusals((1, 1, 2, 1), model)


def test_the_rank_grid_is_slow_to_fast() -> None:
    config = ParallelismConfig(2, 2, 1, 2)
    assert rank_grid(config) == [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]]
    assert "dp_replicate 1  dp_shard 0:   4   5" in rank_grid_text(config)


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, ndbench.parallel.config, ndbench.parallel.mesh, ndbench.engines.bundled;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
