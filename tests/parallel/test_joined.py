"""Joined products of backward: found where they are, with the numbers of those apart."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ndbench.parallel import joined
from ndbench.parallel._inductor_private import TRIED_TORCH
from ndbench.parallel.joined import JoinProducts, join, one_after_another
from ndbench.parallel.precision import ComputeCopies
from tests.parity.cases import case, layout, llama, training
from tests.parity.compare import assert_small, errors
from tests.parity.pool import pool

TRIED = f"tried with torch {', '.join(TRIED_TORCH)}, this is {torch.__version__}"


class Siblings(nn.Module):
    """Three linear layers of one input, of different sizes, with and without bias."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8, bias=False)
        self.a = nn.Linear(8, 16, bias=bias)
        self.b = nn.Linear(8, 4, bias=False)
        self.c = nn.Linear(8, 4, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return torch.cat((self.a(x).sin(), self.b(x).cos() * 2, self.c(x).tanh()), dim=-1)


class Residual(Siblings):
    """Their input is used besides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[..., :8] + self.before(x).exp()


class Single(Siblings):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.before(x)).sin()


class Counting(JoinProducts):
    """Counts what was joined in the last graph, backward's; its graphs are not those of the cache."""

    groups, saved = 0, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        before = _products(graph)
        self.groups = join(graph)
        graph.lint()
        self.saved = before - _products(graph)

    def uuid(self) -> Any:
        return None


def _products(graph: torch.fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))


def gradients(model: nn.Module, x: torch.Tensor, passes: JoinProducts | None) -> dict[str, torch.Tensor]:
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    forward = model
    if passes is not None:
        torch._dynamo.reset()
        forward = torch.compile(model, options={"post_grad_custom_pre_pass": passes})
    (forward(x) ** 2).sum().backward()
    assert x.grad is not None
    return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "options", "groups", "saved"),
    [
        (Siblings, {}, 1, 5),  # of three sums of products, none is left apart, and of three products of gradients one
        (Siblings, {"bias": True}, 1, 5),
        (Residual, {}, 1, 5),
        (Single, {}, 0, 0),
    ],
)
def test_gradients_are_those_of_separate_products(kind: Any, options: Any, groups: int, saved: int) -> None:
    torch.manual_seed(0)
    model, x = kind(**options).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    expected, passes = gradients(model, x, None), Counting()
    found = gradients(model, x, passes)
    assert (passes.groups, passes.saved) == (groups, saved), TRIED
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
        assert found[name].is_contiguous()


