"""The summed cross-entropy and its gradient by hand: torch's own, whatever the chunk, the transform or the compiler."""

from __future__ import annotations

import functools
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from ndbench.training.loss import IGNORED, CrossEntropy, Upstream, chunked_loss_sum
from tests.parity.pool import pool
from tests.training import loss_tasks

TOKENS, HIDDEN, VOCABULARY = 13, 8, 37


def data(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, output matrix, bias, and labels of which the first and another are ignored."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    )
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[[0, 7]] = IGNORED
    return hidden, weight, bias, labels


def plain(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def softcap(logits: torch.Tensor) -> torch.Tensor:
    return torch.tanh(logits / 2) * 2


@pytest.mark.parametrize("compiled", [False, True], ids=["", "traced"])
def test_the_sum_and_its_gradient_are_torchs_own(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traced form has arithmetic of its own; generating code for it would take a minute on a CPU."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    loss = CrossEntropy(compiled=compiled)
    *_, labels = data()
    for scale in (1.0, 1e4):
        logits = (torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1)) * scale).requires_grad_()
        expected, found = plain(logits, labels), loss(logits, labels)
        (wanted,), (got,) = (torch.autograd.grad(value * 0.5, logits) for value in (expected, found))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            assert loss(logits, labels) == found
    assert not torch.equal(logits, torch.zeros_like(logits)), "logits that others may need are left alone"


def test_labels_that_are_all_ignored_give_zero_and_no_gradient() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    value = CrossEntropy()(logits, torch.full((3,), IGNORED))
    (gradient,) = torch.autograd.grad(value, logits)
    assert value == 0
    assert torch.equal(gradient, torch.zeros(3, 5))


@pytest.mark.parametrize("transform", [None, softcap], ids=["", "softcap"])
@pytest.mark.parametrize("chunk", [1, 4, TOKENS, 100])
def test_chunks_change_nothing(chunk: int, transform: object) -> None:
    hidden, weight, bias, labels = data()
    for biased in (True, False):
        leaves = [hidden, weight, *([bias] if biased else [])]
        logits = F.linear(*leaves)
        expected = torch.autograd.grad(plain(softcap(logits) if transform else logits, labels) / 9, leaves)
        value = chunked_loss_sum(
            hidden,
            weight,
            bias if biased else None,
            labels,
            CrossEntropy(),
            transform,
            chunk,  # type: ignore[arg-type]
        )
        for found, wanted in zip(torch.autograd.grad(value / 9, leaves), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_low_precision_gradients_are_summed_over_chunks_in_float32() -> None:
    """Summed in bf16, 13 chunks of one token would be off by a percent."""
    hidden, weight, bias, labels = data(torch.bfloat16)
    gradients = []
    for chunk in (1, TOKENS):
        value = chunked_loss_sum(hidden, weight, bias, labels, CrossEntropy(), None, chunk)
        gradients.append(torch.autograd.grad(value / 9, weight)[0].float())
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 4e-3


def test_without_gradients_the_sum_is_the_same() -> None:
    hidden, weight, bias, labels = data()
    expected = plain(F.linear(hidden, weight, bias), labels)
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss_sum(hidden, weight, bias, labels, CrossEntropy(), None, 4), expected)


def test_a_divisor_that_is_no_power_of_two_is_not_rounded_to_bf16() -> None:
    """1 / 1500 tokens in bf16 is 0.17 % off, and so would the norm of every gradient be."""
    logits, labels = torch.randn(256, 37, generator=torch.Generator().manual_seed(5)).bfloat16(), torch.arange(256) % 37
    norms = []
    for divisor in (1500, 1024):
        leaf = logits.clone().requires_grad_()
        (CrossEntropy()(leaf, labels) / divisor).backward()
        assert leaf.grad is not None
        norms.append(leaf.grad.double().norm() * divisor)
    assert abs(norms[0] / norms[1] - 1) < 3e-4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU keeps the factor in float32 either way")
def test_the_factor_of_the_gradient_is_not_rounded_to_bf16() -> None:
    """1 / 7001 tokens in bf16 is 0.17 % off, and so would every gradient be."""
    hidden, weight, bias, labels = (x.cuda().detach() for x in data(torch.bfloat16))
    ends = []
    for factor in (torch.tensor(1 / 7001, device="cuda"), torch.tensor(2.0**-13, device="cuda")):
        leaf = weight.clone().requires_grad_()
        value = chunked_loss_sum(hidden, leaf, bias, labels, CrossEntropy(), None, TOKENS)
        value.backward(factor)
        ends.append(leaf.grad.double().norm() / factor.double())  # type: ignore[union-attr]
    assert abs(ends[0] / ends[1] - 1) < 5e-4


@pytest.mark.parametrize("chunk", [4, TOKENS])
def test_what_is_computed_for_the_gradient_to_come_is_not_multiplied_again(chunk: int) -> None:
    """Backward with the tensor that forward was told of takes what is there; with another it is as right."""
    hidden, weight, bias, labels = (x.detach() for x in data())
    found = []
    for told, given in ((None, 0.25), (0.25, None), (0.5, 0.25)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        upstream = None if told is None else Upstream(torch.tensor(told))
        value = chunked_loss_sum(leaves[0], leaves[1], leaves[2], labels, CrossEntropy(), None, chunk, upstream)
        grad = upstream.value if given is None and upstream is not None else torch.tensor(given or 0.0)
        with patch.object(torch, "mul", side_effect=torch.mul) as multiplied:
            value.backward(grad)
        assert bool(multiplied.call_count) == (given is not None)
        found.append([value.detach(), *(leaf.grad for leaf in leaves)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-8)


def test_a_step_multiplies_no_gradient_of_the_loss() -> None:
    """Also where FSDP wraps the head and the model, whose arguments it casts."""
    assert pool(2).run(loss_tasks.multiplications) == [0, 0]
