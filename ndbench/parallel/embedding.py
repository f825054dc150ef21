"""An embedding sharded by rows that is never gathered: ranks exchange the rows that tokens ask for, not the table.

FSDP gathers all of the table before the first block and reduces all of its gradient after the last, and nothing hides
either; a batch names few of its rows. Here every rank looks up all tokens of its FSDP group among its own rows, a
reduce-scatter brings each rank its tokens (of the summands one is not zero), and in backward the owners of the rows add
up, in float32, the gradients of all tokens. ``ParallelismConfig.exchanges_rows`` says when that sends less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ndbench.parallel._torch_private import local_tensor, placed_like
from ndbench.parallel.collectives import Group, all_gather, all_reduce, reduce_scatter
from ndbench.parallel.initialize import local_slice
from ndbench.parallel.mesh import Mesh


@dataclass(frozen=True)
class Exchange:
    """Between whom rows travel."""

    shards: Group
    """Who holds one copy of the table together."""
    tokens: Group
    """Who has tokens: ``shards`` of all replicas, a replica's ranks side by side."""
    dtype: torch.dtype | None
    """What is looked up comes in it; None: in the table's."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self


class EmbeddingByRows(nn.Embedding):
    """An embedding whose weight is a DTensor of rows."""

    exchange: Exchange

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Tokens [...] to hidden states [..., H]; all ranks call it, in training with equally many tokens."""
        tokens = input.flatten()
        if not torch.is_grad_enabled():
            count = torch.tensor(len(tokens), device=tokens.device)
            tokens = F.pad(tokens, (0, int(all_reduce(count, self.exchange.tokens, "max")) - len(tokens)))
        found: torch.Tensor = _LookUp.apply(tokens, self.weight, self)  # type: ignore[no-untyped-call]
        return found[: input.numel()].view(*input.shape, -1)


def serves(embedding: nn.Module) -> TypeGuard[nn.Embedding]:
    """Is ``embedding`` a plain trained table, so that looking rows up is all there is to it?"""
    return type(embedding) is nn.Embedding and embedding.max_norm is None and embedding.weight.requires_grad


def exchange_rows(embedding: nn.Embedding, mesh: Mesh, dtype: torch.dtype | None) -> None:
    """Make ``embedding``, whose weight is on meta, one by rows: sharded over the ``fsdp`` view, equal on replicas."""
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
    embedding.exchange = Exchange(Group(mesh.fsdp.get_group()), Group(mesh.loss.get_group()), dtype)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, module: EmbeddingByRows) -> torch.Tensor:
        exchange, table = module.exchange, local_tensor(weight)
        everyone = all_gather(tokens, exchange.tokens, 0)
        replica = exchange.tokens.rank // exchange.shards.size
        size = len(tokens) * exchange.shards.size
        index, here = _own(everyone[replica * size : (replica + 1) * size], weight)
        ctx.everyone, ctx.weight, ctx.module = everyone, weight, module
        if len(table):
            rows = F.embedding(index, table).to(exchange.dtype or table.dtype)
            rows = rows.masked_fill_(~here[:, None], 0.0)
        else:
            rows = torch.zeros(size, table.shape[1], dtype=exchange.dtype or table.dtype, device=table.device)
        return reduce_scatter(rows, exchange.shards, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:  # type: ignore[override]
        weight, exchange, table = ctx.weight, ctx.module.exchange, local_tensor(ctx.weight)
        gradients = all_gather(grad, exchange.tokens, 0).to(table.dtype)
        index, here = _own(ctx.everyone, weight)
        if ctx.module.padding_idx is not None:
            here &= ctx.everyone != ctx.module.padding_idx
        nobody = len(table)  # a row for the tokens of others, which the kernel leaves out
        index = index.masked_fill_(~here, nobody)
        summed: torch.Tensor = torch.ops.aten.embedding_dense_backward(gradients, index, nobody + 1, nobody, False)
        return None, placed_like(weight, summed[:nobody]), None


def _own(tokens: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of each token's row on this rank (some row, of others' tokens), and whether it is here."""
    rows, _ = local_slice(weight)
    index = tokens - rows.start
    return index.clamp(0, max(len(rows) - 1, 0)), (index >= 0) & (index < len(rows))
