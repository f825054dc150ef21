"""AdamW in one compiled pass over each parameter, clipping included: a gradient is read once, in the dtype it has.

The arithmetic and the state are torch.optim.AdamW's (Loshchilov and Hutter, arXiv:1711.05101), whose object keeps the
groups and the state, so checkpoints do not differ. It knows nothing of schedules or layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class CompiledAdamW:
    """Steps ``optimizer``. Its parameters are plain tensors; the update of an element depends on that element alone."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        import torch._dynamo.config as dynamo

        self.optimizer = optimizer
        self._update: Callable[..., None] = torch.compile(_update, dynamic=False)
        # One kernel a size: with the size known, memory is read in wide words.
        sizes = {p.numel() for group in optimizer.param_groups for p in group["params"]}
        dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * len(sizes) + 8)

    @torch.no_grad()
    def step(
        self,
        scale: torch.Tensor,
        gradients: Mapping[torch.Tensor, torch.Tensor],
        copies: Mapping[torch.Tensor, torch.Tensor],
    ) -> None:
        """Update from the gradients times ``scale``, a scalar on their device; no wait for the device.

        Both mappings are by parameter, and one without a gradient stays as it is. A parameter's copy, in whatever
        dtype, is written with it.
        A group's ``lr`` is a number, or a float64 scalar on that device, which gives the same weights.
        """
        for group in self.optimizer.param_groups:
            parameters = [p for p in group["params"] if p in gradients and p.numel()]
            states = [self._state(p) for p in parameters]
            if not parameters:
                continue
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            first, second = group["betas"]
            sizes, roots = _corrections(steps, group["lr"], first, second)
            decay = 1 - group["lr"] * group["weight_decay"]
            decay = decay.to(scale.dtype) if isinstance(decay, torch.Tensor) else torch.full_like(scale, decay)
            for p, state, size, root in zip(parameters, states, sizes, roots, strict=True):
                tensors = [p.detach(), gradients[p], state["exp_avg"], state["exp_avg_sq"]]
                if p in copies:
                    tensors.append(copies[p].detach())
                if all(x.is_contiguous() for x in tensors):
                    tensors = [x.view(-1) for x in tensors]
                self._update(tensors, scale, decay, size, root, first, second, group["eps"])

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _corrections(
    steps: list[torch.Tensor], rate: float | torch.Tensor, first: float, second: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each step count t: rate / (1 - first^t) and 1 / sqrt(1 - second^t)."""
    sizes, roots = (
        torch._foreach_neg(torch._foreach_sub(torch._foreach_pow(beta, steps), 1)) for beta in (first, second)
    )
    torch._foreach_reciprocal_(sizes)
    torch._foreach_mul_(sizes, rate.to(sizes[0].dtype) if isinstance(rate, torch.Tensor) else rate)
    torch._foreach_sqrt_(roots)
    torch._foreach_reciprocal_(roots)
    return list(sizes), list(roots)


def _update(
    tensors: list[torch.Tensor],
    scale: torch.Tensor,
    decay: torch.Tensor,
    size: torch.Tensor,
    root: torch.Tensor,
    first: float,
    second: float,
    eps: float,
) -> None:
    parameter, gradient, mean, square, *copies = tensors
    scaled = gradient.to(parameter.dtype) * scale
    moved = mean * first + scaled * (1 - first)
    squared = square * second + scaled * scaled * (1 - second)
    mean.copy_(moved)
    square.copy_(squared)
    updated = parameter * decay - size * moved / (squared.sqrt() * root + eps)
    parameter.copy_(updated)
    for copy in copies:
        copy.copy_(updated)
