"""An optimizer of a user's own that is not elementwise: it must see whole parameters, not shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class NormedSGD(torch.optim.Optimizer):
    """Steps of a length relative to each parameter's own norm."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-12)))
