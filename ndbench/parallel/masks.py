"""Attention masks from token positions: causal, sliding window, packed documents, alone and together.

A mask is built for one block of queries against one block of keys, whatever tokens these hold, so the same function
serves a whole sequence and a tile of the ring. It knows nothing of process groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def positions(chunks: Sequence[range], device: torch.device) -> torch.Tensor:
    """Global token indices [tokens] of a shard made of ``chunks``."""
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def visible(
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    window: int | None = None,
    q_documents: torch.Tensor | None = None,
    k_documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which keys a query sees, bool [batch or 1, 1, queries, keys].

    A query sees itself and what came before it; with ``window`` only the last ``window`` tokens, itself included
    (transformers' meaning); with document ids ([batch, queries] and [batch, keys]) only tokens of its own document.
    Positions are indices in the whole sequence, [queries] and [keys]: they do not restart with a document.
    """
    distance = q_positions[:, None] - k_positions[None, :]
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    seen = seen[None, None]
    if q_documents is not None:
        assert k_documents is not None, "document ids of queries and keys come together"
        seen = seen & (q_documents[:, None, :, None] == k_documents[:, None, None, :])
    return seen


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``seen`` as a mask to add to the scores: 0 where a query sees a key, else a large negative number.

    Not -inf: a query that sees no key of a tile would get a log-sum-exp of 0 (CPU kernel) or NaN and poison the merge.
    Not the dtype's minimum: kernels that work in base 2 multiply by log2(e) and would overflow to -inf.
    """
    hidden = -3e4 if dtype == torch.float16 else -1e30
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, hidden)
