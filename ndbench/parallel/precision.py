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

from ndbench.parallel._torch_private import local_tensor, version
from ndbench.parallel.held import placed_like


class ComputeCopies:
    """Copies of ``model``'s parameters in ``dtype``. The model shows them while :meth:`active`, else the originals.

    Ties stay ties. Once used in a training step the copies are cast anew for the next one, unless the optimizer has
    :meth:`written` them and nothing changed the originals since: PyTorch counts in-place operations on them, their
    views and ``detach()``. What it does not count, writing through ``.data`` or by a fused optimizer, between the
    optimizer's update and the next step needs ``refresh(force=True)``.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.leaves: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Each parameter that is trained, with its copy: what backward leaves the gradient on."""
        self._originals: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._watched: list[torch.Tensor] = []
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self._active = False
        self._seen, self._trusted = -1, False
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, original in module.named_parameters(recurse=False):
                if id(original) not in made:
                    made[id(original)] = self._copy(original, dtype)
                self._places.append((module, name, original, made[id(original)]))
        self._of = {id(original): local_tensor(copy) for _, _, original, copy in self._places}

    def _copy(self, original: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        held = local_tensor(original)
        values = torch.empty_like(held, dtype=dtype, requires_grad=False)
        self._originals.append(held)
        self._copies.append(values)
        self._watched += [original] if held is original else [original, held]
        copy = nn.Parameter(placed_like(original, values), requires_grad=original.requires_grad)
        if copy.requires_grad:
            self.leaves.append((original, copy))
        return copy

    @property
    def unchanged(self) -> bool:
        """Has nothing been counted that changed the originals since the copies were cast or written?"""
        return self._seen == self._changes()

    @property
    def current(self) -> bool:
        """Will the next step take the copies as they are? Told by counters on the host."""
        return self._trusted and self.unchanged

    def of(self, original: nn.Parameter) -> torch.Tensor:
        """This rank's part of the copy of ``original``: whoever changes the original may write both."""
        return self._of[id(original)]

    def written(self) -> None:
        """Whoever changed the originals has written the copies, too."""
        self._seen, self._trusted = self._changes(), True

    def distrust(self) -> None:
        """The copies may be those of anything: what was to cast or write them was not done."""
        self._seen, self._trusted = -1, False

    @torch.no_grad()
    def refresh(self, force: bool = False) -> None:
        """Make the copies those of the originals as they are now, which costs nothing when they are.

        :meth:`active` does it. A step that is replayed does not run it: call it before a replay.
        """
        if force or not self.current:
            torch._foreach_copy_(self._copies, self._originals)
            self.written()

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
            # What comes after a training step changes the originals, counted or not.
            self._trusted = self._trusted and not torch.is_grad_enabled()
            for module, name, original, _ in self._places:
                module._parameters[name] = original

    def _changes(self) -> int:
        # Counters only rise, so their sum tells whether any of them did.
        return sum(version(tensor) for tensor in self._watched)
