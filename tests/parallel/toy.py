"""A model of a user's own: no transformers, residuals inside its parts, its own plan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

PLAN = {
    "layers.*.q": "colwise",
    "layers.*.k": "colwise",
    "layers.*.v": "colwise",
    "layers.*.o": "rowwise",
    "layers.*.feed.up": "colwise",
    "layers.*.feed.down": "rowwise",
    "head": "colwise_gather_output",
}


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.v, self.o = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=False)  # softmax does not see a bias of the keys
        self.feed, self.head_dim = Feed(width), width // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (part(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.feed(x + self.o(attended))


class Toy(nn.Module):
    def __init__(self, vocab_size: int = 131, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
