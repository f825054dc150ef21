"""Starting weights are a pure function of seed and name, whatever part of them a rank asks for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ndbench.parallel import initialize
from ndbench.parallel.initialize import Weights
from ndbench.training.models import build_model
from tests.parity.cases import llama

SHAPE = torch.Size([37, 5])


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def rows(weights: Weights, name: str, start: int, stop: int, shape: torch.Size = SHAPE) -> torch.Tensor:
    return torch.cat([values for _, values in weights.rows(name, shape, start, stop)])


@pytest.mark.parametrize("device", DEVICES)
def test_a_slice_is_a_slice_of_the_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize, "ELEMENTS_A_DRAW", 40)
    weights = Weights(seed=0, std=1.0)
    whole = weights.whole("a.weight", SHAPE, device)
    assert whole.device.type == device
    for start, stop in ((0, 1), (3, 30), (8, 16), (36, 37), (20, 20)):
        part = [values for _, values in weights.rows("a.weight", SHAPE, start, stop, device)]
        assert torch.equal(torch.cat(part) if part else whole[:0], whole[start:stop])


def test_weights_are_drawn_where_they_are_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that waits on the host for its GPU has the GPU's numbers; nothing is drawn on a CPU for a GPU."""
    drawn: list[torch.device] = []

    def rows(self: Weights, name: str, shape: torch.Size, start: int, stop: int, device: torch.device) -> object:
        drawn.append(device)
        return iter([])

    monkeypatch.setattr(Weights, "rows", rows)
    monkeypatch.setattr(initialize, "DTensor", FakeShard)
    initialize.fill(nn.Linear(2, 2, bias=False, device="meta"), Weights(0, 1.0))
    sharded = nn.Module()
    sharded.weight = FakeShard(torch.empty(2, 2))
    initialize.fill(sharded, Weights(0, 1.0))
    assert [device.type for device in drawn] == ["meta", "cuda"]


class FakeShard(nn.Parameter):
    """On the host, sharded over GPUs."""

    device_mesh = SimpleNamespace(device_type="cuda", ndim=0)


def test_names_and_seeds_give_other_numbers() -> None:
    first = rows(Weights(0, 1.0), "a.weight", 0, 37)
    assert not torch.equal(first, rows(Weights(0, 1.0), "b.weight", 0, 37))
    assert not torch.equal(first, rows(Weights(1, 1.0), "a.weight", 0, 37))
    assert torch.equal(first, rows(Weights(0, 1.0), "a.weight", 0, 37))


def test_matrices_have_the_standard_deviation_asked_for() -> None:
    drawn = rows(Weights(0, 0.02), "a.weight", 0, 1000, torch.Size([1000, 100]))
    assert drawn.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(drawn.mean().item()) < 3e-4


def test_norms_are_ones_and_biases_zero_unless_jittered() -> None:
    vector = torch.Size([8])
    assert rows(Weights(0, 0.02), "norm.weight", 0, 8, vector).tolist() == [1.0] * 8
    assert rows(Weights(0, 0.02), "a.bias", 0, 8, vector).tolist() == [0.0] * 8
    assert rows(Weights(0, 0.02, jitter=0.2), "norm.weight", 0, 8, vector).std() > 0.05


def test_a_model_is_built_without_memory_for_its_weights() -> None:
    built = build_model(llama(hidden_size=8192, intermediate_size=32768, num_hidden_layers=40, head_dim=1024))
    assert all(parameter.is_meta for parameter in built.model.parameters())
    assert not any(buffer.is_meta for buffer in built.model.buffers())
    assert len(built.blocks) == 40


def test_norm_weights_start_where_the_model_has_them() -> None:
    """Gemma's norms multiply by one plus their weight, so it starts at zero."""
    gemma = build_model(llama(model_type="gemma", head_dim=8)).constants
    assert gemma["model.norm.weight"] == 0.0
    assert build_model(llama()).constants["model.norm.weight"] == 1.0


@pytest.mark.parametrize("device", DEVICES)
def test_the_numbers_of_a_gpu_are_normal_and_the_same_on_every_device(device: str) -> None:
    """SplitMix64 of 1 has a known value; the rest is Box and Muller's transform of its bits."""
    drawn = initialize.hashed_normal(0, 2**20, torch.device(device)).double().cpu()
    bits = 0x910A2DEC89025CC1  # the first output of SplitMix64 seeded with 1 is that of key 1
    (first,) = initialize.hashed_normal(1, 1, torch.device(device)).tolist()
    radius = math.sqrt(-2 * math.log(((bits >> 40) + 1) / 2**24))
    assert first == pytest.approx(radius * math.cos(2 * math.pi * ((bits >> 16) & 0xFFFFFF) / 2**24), rel=1e-6)
    mean, spread = drawn.mean().item(), drawn.std().item()
    skewness, kurtosis = (((drawn - mean) / spread).pow(power).mean().item() for power in (3, 4))
    assert abs(mean) < 4e-3
    assert abs(spread - 1) < 3e-3
    assert abs(skewness) < 1e-2
    assert abs(kurtosis - 3) < 2e-2
    assert abs((drawn[1:] * drawn[:-1]).mean().item()) < 4e-3
    assert drawn.unique().numel() > 0.9 * 2**20
