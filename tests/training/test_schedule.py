"""The learning rate by optimizer step: values from the definition, and transformers' schedules after the warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.engines.bundled_refusals import refuse_training
from ndbench.training.optimizer import ShardOptimizer
from ndbench.training.schedule import learning_rate_factor


def factors(count: int, **fields: Any) -> list[float]:
    return [learning_rate_factor(TrainingConfig(**fields), step) for step in range(count)]


def test_without_a_schedule_the_rate_stays() -> None:
    assert factors(20, steps=10) == [1.0] * 20


def test_warm_up_rises_along_a_line_and_wastes_no_step() -> None:
    assert factors(6, steps=6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_line_falls_to_the_lowest_rate_and_stays_there() -> None:
    assert factors(8, steps=6, schedule="linear", warmup_steps=2, min_learning_rate_ratio=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_wsd_falls_in_the_last_fifth_or_as_told() -> None:
    assert factors(10, steps=10, schedule="wsd", warmup_steps=1) == pytest.approx([1.0] * 9 + [0.5])
    assert factors(10, steps=10, schedule="wsd", decay_steps=4) == pytest.approx([1.0] * 7 + [0.75, 0.5, 0.25])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_decay_is_that_of_transformers(kind: str) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=3, num_training_steps=20)
    ours = factors(20, steps=20, schedule=kind, warmup_steps=3)
    for step in range(20):
        if step >= 3:
            assert ours[step] == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_the_optimizer_steps_at_the_rate_of_its_own_count() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    training = TrainingConfig(
        optimizer="sgd", learning_rate=1.0, weight_decay=0.0, steps=4, schedule="linear", warmup_steps=1
    )
    optimizer, moved = ShardOptimizer([weight], training), []
    for _ in range(5):
        before = weight.item()
        weight.grad = -torch.ones(1)
        optimizer.step()
        moved.append(weight.item() - before)
    assert moved == pytest.approx([1.0, 1.0, 2 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"schedule": "step"}, "schedule 'step' is not known; known: constant, linear, cosine, wsd"),
        ({"warmup_steps": -1}, "warmup_steps is -1, it must be at least 0"),
        ({"warmup_steps": 8, "decay_steps": 5}, "warmup_steps 8 and decay_steps 5 do not fit into 12 steps"),
        ({"min_learning_rate_ratio": 1.5}, "min_learning_rate_ratio is 1.5, it must be from 0 to 1"),
        ({"max_grad_value": 0.0}, "max_grad_value is 0.0, it must be above 0, or null"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(fields: dict[str, Any], reason: str) -> None:
    assert refuse_training(TrainingConfig(**fields), ModelConfig()) == [reason]
