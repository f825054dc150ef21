"""Memory that the ranks of a host map into each other, and streams beside the one that computes.

``torch.distributed._symmetric_memory`` on GPUs. It knows nothing of what is kept there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ndbench.parallel._torch_private import symmetric_memory

ALIGNMENT = 128
"""Bytes: where a piece of the memory begins. Compiled kernels read wide words."""
GATHER, SCATTER = 0, 1
"""Channels of the barriers: a gather and a reduction may wait at the same time."""

_made: weakref.WeakSet[PeerMemory] = weakref.WeakSet()


class PeerMemory:
    """``size`` bytes on every rank of ``group``, each mapped into all of them. Made by all ranks together."""

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.world = group.rank(), group.size()
        before = torch.cuda.memory_allocated(device)
        self._local: torch.Tensor = symmetric_memory().empty(size, dtype=torch.uint8, device=device)
        self.uncounted = max(size - (torch.cuda.memory_allocated(device) - before), 0)
        self._handle: Any = symmetric_memory().rendezvous(self._local, group)
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        _made.add(self)
        # What these load and map for the first time is there before any rank waits for another.
        for channel in (GATHER, SCATTER):
            self.barrier(channel)
        for peer in range(self.world):
            self._local[:ALIGNMENT].copy_(self.of(peer, 0, ALIGNMENT, torch.uint8))
        torch.cuda.synchronize(device)

    def of(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements of ``rank``'s memory from byte ``start`` on, a storage of its own."""
        key = (rank, start, numel, dtype)
        if key not in self._views:
            offset = start // dtype.itemsize
            self._views[key] = self._handle.get_buffer(rank, (numel,), dtype, storage_offset=offset)
        return self._views[key]

    def barrier(self, channel: int) -> None:
        """On the current stream: later work sees what every rank's earlier work wrote."""
        self._handle.barrier(channel=channel)


class Offsets:
    """Pieces of memory, one after another."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, numel: int, dtype: torch.dtype) -> int:
        """The byte at which ``numel`` elements begin."""
        start = self.size
        self.size += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return start


class Switch:
    """Whether copies are in use; whoever asks needs to know no more."""

    on = False


class Lane:
    """A stream beside the current one; on a CPU the same as it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Its short kernels go first: others wait for them.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """What is started inside comes after all that was started on the current stream before."""
        with self.after(mark(self._device)):
            yield

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """What is started inside comes after ``event``, and after what was started here before."""
        if self._stream is None:
            yield
            return
        if event is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """This point of the lane."""
        with self.after(None):
            return mark(self._device)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """This point of the current stream."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def wait(event: torch.cuda.Event | None) -> None:
    """The current stream goes on after ``event``."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def uncounted_bytes() -> int:
    """Memory of this rank, mapped into its peers, that the caching allocator does not count."""
    return sum(memory.uncounted for memory in _made)


def why_not(group: dist.ProcessGroup) -> str | None:
    """Why the ranks of ``group`` cannot read each other's memory; null when they can."""
    ranks, a_host = dist.get_process_group_ranks(group), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    hosts = {rank // a_host for rank in ranks} if a_host else set()
    if len(hosts) != 1:
        return f"ranks {ranks} are not on one host" if hosts else "LOCAL_WORLD_SIZE, the ranks of this host, is not set"
    here = torch.cuda.current_device()
    for other in (rank % a_host for rank in ranks):
        if other >= torch.cuda.device_count():
            return f"rank {other} of the host has no GPU of its own that this rank sees"
        if other != here and not torch.cuda.can_device_access_peer(here, other):
            return f"GPU {here} cannot read the memory of GPU {other}"
    return None
