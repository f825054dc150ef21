"""Linear layers of one input (queries, keys and values; gate and up) as one in a compiled block's backward.

Each would multiply its gradient by its weight, and the results are added up: passes over the hidden states, and small
products that leave a GPU partly idle. With the gradients side by side, [tokens, all features], and the weights one
after another in memory it is one product, rounded once; so are the weights' gradients, by rows. Where the weights lie
apart, products add up in place. It knows nothing of models: what it joins is found in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ndbench.parallel._inductor_private import GraphPass, lower_to_concatenation

_aten = torch.ops.aten
_VIEWS = (_aten.reshape.default, _aten.view.default)


def one_after_another(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The contiguous matrices of equal width as the one that they are in memory, by rows; None when they are not.

    Each may have a storage of its own, as long as the first one's reaches to the end of the last.
    """
    first, rows, place = tensors[0], 0, tensors[0].data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() != place:
            return None
        rows += tensor.shape[0]
        place += tensor.numel() * tensor.element_size()
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


@torch.library.custom_op("ndbench::side_by_side", mutates_args=())
def side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    """[tokens, features] each -> [tokens, all features]. As ``aten.cat`` each element would be computed once a part."""
    return torch.cat(parts, dim=1)


@side_by_side.register_fake
def _(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts, dim=1)


@torch.library.custom_op("ndbench::times_each", mutates_args=())
def times_each(joined: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """The sum of products of the columns of ``joined`` [tokens, all features] with ``weights`` [features, width]."""
    weight = one_after_another(weights)
    if weight is not None:
        return torch.mm(joined, weight)
    parts = torch.split(joined, [each.shape[0] for each in weights], dim=1)
    out = torch.mm(parts[0], weights[0])
    for part, each in zip(parts[1:], weights[1:], strict=True):
        out.addmm_(part, each)
    return out


@times_each.register_fake
def _(joined: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return joined.new_empty(joined.shape[0], weights[0].shape[1])


lower_to_concatenation(torch.ops.ndbench.side_by_side.default)


class JoinProducts(GraphPass):
    """:func:`join` for ``torch.compile(options={"post_grad_custom_pre_pass": ...})``."""

    files = (__file__,)

    def __call__(self, graph: fx.Graph) -> None:
        join(graph)


@dataclass(frozen=True)
class _Layer:
    """What backward computes of one linear layer from ``gradient`` [tokens, features], that of its output."""

    gradient: fx.Node
    weight: fx.Node
    """[features, width], an input of the graph."""
    product: fx.Node
    """gradient @ weight: this layer's part of the gradient of its input."""
    weight_gradient: fx.Node
    """gradient^T @ input."""


def join(graph: fx.Graph) -> int:
    """Join the layers in ``graph``, after autograd and in ATen's operators, that have one input; returns how often."""
    by_input: dict[Any, list[_Layer]] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        layer = _layer(node)
        if layer is not None:
            by_input.setdefault(node.args[1], []).append(layer)
    places = {node: place for place, node in enumerate(graph.nodes)}
    # By the weights' order among the graph's inputs, which is that of the modules, and of memory.
    groups = [sorted(group, key=lambda each: places[each.weight]) for group in by_input.values() if len(group) > 1]
    joined = sum(_join(graph, group, places) for group in groups)
    graph.eliminate_dead_code()
    return joined


def _layer(weight_gradient: fx.Node) -> _Layer | None:
    turned: Any = weight_gradient.args[0]
    if not _is(turned, _aten.permute.default):
        return None
    gradient: fx.Node = turned.args[0]
    products = [user for user in gradient.users if _is(user, _aten.mm.default) and user.args[0] is gradient]
    if len(products) != 1:
        return None
    weight: Any = products[0].args[1]
    if _is(weight, _aten.permute.default) and _is(weight.args[0], _aten.permute.default):
        weight = weight.args[0].args[0]  # turned, and back
    if weight.op != "placeholder":
        return None
    return _Layer(gradient, weight, products[0], weight_gradient)


def _join(graph: fx.Graph, group: list[_Layer], places: dict[fx.Node, int]) -> bool:
    total, sizes = _sum_of([each.product for each in group])
    if total is None or len({each.weight for each in group}) < len(group):
        return False
    gradients, source = [each.gradient for each in group], group[0].weight_gradient.args[1]
    needed = [*graph.find_nodes(op="placeholder"), *gradients, source, *(sizes or ())]
    last = max((node for node in needed if isinstance(node, fx.Node)), key=places.__getitem__)
    results = [total, *(each.weight_gradient for each in group)]
    if any(places[user] < places[last] for result in results for user in result.users):
        return False
    add = _Adder(graph, last)
    gradient = add(torch.ops.ndbench.side_by_side.default, gradients)
    product = add(torch.ops.ndbench.times_each.default, gradient, [each.weight for each in group])
    total.replace_all_uses_with(product if sizes is None else add(_aten.reshape.default, product, sizes))
    turned = add(_aten.permute.default, gradient, [1, 0])
    weight_gradients = add(_aten.mm.default, turned, source)
    start = 0
    for each in group:
        end = start + each.weight.meta["val"].shape[0]
        each.weight_gradient.replace_all_uses_with(add(_aten.slice.Tensor, weight_gradients, 0, start, end))
        start = end
    return True


def _sum_of(products: list[fx.Node]) -> tuple[fx.Node | None, Any]:
    """The node that adds up all of ``products`` and nothing else, None without one, and the sizes it views them in."""
    summands, sizes = set[fx.Node](), None
    for node in products:
        while len(node.users) == 1 and (user := next(iter(node.users))).target in _VIEWS:
            node, sizes = user, user.args[1]
        summands.add(node)
    while len(summands) > 1:
        sums = {user for node in summands for user in node.users if _adds(user, summands)}
        if not sums:
            return None, None
        done = sums.pop()
        summands = summands.difference(done.args) | {done}  # type: ignore[arg-type]
    return summands.pop(), sizes


def _adds(node: fx.Node, summands: set[fx.Node]) -> bool:
    """Is ``node`` the sum of two of ``summands``, which nothing else uses?"""
    if not _is(node, _aten.add.Tensor) or node.kwargs or len(set(node.args)) < 2:
        return False
    return all(isinstance(each, fx.Node) and each in summands and len(each.users) == 1 for each in node.args)


def _is(node: Any, target: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


class _Adder:
    """Adds nodes to ``graph``, one behind another, the first behind ``after``."""

    def __init__(self, graph: fx.Graph, after: fx.Node) -> None:
        self._graph, self._after = graph, after

    def __call__(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        with self._graph.inserting_after(self._after):
            self._after = self._graph.call_function(target, args)
        self._after.meta["val"] = target(*fx.map_arg(args, lambda node: node.meta["val"]))
        return self._after
