"""A recorder for a CPU that works as a CUDA graph does: what the host knew is frozen, memory is fixed.

In a capture work runs once, every operator is noted with its arguments, and what it changed is put back. A replay runs
the same operators on the same tensors, and puts what they give where it was the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ndbench.engines.protocol import StepResult


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host reads a number of the device during a capture")
        given = {(held := leaf.untyped_storage())._cdata: held for leaf in _tensors((args, kwargs))}
        if func._schema.is_mutable:
            for key, held in given.items():
                if key not in self._made and key not in self._before:
                    self._before[key] = held, held.clone()
        result = func(*args, **kwargs)
        fresh = [leaf for leaf in _tensors(result) if leaf.untyped_storage()._cdata not in given]
        self._made |= {leaf.untyped_storage()._cdata for leaf in fresh}
        if fresh or func._schema.is_mutable:  # a view stays right by itself
            self.calls.append((func, args, kwargs, fresh))
        return result

    def undo(self) -> None:
        for held, before in self._before.values():
            held.copy_(before)

    def again(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, fresh in self.calls:
                result = func(*args, **kwargs)
                for old, new in zip(fresh, _tensors(result), strict=bool(fresh)):
                    old.copy_(new)


class Tape:
    """``ndbench.training.graphs.Recorder``."""

    def __init__(self) -> None:
        self.warm_ups = self.captures = self.replays = self.released = 0
        self.problem: str | None = None
        self.uncounted: list[torch.Tensor] = []
        """Tensors whose version counters do not see a replay, as none does on a GPU."""

    def warm_up(self, work: Callable[[], StepResult], last: bool) -> tuple[StepResult, str | None]:
        self.warm_ups += 1
        return work(), self.problem if last else None

    def capture(self, work: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
        notes = _Notes()
        with notes:
            result = work()
        notes.undo()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.uncounted)):
                notes.again()

        return result, replay

    def release(self, wait: bool) -> None:
        self.released += 1


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