def test_batches_of_any_shape() -> None:
    model, passes = Siblings().double(), Counting()
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), dynamic=True, options={"post_grad_custom_pre_pass": passes})
    for shape in ((2, 5, 8), (3, 7, 8), (4, 9, 8)):
        x = torch.randn(shape, dtype=torch.float64)
        expected, found = (torch.autograd.grad((m(x) ** 2).sum(), list(m.parameters())) for m in (model, compiled))
        assert passes.groups == 1, TRIED
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _backward_of_two(d: Tensor, e: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Any:
    return d @ a + e @ b, d.T @ x, e.T @ x


def _one_weight(d: Tensor, e: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Any:
    return d @ a + d.sin() @ a, d.T @ x, d.sin().T @ x


def _another_term_first(d: Tensor, e: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Any:
    return (x + d @ a) + e @ b, d.T @ x, e.T @ x


def _a_product_is_used(d: Tensor, e: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Any:
    product = d @ a
    return product + e @ b, product, d.T @ x, e.T @ x


def _a_gradient_is_used_early(
    d: torch.Tensor, e: torch.Tensor, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor
) -> Any:
    own = (d.T @ x).sum()
    later = e * own
    return d @ a + later @ b, own, later.T @ x


@pytest.mark.parametrize(
    ("function", "groups"),
    [
        (_backward_of_two, 1),
        (_one_weight, 0),
        (_another_term_first, 0),
        (_a_product_is_used, 0),
        (_a_gradient_is_used_early, 0),
    ],
)
def test_what_is_not_the_sum_of_all_stays(function: Any, groups: int) -> None:
    inputs = [torch.randn(shape) for shape in ((5, 6), (5, 3), (6, 4), (3, 4), (5, 4))]
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default):
        node.target, node.args = torch.ops.aten.permute.default, (node.args[0], [1, 0])
    traced.recompile()
    expected = traced(*inputs)
    assert join(traced.graph) == groups
    traced.graph.lint()
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), expected)


def test_a_weight_lies_behind_the_one_before() -> None:
    memory = torch.arange(60.0)
    first, second, third = memory[:20].view(4, 5), memory[20:30].view(2, 5), memory[30:35].view(1, 5)
    whole = one_after_another([first, second, third])
    assert whole is not None
    assert torch.equal(whole, memory[:35].view(7, 5))
    assert whole.data_ptr() == memory.data_ptr()
    assert one_after_another([second, first]) is None, "another order"
    assert one_after_another([first, third]) is None, "a gap"
    assert one_after_another([first, memory[20:40].view(5, 4).T[:2]]) is None, "turned"
    assert one_after_another([first, second.clone()]) is None, "elsewhere"
    storage = memory.untyped_storage()
    ends = torch.empty(0).set_(storage[:80], 0, (4, 5))
    reaches = torch.empty(0).set_(storage[:140], 0, (4, 5))
    own = torch.empty(0).set_(storage[80:], 0, (2, 5))
    assert one_after_another([ends, own]) is None, "its storage ends before"
    assert torch.equal(one_after_another([reaches, own]), memory[:30].view(6, 5))


@pytest.mark.parametrize("adjacent", [True, False])
def test_products_add_up_wherever_the_weights_are(adjacent: bool) -> None:
    memory = torch.randn(9, 5, dtype=torch.float64)
    weights = list(memory.split([4, 2, 3]))
    if not adjacent:
        weights = [each.clone() for each in weights]
    assert (one_after_another(weights) is not None) == adjacent
    gradient = torch.randn(7, 9, dtype=torch.float64)
    torch.testing.assert_close(joined.times_each(gradient, weights), gradient @ memory)
    torch.library.opcheck(joined.times_each, (gradient, weights))
    torch.library.opcheck(joined.side_by_side, ([gradient, gradient[:, :2]],))


def test_copies_to_compute_with_lie_one_after_another() -> None:
    layers = nn.Sequential(nn.Linear(16, 32), nn.Linear(16, 8, bias=False), nn.Linear(16, 3), nn.Linear(16, 8))
    copies = ComputeCopies(layers, torch.bfloat16)
    weights = [copy for original, copy in copies.leaves if original.ndim == 2]
    assert one_after_another(weights[1:3]) is not None
    assert one_after_another(weights[:2]) is None, "a bias is between them"
    assert one_after_another(weights[2:]) is None, "a bias, and what aligns the next for wide words"


def test_a_pass_is_told_by_its_source() -> None:
    assert JoinProducts().uuid() == JoinProducts().uuid() != Counting().uuid(), TRIED


COUNTS: list[int] = []


@contextmanager
def counted() -> Iterator[None]:
    """Groups joined by this rank in COUNTS; no graph comes from the cache."""

    def count(graph: torch.fx.Graph) -> int:
        COUNTS.append(join(graph))
        return COUNTS[-1]

    with patch.object(joined, "join", count), torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def counts() -> list[int]:
    found = COUNTS.copy()
    COUNTS.clear()
    return found


@pytest.mark.parametrize("parallelism", [layout(1, 1, 1, 2), layout(1, 1, 2)], ids=lambda each: each.layout)
def test_layers_of_a_block_are_joined_in_every_layout(parallelism: Any) -> None:
    """Queries, keys and values, gate and up: in one graph, or in two where the ring is between them."""
    here = case(parallelism, llama(num_hidden_layers=1), training=training(compile=True), tensors=False)
    assert_small(here, errors(here, counted))
    assert [sum(each) for each in pool(parallelism.world_size).run(counts)] == [2, 2], TRIED
