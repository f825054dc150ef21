"""AdamW in one pass is torch's: the same weights and the same state, clipping folded in, a resumed state too."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from ndbench.config import TrainingConfig
from ndbench.training.optimizer import ShardOptimizer

SHAPES = ((7, 5), (35,), (3,), (0, 4))
"""Two of one size, one more size, and a shard without an element."""


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating code takes a minute on a CPU; what is traced is the same."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def optimizer(compiled: bool, **changes: object) -> ShardOptimizer:
    torch.manual_seed(0)
    training = TrainingConfig(compile=compiled, learning_rate=0.01, steps=6, schedule="linear", **changes)  # type: ignore[arg-type]
    return ShardOptimizer([nn.Parameter(torch.randn(shape)) for shape in SHAPES], training)


def take_steps(made: ShardOptimizer, first: int, last: int, scale: float = 0.25) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(made.parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            # One parameter has no gradient in some step: its own count of steps is then behind.
            parameter.grad = None if (index, step) == (2, 1) else gradient * (1.0 if made.scales else scale)
        made.step(torch.tensor(scale)) if made.scales else made.step()


def test_weights_and_state_are_those_of_torchs_own() -> None:
    own, torchs = optimizer(compiled=True), optimizer(compiled=False)
    assert own.scales
    assert not torchs.scales
    for made in (own, torchs):
        take_steps(made, 0, 5)
        assert all(parameter.grad is None for parameter in made.parameters)
    for one, other in zip(own.parameters, torchs.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)
    states = (own.optimizer.state_dict()["state"], torchs.optimizer.state_dict()["state"])
    for index in range(3):
        assert states[0][index].keys() == states[1][index].keys()
        for key, value in states[1][index].items():
            torch.testing.assert_close(states[0][index][key], value, rtol=1e-6, atol=1e-8)


def test_it_goes_on_from_a_state_of_torchs_own() -> None:
    torchs, own = optimizer(compiled=False), optimizer(compiled=True)
    take_steps(torchs, 0, 3)
    with torch.no_grad():
        for mine, theirs in zip(own.parameters, torchs.parameters, strict=True):
            mine.copy_(theirs)
    own.optimizer.load_state_dict(copy.deepcopy(torchs.optimizer.state_dict()))
    own.taken = torchs.taken
    for made in (own, torchs):
        take_steps(made, 3, 6)
    for one, other in zip(own.parameters, torchs.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "torch.optim.Adamax"])
def test_other_optimizers_stay_torchs(name: str) -> None:
    assert not optimizer(compiled=True, optimizer=name).scales
