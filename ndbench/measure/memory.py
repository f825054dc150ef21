"""Peak memory of one rank: the CUDA allocator's counters, the device's, the process's, and a tracked peak for CPU.

The tracked peak is a dispatch mode that counts the bytes of every live tensor storage once. It is exact and the same
on every machine, which the resident set of a process is not; it costs time, so it is used for one instrumented step.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ndbench.measure import _torch_private as private

STEADY_PEAK_FROM = 2
"""The peak of memory is taken from this step on: before it the optimizer's state does not exist yet."""


class MemoryMeter:
    """Peaks of one rank since the last ``reset()``, in bytes; None where the device has no such counter."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._process = psutil.Process()

    def reset(self) -> None:
        """Start a new peak, after warm-up: the peak of a step, not of building the model.

        Waits for nothing, so it may stand between measured steps: the allocator counts on the host, in the order in
        which the program asks, whatever the device has come to.
        """
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def reading(self) -> dict[str, int | None]:
        """``allocated``, ``reserved``: the caching allocator's peaks (the first is the one to trust: it counts live
        tensors, and here what ranks share of their memory; the second also what the allocator keeps). ``device_used``:
        what the whole device has in use now, NCCL, the CUDA context and other processes included. ``rss``: this
        process's resident set now.
        """
        reading: dict[str, int | None] = {
            "allocated": None,
            "reserved": None,
            "device_used": None,
            "rss": int(self._process.memory_info().rss),
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            from ndbench.parallel.peer_memory import uncounted_bytes

            reading["allocated"] = int(torch.cuda.max_memory_allocated(self._device)) + uncounted_bytes()
            reading["reserved"] = int(torch.cuda.max_memory_reserved(self._device))
            reading["device_used"] = int(total - free)
        return reading


class TrackedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Peak bytes of live tensor storages, each counted once, while the context is active.

    ``roots`` say which tensors exist before: tensors, modules (parameters, gradients, buffers), optimizers (state),
    containers, or any object (an engine) whose attributes hold such; other tensors count once an operator touches
    them. Storages that Python resizes (FSDP2 frees and refills its gathered parameters so) are followed. Memory
    inside an operator's kernel is not seen.

    Python's cyclic garbage collector is off inside, and collectives over gloo are waited for, so that the same step
    gives the same bytes.
    """

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._roots = list(roots)
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._lock = threading.RLock()  # communication threads drop tensors too
        self._current = 0
        self._peak = 0

    @property
    def current(self) -> int:
        """Bytes of the tracked storages that are alive now."""
        return self._current

    @property
    def peak(self) -> int:
        """Most bytes alive at once since the context was entered."""
        return self._peak

    def __enter__(self) -> TrackedMemory:
        gc.collect()
        self._gc_was_on = gc.isenabled()
        gc.disable()
        for tensor in _tensors(self._roots):
            self._see(tensor)
        self._roots = []
        self._peak = self._current
        self._undo_patch = private.patch_storage_resize(self._resized)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._undo_patch()
        if self._gc_was_on:
            gc.enable()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(private.is_dtensor(kind) for kind in types):
            return NotImplemented  # DTensor then runs on its local tensors, which come here one by one
        run = _run_to_the_end if _is_collective(func) else _run
        result = run(func, args, kwargs or {})
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            for inner in _inner_tensors(tensor):
                self._see(inner)
            return
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            known = self._live.get(key)
            if known is not None and known[0]() is not None:
                if known[1] != storage.nbytes():
                    self._resized(storage)
                return
            if known is not None:
                self._current -= known[1]
            size = storage.nbytes()
            self._live[key] = (weakref.ref(storage, partial(self._freed, key)), size)
            self._add(size)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            known = self._live.get(storage._cdata)
            if known is None or known[0]() is None:
                return
            size = storage.nbytes()
            self._live[storage._cdata] = (known[0], size)
            self._add(size - known[1])

    def _freed(self, key: int, gone: Any) -> None:
        with self._lock:
            known = self._live.get(key)
            if known is not None and known[0] is gone:
                del self._live[key]
                self._current -= known[1]

    def _add(self, size: int) -> None:
        self._current += size
        self._peak = max(self._peak, self._current)


COMMUNICATION = ("c10d", "_c10d_functional")
MESSAGES = ("send", "recv", "p2p", "wait")
"""Point-to-point operators (which may wait for each other) hold their tensors in the caller's hands anyway."""
LET_GO_SECONDS = 1.0


def _is_collective(func: Any) -> bool:
    return func.namespace in COMMUNICATION and not any(word in func._schema.name for word in MESSAGES)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _run_to_the_end(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective until gloo's threads hold its tensors no more.

    They let go some time after the work is done, so that a buffer would count as live or not by chance.
    """
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(tensor.device.type != "cpu" for tensor in given):
        return func(*args, **kwargs)
    wanted = [(tensor, private.references(tensor)) for tensor in given]
    result = private.completed(func(*args, **kwargs))
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and not any(leaf is tensor for tensor in given):
            wanted.append((leaf, private.FRESH))
            if func.namespace == "_c10d_functional":
                private.wait_for_functional(leaf)
    deadline = time.monotonic() + LET_GO_SECONDS
    while any(private.references(tensor) > before for tensor, before in wanted) and time.monotonic() < deadline:
        time.sleep(1e-4)
    return result


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a wrapper (DTensor, asynchronous collective result) holds."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    names, _ = flatten()
    return [getattr(tensor, name) for name in names]


def _tensors(roots: Iterable[Any]) -> list[torch.Tensor]:
    """Every tensor that ``roots`` hold, gradients included; objects of torch and of Python itself are not entered."""
    found: list[torch.Tensor] = []
    todo, seen = list(roots), set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
            if item.is_leaf and item.grad is not None:
                todo.append(item.grad)
        elif isinstance(item, torch.nn.Module):
            todo += [*item.parameters(), *item.buffers()]
        elif isinstance(item, torch.optim.Optimizer):
            todo += [*item.state.values(), item.param_groups]
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple | set):
            todo += item
        elif hasattr(item, "__dict__") and not _foreign(type(item)):
            todo += vars(item).values()
    return found


def _foreign(kind: type) -> bool:
    return kind is type or kind.__module__.partition(".")[0] in ("torch", "builtins", "types", "functools")


def all_live_tensors() -> list[torch.Tensor]:
    """Every tensor that Python's garbage collector knows: roots for an engine whose parts we cannot see."""
    gc.collect()
    return [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
