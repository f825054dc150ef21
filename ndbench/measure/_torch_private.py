"""Every use of torch that is not public API, in one place; a test names the torch versions it was read in.

Nothing outside ``measure/`` may import this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName


def busy_kernel(cycles: int) -> None:
    """Queue a kernel that keeps one multiprocessor of the current CUDA stream busy for ``cycles`` clock cycles."""
    torch.cuda._sleep(int(cycles))  # type: ignore[no-untyped-call]


def cuda_event() -> torch.cuda.Event:
    """A timing event, already recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def group_name(value: Any) -> str:
    """Name of a process group as it stands in an operator's arguments: a name, a ProcessGroup or its script object."""
    if isinstance(value, str):
        return value
    if isinstance(value, torch.ScriptObject):
        value = dist.ProcessGroup.unbox(value)
    return str(value.group_name)


def group_size(name: str) -> int:
    """Number of ranks of the process group called ``name``."""
    return int(torch._C._distributed_c10d._resolve_process_group(GroupName(name)).size())


def group_rank(name: str) -> int:
    """This rank's index in the process group called ``name``."""
    return int(torch._C._distributed_c10d._resolve_process_group(GroupName(name)).rank())


def is_dtensor(kind: type) -> bool:
    """Is this type (of a dispatch mode's ``types``) DTensor? By name, so that DTensor is not imported for it."""
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed")


def on_gradient(tensor: torch.Tensor, callback: Callable[[], None]) -> None:
    """Call ``callback`` when the gradient of ``tensor`` is known."""
    tensor.register_hook(lambda _: callback())  # type: ignore[no-untyped-call]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass that is running has computed every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def references(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold the tensor and its storage, in C++ and Python together."""
    users = int(tensor._use_count())  # type: ignore[attr-defined]
    return users, int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


FRESH = (1, 2)
"""References of a tensor that only its maker holds, and of its storage: the tensor, and Python's view of it."""


def completed(result: Any) -> Any:
    """Wait for the work that a ``c10d`` operator returned, and put work that is done in its place.

    The real work's references to tensors are dropped with it. The new one still has the operator's tensors as its
    result, which DistributedDataParallel reads.
    """
    from torch._C import _distributed_c10d as c10d

    if isinstance(result, torch.ScriptObject):
        c10d.Work.unbox(result).wait()
        return c10d.FakeWork().boxed()
    if not isinstance(result, tuple):
        return result
    tensors = next((item for item in result if isinstance(item, list)), None)
    items = []
    for item in result:
        if isinstance(item, torch.ScriptObject) and tensors is not None:
            c10d.Work.unbox(item).wait()
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(tensors)
            done = c10d._create_work_from_future(future)  # type: ignore[attr-defined]
            items.append(done.boxed())
        else:
            items.append(completed(item))
    return tuple(items)


def wait_for_functional(tensor: torch.Tensor) -> None:
    """Wait for the functional collective that makes ``tensor``; waiting again later does nothing."""
    torch.ops._c10d_functional.wait_tensor(tensor)


def patch_storage_resize(after: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
    """Call ``after(storage)`` whenever a storage is resized in Python, which no dispatch mode sees.

    FSDP2 frees a gathered parameter by resizing its storage to zero. Returns the function that undoes the patch.
    """
    original = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        result = original(self, size)
        after(self)
        return result

    inherited = "resize_" not in vars(torch.UntypedStorage)
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]

    def undo() -> None:
        if inherited:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    return undo
