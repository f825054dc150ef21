"""Cross-entropy summed over the valid tokens of a rank: plain, sharded over the vocabulary, or chunk by chunk.

The sum is divided once, by the valid tokens of the whole global batch (``step.py``): never a mean of means. A rank
without a valid token contributes zero. Logits that are sharded over tp are never gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ndbench.parallel.collectives import Group, all_reduce

IGNORED = -100

Transform = Callable[[torch.Tensor], torch.Tensor]


class Upstream:
    """The gradient that backward will be given for a sum, a float32 scalar. No tensor: FSDP would change its dtype."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class CrossEntropy:
    """(logits [tokens, vocabulary], labels [tokens]) -> sum over labels that are not -100, in float32.

    With ``group``, logits are this rank's chunk of a vocabulary of ``vocab_size``; the sum is the same on every rank
    of it, at two small all-reduces (Shoeybi et al., "Megatron-LM", section 3). ``compiled`` fuses the passes over the
    logits, so that none of them is ever stored in float32.
    """

    def __init__(self, group: Group | None = None, vocab_size: int = 0, compiled: bool = False) -> None:
        self.group = group
        self.start = 0 if group is None else group.rank * -(-vocab_size // group.size)
        self._compute = torch.compile(sum_and_gradient, dynamic=False) if compiled else sum_and_gradient

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, upstream: Upstream | None = None) -> torch.Tensor:
        """``upstream`` is the gradient of the sum that backward will be given: see :func:`_times`."""
        if torch.is_grad_enabled() and logits.requires_grad:
            summed: torch.Tensor = _Sum.apply(logits, labels, self, upstream)  # type: ignore[no-untyped-call]
            return summed
        return self.with_gradient(logits, labels, torch.empty_like(logits))

    def with_gradient(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        gradient: torch.Tensor,
        upstream: Upstream | None = None,
    ) -> torch.Tensor:
        """The sum, without autograd; its gradient (times ``upstream``, a scalar) is left in ``gradient``, which may be
        ``logits`` itself."""
        value = None if upstream is None else upstream.value
        return self._compute(logits, labels, gradient, self.group, self.start, value)


def sum_and_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    gradient: torch.Tensor,
    group: Group | None,
    start: int,
    upstream: torch.Tensor | None = None,
) -> torch.Tensor:
    """What :class:`CrossEntropy` computes: sum of log(sum(exp(x))) - x[label], and softmax(x) - onehot(label)."""
    x = logits.float()
    valid = labels != IGNORED
    local = labels - start
    here = valid & (local >= 0) & (local < x.shape[-1])
    index = local.masked_fill(~here, 0)[:, None]
    # In this very form Inductor finds maximum and sum in one pass over the logits.
    highest = x.amax(dim=-1, keepdim=True)
    if group is not None:
        highest = all_reduce(highest, group, "max")
    shifted = x - highest
    target = shifted.gather(1, index)[:, 0].masked_fill(~here, 0.0)
    fused = torch.compiler.is_compiling()
    exponentials = shifted.exp() if fused else shifted.exp_()
    total = exponentials.sum(dim=-1, keepdim=True)[:, 0]
    if group is not None:
        total, target = all_reduce(torch.stack([total, target]), group)
    scale = torch.where(valid, 1.0 / total, 0.0)[:, None]
    if fused:
        # A comparison fuses; a scatter would store the whole softmax first.
        columns = torch.arange(x.shape[-1], device=x.device)
        softmax = exponentials * scale - torch.where((columns[None, :] == index) & here[:, None], 1.0, 0.0)
    else:
        softmax = exponentials.mul_(scale).scatter_add_(1, index, -here[:, None].to(x.dtype))
    if upstream is not None:
        softmax = softmax * upstream if fused else softmax.mul_(upstream)
    gradient.copy_(softmax)
    return torch.where(valid, total.log() - target, 0.0).sum()


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, loss: CrossEntropy, upstream: Upstream | None
    ) -> torch.Tensor:
        gradient = torch.empty_like(logits)
        summed = loss.with_gradient(logits, labels, gradient, upstream)
        ctx.save_for_backward(gradient)
        ctx.upstream = upstream
        return summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return _times(gradient, grad, ctx.upstream, gradient.dtype), None, None, None


