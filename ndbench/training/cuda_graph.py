"""Capturing work in CUDA graphs: the stream, the memory, and what becomes of a capture that fails.

Read against torch 2.11 and 2.13. It knows nothing of what the work is.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ndbench.engines.protocol import StepResult
from ndbench.parallel._torch_private import abandon_capture


class CudaRecorder:
    """CUDA graphs on one device. All of them, and the steps before, run on one stream and share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, work: Callable[[], StepResult], last: bool) -> tuple[StepResult, str | None]:
        # On the stream of the capture: autograd remembers the stream on which a parameter was first used.
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream), _waits_noted(last) as waits:
            result = work()
        current.wait_stream(self._stream)  # type: ignore[no-untyped-call]
        return result, f"the host waits for the device in {waits[0]}" if waits else None

    def capture(self, work: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()  # the steps before had as much memory as the graph needs
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _no_collection():
            # Other threads may do as they like: NCCL's looks after what was queued before.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # type: ignore[no-untyped-call]
            ended = False
            try:
                result = work()
                ended = True
                graph.capture_end()  # type: ignore[no-untyped-call]
            except BaseException:
                _BROKEN.append(graph)
                if not ended:
                    with suppress(RuntimeError):  # it says that the capture failed
                        graph.capture_end()  # type: ignore[no-untyped-call]
                abandon_capture(self.device, self._pool)
                self._pool = None
                raise
        self._graphs.append(graph)
        return result, graph.replay

    def release(self, wait: bool) -> None:
        if wait:
            torch.cuda.synchronize(self.device)
        for graph in self._graphs:
            graph.reset()  # type: ignore[no-untyped-call]
        self._graphs.clear()
        self._pool = None
        if wait:
            torch.cuda.empty_cache()


_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: the allocator may still ask them whose memory it is, so they are never freed."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """What Python's collector frees may not be freed during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


WAIT, PROTOTYPE = "called a synchronizing CUDA operation", "Synchronization debug mode is a prototype"


@contextmanager
def _waits_noted(asked: bool) -> Iterator[list[str]]:
    """Where (file:line) the code inside made the host wait for the device; not noted unless ``asked``."""
    waits: list[str] = []
    if not asked:
        yield waits
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in told:
        if WAIT in str(each.message):
            waits.append(f"{each.filename}:{each.lineno}")
        elif PROTOTYPE not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
