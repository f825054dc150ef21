"""An embedding sharded by rows that is never gathered: ranks exchange the rows that tokens ask for, not the table.

FSDP gathers all of the table before the first block and reduces all of its gradient after the last, and nothing hides
either; a batch names few of its rows. Here every rank looks up all tokens of its FSDP group among its own rows, a
reduce-scatter brings each rank its tokens (of the summands one is not zero), and in backward the owners of the rows add
up, in float32, the gradients of all tokens. ``ParallelismConfig.exchanges_rows`` says when that sends less.

These three messages are collectives in every step, also where copy engines bring everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ndbench.parallel._torch_private import assert_on_device, is_fake, local_tensor, placed_like
from ndbench.parallel.collectives import Group, all_gather, all_reduce, reduce_scatter
from ndbench.parallel.initialize import local_slice
from ndbench.parallel.mesh import Mesh

FOREIGN_ROWS = 128
"""Rows beside a rank's own that take the gradients of tokens that are not its: CUDA adds up what is one row's one after
another, and of many ranks' tokens nearly all are others'."""


@dataclass(frozen=True)
class Exchange:
    """Between whom rows travel, and of what."""

    shards: Group
    """Who holds one copy of the table together."""
    everyone: Group
    """Who has tokens: ``shards`` of all replicas, a replica's ranks side by side."""
    tokens: int
    """Of a rank in a micro-batch."""
    dtype: torch.dtype | None
    """What is looked up comes in it; None: in the table's."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self


class EmbeddingByRows(nn.Embedding):
    """An embedding whose weight is a DTensor of rows."""

    exchange: Exchange

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Tokens [...] to hidden states [..., H]. All ranks of ``shards`` call it, for a backward all of ``everyone``.

        Raises ``ValueError`` for another number of tokens than a micro-batch's, before anything is sent; without
        gradients any number will do. Raises ``IndexError`` on a CPU, and fails like a plain table on a GPU, for a token
        outside of the vocabulary.
        """
        tokens, exchange = input.flatten(), self.exchange
        _refuse_outside(tokens, self.num_embeddings)
        if not torch.is_grad_enabled():
            count = torch.tensor(len(tokens), device=tokens.device)
            tokens = F.pad(tokens, (0, int(all_reduce(count, exchange.shards, "max")) - len(tokens)))
        elif len(tokens) != exchange.tokens:
            raise ValueError(
                f"an embedding whose ranks exchange rows was made for {exchange.tokens} tokens a micro-batch, got "
                f"{len(tokens)} ({list(input.shape)})"
            )
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        found: torch.Tensor = _LookUp.apply(tokens, self.weight, self, learns)  # type: ignore[no-untyped-call]
        return found[: input.numel()].view(*input.shape, -1)


def can_exchange_rows(embedding: nn.Module) -> TypeGuard[nn.Embedding]:
    """Is ``embedding`` a plain trained table, so that looking rows up is all there is to it?"""
    return type(embedding) is nn.Embedding and embedding.max_norm is None and embedding.weight.requires_grad


def exchange_rows(embedding: nn.Embedding, mesh: Mesh, tokens: int, dtype: torch.dtype | None) -> None:
    """Make ``embedding``, whose weight is on meta, one by rows: sharded over the ``fsdp`` view, equal on replicas.

    ``tokens`` is what a rank has in a micro-batch.
    """
    weight = embedding.weight
    placements = [*[Replicate()] * (mesh.fsdp_mesh.ndim - 1), Shard(0)]
    whole = DTensor.from_local(
        weight.new_empty(0, weight.shape[1]), mesh.fsdp_mesh, placements, run_check=False,
        shape=weight.shape, stride=weight.stride(),
    )  # fmt: skip
    rows, _ = local_slice(whole)
    local = weight.new_empty(len(rows), weight.shape[1])
    embedding.weight = nn.Parameter(placed_like(whole, local))
    embedding.__class__ = EmbeddingByRows
    assert isinstance(embedding, EmbeddingByRows)
    embedding.exchange = Exchange(Group(mesh.fsdp.get_group()), Group(mesh.loss.get_group()), tokens, dtype)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, module: EmbeddingByRows, learns: bool
    ) -> torch.Tensor:
        exchange, table = module.exchange, local_tensor(weight)
        if learns:
            everyones = all_gather(tokens, exchange.everyone, 0)
            replica, size = exchange.everyone.rank // exchange.shards.size, len(tokens) * exchange.shards.size
            asked = everyones[replica * size : (replica + 1) * size]
            ctx.everyones, ctx.weight, ctx.module = everyones, weight, module
        else:  # a replica may be alone
            asked = all_gather(tokens, exchange.shards, 0)
        index, here = _own_rows(asked, weight)
        dtype = exchange.dtype or table.dtype
        if len(table):
            rows = F.embedding(index.clamp(0, len(table) - 1), table).to(dtype).masked_fill_(~here[:, None], 0.0)
        else:
            rows = torch.zeros(len(asked), table.shape[1], dtype=dtype, device=table.device)
        return reduce_scatter(rows, exchange.shards, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:  # type: ignore[override]
        weight, exchange, table = ctx.weight, ctx.module.exchange, local_tensor(ctx.weight)
        gradients = all_gather(grad, exchange.everyone, 0).to(table.dtype)
        index, here = _own_rows(ctx.everyones, weight)
        if ctx.module.padding_idx is not None:
            here &= ctx.everyones != ctx.module.padding_idx
        foreign = len(table) + torch.arange(len(index), device=index.device) % FOREIGN_ROWS
        summed: torch.Tensor = torch.ops.aten.embedding_dense_backward(
            gradients, torch.where(here, index, foreign), len(table) + FOREIGN_ROWS, -1, False
        )
        return None, placed_like(weight, summed[: len(table)]), None, None


def _own_rows(tokens: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of each token's row among this rank's, and whether it is one of them."""
    rows, _ = local_slice(weight)
    index = tokens - rows.start
    return index, (index >= 0) & (index < len(rows))


def _refuse_outside(tokens: torch.Tensor, vocabulary: int) -> None:
    """Nobody would own such a token, and it would be taken for zeros."""
    inside = ((tokens >= 0) & (tokens < vocabulary)).all()
    if tokens.device.type == "cuda":
        assert_on_device(inside)
    elif tokens.device.type == "cpu" and not is_fake(tokens) and not inside:
        raise IndexError(f"a token is outside of the vocabulary of {vocabulary}: {tokens.min()} to {tokens.max()}")