def _times(gradient: torch.Tensor, grad: torch.Tensor, upstream: Upstream | None, dtype: torch.dtype) -> torch.Tensor:
    """``gradient`` times ``grad``, the gradient of the sum.

    What was computed for ``upstream`` is ready when backward comes with that very tensor: at a vocabulary of 128,000 a
    pass over the head's gradient is 1 % of a step.
    """
    if upstream is not None and grad is upstream.value:
        return gradient.to(dtype)
    factor = grad if upstream is None else grad / upstream.value
    # A tensor without dims would first be rounded to the dtype of the other.
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))


def chunked_loss_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    loss: CrossEntropy,
    transform: Transform | None,
    chunk_size: int,
    upstream: Upstream | None = None,
) -> torch.Tensor:
    """Output head and loss over chunks of ``chunk_size`` tokens; at no time are more logits than one chunk's alive.

    hidden is [tokens, hidden size], weight [vocabulary (or this rank's shard), hidden size], labels [tokens];
    ``transform`` is what the model does to its logits. The gradients of a chunk are computed with its loss, in forward,
    so that nothing is computed twice; without gradients, in evaluation, none are. ``upstream`` as for ``loss``.
    """
    if torch.is_grad_enabled():
        summed: torch.Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, labels, loss, transform, chunk_size, upstream
        )
        return summed
    sums = []
    for piece, piece_labels in zip(torch.split(hidden, chunk_size), torch.split(labels, chunk_size), strict=True):
        logits = F.linear(piece, weight, bias)
        sums.append(loss(logits if transform is None else transform(logits), piece_labels))
    return torch.stack(sums).sum()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        loss: CrossEntropy,
        transform: Transform | None,
        chunk_size: int,
        upstream: Upstream | None,
    ) -> torch.Tensor:
        hidden_grad = torch.empty_like(hidden)
        chunks = -(-len(hidden) // chunk_size)
        weight_grads, bias_grads = _RunningSum(chunks), _RunningSum(chunks)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        pieces = (torch.split(x, chunk_size) for x in (hidden, hidden_grad, labels))
        for piece, piece_grad, piece_labels in zip(*pieces, strict=True):
            logits = F.linear(piece, weight, bias)
            value, gradient = _value_and_gradient(logits, piece_labels, loss, transform, upstream)
            total += value
            torch.mm(gradient, weight, out=piece_grad)
            weight_grads.add_product(gradient.t(), piece)
            if bias is not None:
                bias_grads.add(gradient.sum(dim=0))
        ctx.save_for_backward(hidden_grad, weight_grads.sum, bias_grads.sum)
        ctx.dtype, ctx.upstream = weight.dtype, upstream
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias = (
            None if saved is None else _times(saved, grad, ctx.upstream, ctx.dtype) for saved in ctx.saved_tensors
        )
        return hidden, weight, bias, None, None, None, None, None


def _value_and_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss: CrossEntropy,
    transform: Transform | None,
    upstream: Upstream | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of ``logits`` and its gradient, which takes their place."""
    if transform is None:
        return loss.with_gradient(logits, labels, logits, upstream), logits
    with torch.enable_grad():
        leaf = logits.requires_grad_()
        transformed = transform(leaf)
    gradient = torch.empty_like(transformed)
    value = loss.with_gradient(transformed.detach(), labels, gradient, upstream)
    (gradient,) = torch.autograd.grad(transformed, leaf, gradient)
    return value, gradient


class _RunningSum:
    """A sum of ``summands`` in float32, or in their own dtype when they are at most two: that rounds once."""

    sum: torch.Tensor | None = None

    def __init__(self, summands: int) -> None:
        self._wide = summands > 2

    def add(self, summand: torch.Tensor) -> None:
        if self.sum is None:
            self.sum = summand
        else:
            self.sum = (self.sum.to(torch.float32) if self._wide else self.sum).add_(summand)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``left @ right``: to one that is there within the product, where nothing is to be made wider."""
        if self.sum is None or self._wide:
            self.add(left @ right)
        else:
            self.sum.addmm_(left, right)
