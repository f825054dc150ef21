"""Copies to compute with: the gradient of the low-precision model, for the parameters of the other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ndbench.config import TrainingConfig
from ndbench.parallel.held import HeldAsComputed
from ndbench.parallel.precision import ComputeCopies
from ndbench.training.optimizer import ShardOptimizer


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
def test_it_is_the_low_precision_model_to_the_bit_and_so_are_its_gradients(recompute: bool) -> None:
    model = Tied(recompute)
    loss, gradients = expected(model)
    before = dict(model.named_parameters())
    copies = ComputeCopies(model, torch.bfloat16)
    held = HeldAsComputed(model, copies.leaves)
    with copies.active():
        assert model.head.weight is model.embedding.weight, "ties stay ties"
        found = model(IDS).float().square().sum()
        found.backward()
    assert found == loss
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before), "outside, the model shows its own parameters"
    for name, gradient in gradients.items():
        kept = held.of(after[name])
        assert kept is not None
        assert kept.dtype == torch.bfloat16
        assert torch.equal(kept.float(), gradient), name
    held.settle()
    assert {name for name, p in after.items() if p.grad is not None} == set(gradients)
    for name, gradient in gradients.items():
        assert after[name].grad is not None
        assert after[name].grad.dtype == torch.float32
        assert torch.equal(after[name].grad, gradient), name


def test_gradients_of_several_backwards_add_up_in_float32() -> None:
    model = Tied()
    _, gradients = expected(model)
    copies = ComputeCopies(model, torch.bfloat16)
    held = HeldAsComputed(model, copies.leaves)
    with copies.active():
        for _ in range(3):
            model(IDS).float().square().sum().backward()
    held.settle()
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


def _changed_by_load_state_dict(model: Tied) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def _changed_through_a_view(model: Tied) -> None:
    with torch.no_grad():
        model.embedding.weight[3].add_(1)


def _changed_through_detach(model: Tied) -> None:
    model.embedding.weight.detach().add_(1)


def _changed_by_an_optimizer(model: Tied) -> None:
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.parametrize(
    "change",
    [_changed_by_load_state_dict, _changed_through_a_view, _changed_through_detach, _changed_by_an_optimizer],
)
def test_copies_follow_whoever_changes_the_originals(change: Callable[[Tied], None]) -> None:
    model = Tied()
    copies = ComputeCopies(model, torch.bfloat16)
    copies.refresh()
    assert copies.current
    change(model)
    assert not copies.current
    wanted = model.embedding.weight.detach().bfloat16()
    with copies.active():
        assert torch.equal(model.embedding.weight, wanted)


def test_a_write_through_data_is_not_counted_and_can_be_told() -> None:
    model = Tied()
    copies = ComputeCopies(model, torch.bfloat16)
    copies.refresh()
    model.norm.weight.data.add_(1)
    assert copies.current
    copies.refresh(force=True)
    assert torch.equal(copies.of(model.norm.weight), model.norm.weight.detach().bfloat16())


def test_after_a_training_step_only_what_the_optimizer_wrote_is_taken_as_it_is() -> None:
    """PyTorch's fused optimizers change parameters without counting it."""
    model = Tied()
    copies = ComputeCopies(model, torch.bfloat16)
    with copies.active():
        model(IDS).float().square().sum().backward()
    assert not copies.current
    model.norm.weight.grad = torch.ones(8)
    torch.optim.AdamW([model.norm.weight], fused=True, lr=0.5).step()
    with copies.active():
        assert torch.equal(model.norm.weight, torch.full((8,), 0.495, dtype=torch.bfloat16))
    with torch.no_grad(), copies.active():
        pass
    assert copies.current, "an evaluation leaves them as they are"


def trained(monkeypatch: pytest.MonkeyPatch, compiled: bool, micro_batches: int, told: bool = True) -> tuple[Tied, int]:
    """The model after three clipped AdamW steps, and how often all parameters were cast into their copies."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    casts = []
    real = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *args: (casts.append(1), real(*args))[1])
    model = Tied()
    copies = ComputeCopies(model, torch.bfloat16)
    held = HeldAsComputed(model, copies.leaves)
    training = TrainingConfig(compile=compiled, learning_rate=0.1, weight_decay=0.1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = ShardOptimizer(parameters, training, held=held, copies=copies if told else None)
    for step in range(3):
        with copies.active():
            for micro in range(micro_batches):
                model((IDS + step + micro) % 11).float().square().sum().backward()
        if optimizer.scales:
            optimizer.step(torch.tensor(0.25))
        else:
            held.widen()
            for parameter in parameters:
                gradient = held.of(parameter)
                assert gradient is not None
                gradient.mul_(0.25)
            optimizer.step()
        if told and optimizer.scales:
            assert copies.current, "written with the parameters"
            for parameter in parameters:
                assert torch.equal(copies.of(parameter), parameter.detach().bfloat16())
    return model, len(casts)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_pass_over_low_precision_gradients_is_that_over_float32_ones_and_no_cast(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    """Gradients kept in bf16 and copies written by the optimizer: the bits of copies that are cast each step, and
    torch's own AdamW from float32 gradients to rounding."""
    one, casts = trained(monkeypatch, True, micro_batches)
    cast_each_step, many = trained(monkeypatch, True, micro_batches, told=False)
    torchs, _ = trained(monkeypatch, False, micro_batches)
    assert (casts, many) == (1, 3)
    for parameter, same, near in zip(one.parameters(), cast_each_step.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(parameter, same)
        torch.testing.assert_close(parameter, near, rtol=1e-4, atol=1e-5)


def test_what_changes_between_backward_and_the_update_is_cast_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen parameter is none of the optimizer's: its copy must not be taken for written."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = Tied()
    copies = ComputeCopies(model, torch.bfloat16)
    held = HeldAsComputed(model, copies.leaves)
    optimizer = ShardOptimizer(model.parameters(), TrainingConfig(compile=True), held=held, copies=copies)
    with copies.active():
        model(IDS).float().square().sum().backward()
    with torch.no_grad():
        model.head.bias.add_(1)
    optimizer.step()
    assert not copies.current
    copies.refresh()
    assert torch.equal(copies.of(model.head.bias), model.head.bias.detach().bfloat16())
