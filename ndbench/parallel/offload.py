"""What blocks keep for backward waits in host memory: it leaves behind forward, and is back a block before backward.

For blocks that compute themselves again, so that autograd saves little more than their input. Copies go through a lane
of their own (``peer_memory.py``) in the order in which they are asked for, and the host waits for none: the computing
stream does, a block later, when they have long ended, and only then is their memory given up. It knows nothing of
models, nor of what is recomputed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.peer_memory import Lane, wait

LEAST_BYTES = 2**20
"""Of a tensor on a GPU that is worth a copy."""


class _Passage:
    """One forward through one block, and its backward."""

    def __init__(self, before: _Passage | None, travels: bool, shared: set[int]) -> None:
        self.before, self.travels, self.shared = before, travels, shared
        # Weak: what the graph lets go without a backward must not be kept alive by the way back.
        self.packed: list[weakref.ref[Packed]] = []
        self.begun = False
        """Backward is in it."""


class Packed:
    """A tensor that backward will ask for: on the device, or in ``host`` memory and perhaps on its way back."""

    def __init__(self, passage: _Passage, tensor: torch.Tensor) -> None:
        self.passage = passage
        self.tensor: torch.Tensor | None = tensor
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.host: torch.Tensor | None = None
        self.home: list[torch.Tensor] = []

    def __del__(self) -> None:
        # At once to the next one: it is written and read by the lane alone, in order.
        if self.host is not None:
            self.home.append(self.host)


class Offload:
    """Takes what ``blocks`` of one model keep to the host and back. The last block's, needed at once, stays."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        self._blocks, self._device = blocks, device
        self._least = LEAST_BYTES if device.type == "cuda" else 1
        self._lane = Lane(device)
        self._free: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        """Host memory without a tensor in it, which later steps use again."""
        self._moving: deque[tuple[torch.Tensor, torch.cuda.Event | None, _Passage]] = deque()
        """In the lane's order: device memory that a copy reads or writes, for all that the computing stream knows."""
        self._now: _Passage | None = None
        """Forward is in it."""
        self._last: _Passage | None = None

    def wrap(self, blocks: list[nn.Module]) -> None:
        """Blocks in the order of forward; what their forward is then must not be compiled once more."""
        for index, block in enumerate(blocks):
            block.forward = self._wrapped(block, index)  # type: ignore[method-assign]

    def _wrapped(self, block: nn.Module, index: int) -> Any:
        inner = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            with self._passing(index, _shared(block, args, kwargs)):
                return inner(*args, **kwargs)

        return forward

    @contextmanager
    def _passing(self, index: int, shared: set[int]) -> Iterator[None]:
        if index == 0:
            # A step that failed half-way may have left copies behind.
            self._last = None
            self._settle()
        self._now = passage = _Passage(self._last, index + 1 < self._blocks, shared)
        self._last = passage if passage.travels else None
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._now = None
            # What this block sent off still travels behind the next one, what those before it sent has arrived.
            self._settle(until=passage)

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Of a block that forward is in: ``tensor`` itself is not needed any more."""
        assert self._now is not None, "forward is in a block"
        packed = Packed(self._now, tensor.detach())  # with a history it would keep alive what it was made of
        self._now.packed.append(weakref.ref(packed))
        if self._now.travels and self._is_worth_it(tensor, self._now.shared):
            self._send(packed)
        return packed

    def unpack(self, packed: Packed) -> torch.Tensor:
        """The tensor again, the same to the bit; may be asked for more than once, and from another thread."""
        passage = packed.passage
        if not passage.begun:
            passage.begun = True
            self._fetch(passage)
            self._settle()
            if passage.before is not None and not passage.before.begun:
                self._fetch(passage.before)
        if packed.tensor is None:
            self._bring([packed])
            self._settle()
        tensor = packed.tensor
        assert tensor is not None, "it was brought"
        if packed.host is not None:
            packed.tensor = None  # whoever asked for it decides how long it is there
        return tensor

    def _is_worth_it(self, tensor: torch.Tensor, shared: set[int]) -> bool:
        """Large enough, of this block alone, and all of its memory: a part of something gives nothing back."""
        if (
            type(tensor) is not torch.Tensor
            or tensor.device.type != self._device.type
            or not tensor.is_floating_point()
        ):
            return False
        storage = tensor.untyped_storage()
        whole = tensor.nbytes == storage.nbytes() >= self._least
        return whole and storage.data_ptr() not in shared

    def _send(self, packed: Packed) -> None:
        assert packed.tensor is not None, "it was packed just now"
        memory, packed.tensor = _memory(packed.tensor), None
        packed.home = self._free[memory.numel(), memory.dtype]
        pinned = self._device.type == "cuda"
        packed.host = packed.home.pop() if packed.home else torch.empty_like(memory, device="cpu", pin_memory=pinned)
        with self._lane.after_current():
            packed.host.copy_(memory, non_blocking=True)
        self._moving.append((memory, self._lane.mark(), packed.passage))

    def _fetch(self, passage: _Passage) -> None:
        alive = (each() for each in passage.packed)
        self._bring([each for each in alive if each is not None and each.tensor is None])

    def _bring(self, away: list[Packed]) -> None:
        for packed in away:
            assert packed.host is not None, "what has no tensor is there"
            # Memory of the computing stream, which may have used it until now: the lane comes after.
            packed.tensor = torch.empty_strided(
                packed.shape, packed.strides, dtype=packed.host.dtype, device=self._device
            )
            memory = _memory(packed.tensor)
            with self._lane.after_current():
                memory.copy_(packed.host, non_blocking=True)
            self._moving.append((memory, self._lane.mark(), packed.passage))

    def _settle(self, until: _Passage | None = None) -> None:
        """The current stream goes on after the moves before those of ``until``, whose device memory it may use then."""
        while self._moving and self._moving[0][2] is not until:
            memory, moved, _ = self._moving.popleft()
            wait(moved)
            del memory


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory of ``tensor``, in one dim: a copy of it is a single transfer, whatever the strides."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _shared(block: nn.Module, args: Any, kwargs: Any) -> set[int]:
    """Where memory begins that others need, too: parameters, buffers, and arguments without a history (rotations)."""
    tensors: Iterable[Any] = (*block.parameters(), *block.buffers(), *tree_leaves((args, kwargs)))
    plain = (each for each in tensors if isinstance(each, torch.Tensor) and (each.is_leaf or not each.requires_grad))
    return {local_tensor(each).untyped_storage().data_ptr() for each in plain}
