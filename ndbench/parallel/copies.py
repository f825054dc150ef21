"""Parameters in the dtype that computes, kept beside the float32 originals: cast when these have changed, or written.

It knows nothing of what the copies are for: to compute with (``precision.py``), or for peers (``peer_gather.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ndbench.parallel._torch_private import local_tensor, version


class Copies:
    """Each of ``pairs``: a parameter, and a tensor that holds this rank's part of it in another dtype.

    Once used in a training step the copies are cast anew for the next one, unless the optimizer has :meth:`written`
    them and nothing changed the originals since: PyTorch counts in-place operations on them, their views and
    ``detach()``. What it does not count, writing through ``.data`` or by a fused optimizer, between the optimizer's
    update and the next step needs ``refresh(force=True)``.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        self._of: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._watched: list[torch.Tensor] = []
        for original, copy in pairs:
            held = local_tensor(original)
            self._of[id(original)] = copy
            self._originals.append(held)
            self._copies.append(copy)
            self._watched += [original] if held is original else [original, held]
        self._seen, self._trusted = -1, False

    @property
    def unchanged(self) -> bool:
        """Has nothing been counted that changed the originals since the copies were cast or written?"""
        return self._seen == self._changes()

    @property
    def current(self) -> bool:
        """Will the next step take the copies as they are? Told by counters on the host."""
        return self._trusted and self.unchanged

    def of(self, original: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the copy of ``original``, if it has one: whoever changes the original may write both."""
        return self._of.get(id(original))

    def written(self) -> None:
        """Whoever changed the originals has written the copies, too."""
        self._seen, self._trusted = self._changes(), True

    def used(self) -> None:
        """A training step computes with them: what comes after it changes the originals, counted or not."""
        self._trusted = False

    def distrust(self) -> None:
        """The copies may be those of anything: what was to cast or write them was not done."""
        self._seen, self._trusted = -1, False

    @torch.no_grad()
    def refresh(self, force: bool = False) -> None:
        """Make the copies those of the originals as they are now, which costs nothing when they are.

        A step that is replayed does not run it: call it before a replay.
        """
        if force or not self.current:
            torch._foreach_copy_(self._copies, self._originals)
            self.written()

    def _changes(self) -> int:
        # Counters only rise, so their sum tells whether any of them did.
        return sum(version(tensor) for tensor in self._watched)
