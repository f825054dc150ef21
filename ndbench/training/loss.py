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

SumLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [tokens, vocabulary], labels [tokens]) -> scalar sum in float32."""


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over labels that are not -100, in float32."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def vocabulary_parallel_cross_entropy_sum(group: Group, vocab_size: int) -> SumLoss:
    """The same sum when each rank of ``group`` has its chunk of the vocabulary; two small all-reduces a call.

    The result is the same on every rank of the group (Shoeybi et al., "Megatron-LM", section 3).
    """
    chunk = -(-vocab_size // group.size)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _VocabularyParallel.apply(logits, labels, group, group.rank * chunk)  # type: ignore[no-untyped-call]
        return summed

    return loss


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Group, start: int) -> torch.Tensor:
        logits = logits.float()
        highest = all_reduce(logits.amax(dim=-1), group, "max")
        shifted = logits - highest[:, None]
        local = labels - start
        here = (local >= 0) & (local < logits.shape[-1])
        index = local.masked_fill(~here, 0)[:, None]
        target = shifted.gather(1, index)[:, 0].masked_fill(~here, 0.0)
        exponentials = shifted.exp_()
        total, target = all_reduce(torch.stack([exponentials.sum(dim=-1), target]), group)
        valid = labels != IGNORED
        ctx.save_for_backward(exponentials, total, index, here & valid, valid)
        return torch.where(valid, total.log() - target, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        exponentials, total, index, here, valid = ctx.saved_tensors
        softmax = exponentials / total[:, None]
        softmax.scatter_add_(1, index, -here[:, None].to(softmax.dtype))
        return softmax * (valid * grad)[:, None], None, None, None


def chunked_loss_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    loss: SumLoss,
    transform: Callable[[torch.Tensor], torch.Tensor],
    chunk_size: int,
) -> torch.Tensor:
    """Output head and loss over chunks of ``chunk_size`` tokens; at no time are more logits than one chunk's alive.

    hidden is [tokens, hidden size], weight [vocabulary (or this rank's shard), hidden size], labels [tokens];
    ``transform`` is what the model does to its logits. The gradients of a chunk are computed with its loss, in forward,
    so that nothing is computed twice; without gradients, in evaluation, none are.
    """
    if not torch.is_grad_enabled():
        pieces = zip(torch.split(hidden, chunk_size), torch.split(labels, chunk_size), strict=True)
        sums = [loss(transform(F.linear(piece, weight, bias)), piece_labels) for piece, piece_labels in pieces]
        return torch.stack(sums).sum()
    summed: torch.Tensor = _Chunked.apply(hidden, weight, bias, labels, loss, transform, chunk_size)  # type: ignore[no-untyped-call]
    return summed


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        loss: SumLoss,
        transform: Callable[[torch.Tensor], torch.Tensor],
        chunk_size: int,
    ) -> torch.Tensor:
        leaves = [x.detach().requires_grad_() for x in (weight, bias) if x is not None]
        sums = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grads = []
        for piece, piece_labels in zip(torch.split(hidden, chunk_size), torch.split(labels, chunk_size), strict=True):
            piece = piece.detach().requires_grad_()
            with torch.enable_grad():
                value = loss(transform(F.linear(piece, *leaves)), piece_labels)
            piece_grad, *grads = torch.autograd.grad(value, [piece, *leaves])
            hidden_grads.append(piece_grad)
            torch._foreach_add_(sums, grads)
            total += value.detach()
        ctx.save_for_backward(
            torch.cat(hidden_grads), *(s.to(leaf.dtype) for s, leaf in zip(sums, leaves, strict=True))
        )
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, *bias = (saved * grad for saved in ctx.saved_tensors)
        return hidden, weight, bias[0] if bias else None, None, None, None, None
