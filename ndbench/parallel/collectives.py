"""Collectives that autograd can pass through, for activations: each function names what happens forward and backward.

Plain tensors in and out. They go through the functional operators, so they trace under torch.compile and under fake
tensors. Nothing here knows of models; ``tensor.py`` says which is used where.

Convention: a tensor that is the same on all ranks of the group carries its *full* gradient on each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ndbench.parallel._torch_private import functional, group_name


class Group:
    """A process group as the operators want it: name, size, this rank's index."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name, self.size, self.rank = group_name(group), group.size(), group.rank()

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self


def all_reduce(x: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """The reduction over the group, without autograd."""
    ops = functional()
    reduced: torch.Tensor = ops.wait_tensor(ops.all_reduce(x.contiguous(), op, group.name))
    return reduced


def all_gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The group's equal parts along ``dim``, in rank order, without autograd."""
    ops = functional()
    rows = _rows(x, dim)
    stacked: torch.Tensor = ops.wait_tensor(ops.all_gather_into_tensor(rows.contiguous(), group.size, group.name))
    if rows is x:
        return stacked if dim == 0 else torch.cat(stacked.chunk(group.size), dim=dim)
    return stacked.view(*x.shape[:dim], *stacked.shape)


def reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's equal part along ``dim`` of the sum over the group, without autograd."""
    ops = functional()
    rows = _rows(x, dim)
    stacked = rows.contiguous() if rows is not x or dim == 0 else torch.cat(x.chunk(group.size, dim=dim))
    part: torch.Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(stacked, "sum", group.size, group.name))
    return part if rows is x else part.view(*x.shape[:dim], *part.shape)


def _rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` without the dims before ``dim`` if these are of size 1, so that parts lie one after the other: no copy.

    With one sequence a rank this is every gather and scatter of sequence parallelism; else ``x`` itself.
    """
    return x.flatten(0, dim) if dim and all(size == 1 for size in x.shape[:dim]) else x


def own_part(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part along ``dim``: torch's chunks, the last ones smaller when the dim does not divide."""
    length = x.shape[dim]
    chunk = -(-length // group.size)
    start = min(group.rank * chunk, length)
    return x.narrow(dim, start, min(chunk, length - start))


def _gather_uneven(x: torch.Tensor, group: Group, length: int) -> torch.Tensor:
    """Last dim of ``length`` from torch's chunks: parts are padded to equal size for the collective."""
    chunk = -(-length // group.size)
    if chunk * group.size == length:
        return all_gather(x, group, x.ndim - 1)
    padded = torch.nn.functional.pad(x, (0, chunk - x.shape[-1]))
    return all_gather(padded, group, x.ndim - 1)[..., :length]


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _GatherSumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter(grad, ctx.group, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.dim), None, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, length: int) -> torch.Tensor:
        ctx.group = group
        return _gather_uneven(x, group, length)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return own_part(grad, ctx.group, grad.ndim - 1).contiguous(), None, None


class _SplitLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.length = group, x.shape[-1]
        return own_part(x, group, x.ndim - 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather_uneven(grad, ctx.group, ctx.length), None


def sum_partials(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: all-reduce of partial sums. Backward: identity."""
    return _SumOut.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def enter_replicated(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: identity, before work that is split over the group. Backward: all-reduce of its partial gradients."""
    return _SumBack.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[b, s / n, ...] to [b, s, ...], before work that is split over the group. Backward: reduce-scatter."""
    return _GatherSumBack.apply(x, group, 1)  # type: ignore[no-any-return, no-untyped-call]


def scatter_partials(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[b, s, ...] of partial sums to [b, s / n, ...] by reduce-scatter. Backward: all-gather."""
    return _ScatterSum.apply(x, group, 1)  # type: ignore[no-any-return, no-untyped-call]


def gather_last(x: torch.Tensor, group: Group, length: int) -> torch.Tensor:
    """Shards of the last dim to the whole of it (``length``), the same on every rank. Backward: the own part."""
    return _GatherLast.apply(x, group, length)  # type: ignore[no-any-return, no-untyped-call]


def split_last(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The own part of the last dim of a tensor that is the same on every rank. Backward: all-gather."""
    return _SplitLast.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]
