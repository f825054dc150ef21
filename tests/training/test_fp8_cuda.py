"""training.precision=fp8 on GPUs that have it: the loss curve of bf16 at 0.2 B parameters, on one and on two."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.parallel.config import ParallelismConfig
from tests.parity.cases import layout, llama
from tests.parity.gpus import on_ranks
from tests.training import float8_tasks

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(GPUS < 1 or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"),
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed"),
]

MODEL = llama(
    vocab_size=256,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    initializer_range=0.02,
)
"""0.2 billion parameters."""
STEPS = TrainingConfig(
    global_batch_size=8,
    sequence_length=1024,
    learning_rate=1e-4,
    warmup_steps=5,
    compile=True,
    loss_chunk_size=2048,
    deterministic=False,
)
LOSS, NORM = 2e-2, 1e-1
"""Relative: of each loss, and of the first gradient norm. At ten times the rate the loss falls to a third within a few
steps, and a curve that is a step late there is 20 % off."""
BLOCK = 7


def case(parallelism: ParallelismConfig) -> tuple[ModelConfig, TrainingConfig, ParallelismConfig]:
    return MODEL, STEPS, parallelism


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(x / y - 1) for x, y in zip(one, other, strict=True))


def assert_beside(bf16: dict[str, Any], fp8: dict[str, Any], layers: int = 12) -> None:
    print(f"loss {fp8['loss'][0]:.4f} -> {fp8['loss'][-1]:.4f}, bf16 -> {bf16['loss'][-1]:.4f}")
    norms = fp8["norm"][0] / bf16["norm"][0]
    print(f"worst of 30 steps: loss {apart(fp8['loss'], bf16['loss']):.2e}, first norms {norms:.4f}")
    assert fp8["kinds"].count("Float8Linear") == BLOCK * layers
    assert fp8["facts"]["fp8"]["emulated"] is False
    assert fp8["loss"][-1] < 0.9 * fp8["loss"][0], "nothing was learnt, so nothing is compared"
    assert apart(fp8["loss"], bf16["loss"]) < LOSS
    assert apart(fp8["norm"][:1], bf16["norm"][:1]) < NORM


@pytest.fixture(scope="module")
def single() -> tuple[dict[str, Any], dict[str, Any]]:
    (found,) = on_ranks(float8_tasks.both, [case(layout())], 1, timeout=280.0)
    return found[0]  # type: ignore[no-any-return]


def test_one_gpu_has_the_loss_curve_of_bf16(single: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert_beside(*single)


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_two_gpus_have_the_loss_curve_of_bf16_and_of_one(single: tuple[dict[str, Any], dict[str, Any]]) -> None:
    (found,) = on_ranks(float8_tasks.both, [case(layout(1, 2))], 2, timeout=280.0)
    assert_beside(*found[0])
    assert apart(found[0][1]["loss"], single[1]["loss"]) < LOSS


def test_every_product_of_a_block_runs_on_the_fp8_units() -> None:
    """Forward, gradient of the input, gradient of the weight: three a layer."""
    model = dataclasses.replace(MODEL, num_hidden_layers=1)
    steps = dataclasses.replace(STEPS, precision="fp8", compile=False)
    (found,) = on_ranks(float8_tasks.products, [(model, steps, layout())], 1, timeout=120.0)
    assert found[0] == 3 * BLOCK
