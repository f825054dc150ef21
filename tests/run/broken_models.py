"""Models of a user's whose second rank goes wrong in the third forward."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


class Broken(torch.nn.Module):
    """``fault``: ``raise`` or ``hang``."""

    def __init__(self, vocab_size: int, fault: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 8)
        self.head = torch.nn.Linear(8, vocab_size)
        self.fault, self.forwards = fault, 0

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 3 and dist.get_rank() == 1:
            if self.fault == "raise":
                raise RuntimeError("the reader's shard 7 is gone")
            time.sleep(60)
        return self.head(self.embedding(input_ids))
