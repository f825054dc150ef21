"""Low-precision compute where no axis shards the parameters: copies to compute with beside the float32 originals.

FSDP's mixed precision would, on a rank that holds everything anyway, copy each parameter twice a forward, again in
backward, and each gradient three times. Here a parameter is cast when it has changed, or by the optimizer on its way.
It knows nothing of FSDP or of losses; where a copy's gradient goes is ``held.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ndbench.parallel._torch_private import local_tensor, placed_like
from ndbench.parallel.copies import Copies
from ndbench.parallel.peer_memory import Offsets


class ComputeCopies(Copies):
    """Copies of ``model``'s parameters in ``dtype``. The model shows them while :meth:`active`, else the originals.

    Ties stay ties. The copies lie one after another: what ``joined.py`` can multiply by at once.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.leaves: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Each parameter that is trained, with its copy: what backward leaves the gradient on."""
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._active = False
        originals = list(model.parameters())
        plan = Offsets()
        starts = [plan.add(local_tensor(original).numel(), dtype) // dtype.itemsize for original in originals]
        memory = torch.empty(-(-plan.size // dtype.itemsize), dtype=dtype, device=local_tensor(originals[0]).device)
        made = {id(p): (p, _copy(p, memory[start:])) for p, start in zip(originals, starts, strict=True)}
        for module in model.modules():
            for name, original in module.named_parameters(recurse=False):
                self._places.append((module, name, *made[id(original)]))
        self.leaves = [pair for pair in made.values() if pair[1].requires_grad]
        super().__init__((original, local_tensor(copy)) for original, copy in made.values())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forward and backward belong in here, recomputation included; entering it again inside changes nothing."""
        if self._active:
            yield
            return
        self.refresh()
        self._active = True
        try:
            for module, name, _, copy in self._places:
                module._parameters[name] = copy
            yield
        finally:
            self._active = False
            if torch.is_grad_enabled():
                self.used()
            for module, name, original, _ in self._places:
                module._parameters[name] = original


def _copy(original: nn.Parameter, memory: torch.Tensor) -> nn.Parameter:
    local = local_tensor(original)
    # ``data``: autograd's name for it is the parameter's alone.
    values = memory[: local.numel()].data.view(local.shape)
    return nn.Parameter(placed_like(original, values), requires_grad=original.requires_grad)
