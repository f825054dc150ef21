"""Copies to compute with: the gradient of the low-precision model, on the parameters of the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ndbench.parallel.precision import ComputeCopies


class Tied(nn.Module):
    """An embedding that is the output matrix too, a norm, and a frozen bias."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(11, 8), nn.RMSNorm(8), nn.Linear(8, 11)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.recompute = recompute

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        out = checkpoint(self._rest, hidden, use_reentrant=False) if self.recompute else self._rest(hidden)
        assert isinstance(out, torch.Tensor)
        return out

    def _rest(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


IDS = torch.arange(10)[None] % 7


def expected(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the model in bf16 as a whole, the gradients in float32."""
    low = copy.deepcopy(model).to(torch.bfloat16)
    loss = low(IDS).float().square().sum()
    loss.backward()
    return loss, {name: p.grad.float() for name, p in low.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
def test_it_is_the_low_precision_model_to_the_bit_and_its_gradients_arrive_in_float32(recompute: bool) -> None:
    model = Tied(recompute)
    loss, gradients = expected(model)
    before = dict(model.named_parameters())
    copies = ComputeCopies(model, torch.bfloat16)
    with copies.active():
        assert model.head.weight is model.embedding.weight, "ties stay ties"
        found = model(IDS).float().square().sum()
        found.backward()
    assert found == loss
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before), "outside, the model shows its own parameters"
    assert {name for name, p in after.items() if p.grad is not None} == set(gradients)
    for name, gradient in gradients.items():
        assert after[name].grad is not None
        assert after[name].grad.dtype == torch.float32
        assert torch.equal(after[name].grad, gradient), name


def test_gradients_of_several_backwards_add_up_in_float32() -> None:
    model = Tied()
    _, gradients = expected(model)
    with ComputeCopies(model, torch.bfloat16).active():
        for _ in range(3):
            model(IDS).float().square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, gradients[name] + gradients[name] + gradients[name]), name


def test_each_entry_takes_the_parameters_as_they_are_then_but_not_one_inside_another() -> None:
    model = Tied()
    copies = ComputeCopies(model, torch.bfloat16)
    with copies.active():
        first = model(IDS)
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with copies.active(), copies.active():
        assert model.norm.weight.dtype == torch.bfloat16
        second = model(IDS)
    assert not torch.equal(first, second)
    assert model.norm.weight.dtype == torch.float32


def test_an_error_inside_leaves_the_model_with_its_own_parameters() -> None:
    model = Tied()
    copies = ComputeCopies(model, torch.bfloat16)
    with pytest.raises(ZeroDivisionError), copies.active():
        raise ZeroDivisionError
    assert model.norm.weight.dtype == torch.float32
    with copies.active():
        assert model.norm.weight.dtype == torch.bfloat16
