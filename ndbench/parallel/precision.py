"""Low-precision compute where no axis shards the parameters: copies to compute with beside the float32 originals.

FSDP's mixed precision would, on a rank that holds everything anyway, copy each parameter twice a forward, again in
backward, and each gradient three times. Here a parameter is cast once a step, and its gradient once. It knows nothing
of FSDP or of losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ndbench.parallel._torch_private import local_tensor


class ComputeCopies:
    """Copies of ``model``'s parameters in ``dtype``. The model shows them while :meth:`active`, else the originals.

    A copy's gradient is added to the original's, in the original's dtype, as soon as it is complete. Ties stay ties.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._originals: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._active = False
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, original in module.named_parameters(recurse=False):
                if id(original) not in made:
                    made[id(original)] = self._copy(original, dtype)
                self._places.append((module, name, original, made[id(original)]))

    def _copy(self, original: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        held = local_tensor(original.data)
        values = torch.empty_like(held, dtype=dtype)
        self._originals.append(held)
        self._copies.append(values)
        copy = nn.Parameter(_placed_like(original, values), requires_grad=original.requires_grad)
        if copy.requires_grad:
            copy.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda done: _hand_over(done, original)
            )
        return copy

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forward and backward belong in here, recomputation included; entering it again inside changes nothing."""
        if self._active:
            yield
            return
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._originals)
        self._active = True
        try:
            for module, name, _, copy in self._places:
                module._parameters[name] = copy
            yield
        finally:
            self._active = False
            for module, name, original, _ in self._places:
                module._parameters[name] = original


def _hand_over(copy: torch.Tensor, original: nn.Parameter) -> None:
    assert copy.grad is not None, "the hook runs when there is one"
    grad = local_tensor(copy.grad)
    copy.grad = None
    if original.grad is None:
        original.grad = _placed_like(original, grad.to(original.dtype))
    else:
        local_tensor(original.grad).add_(grad)


def _placed_like(original: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as what ``original`` is: itself, or a DTensor over the same mesh."""
    if not isinstance(original, DTensor):
        return local
    return DTensor.from_local(
        local,
        original.device_mesh,
        original.placements,
        run_check=False,
        shape=original.shape,
        stride=original.stride(),
    )
