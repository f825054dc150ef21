"""What a block's forward hands to its own recomputation, which then need not compute it again.

For code that selective checkpointing cannot serve: the ring's result is made of several kernels' outputs, each of which
PyTorch would keep; and what is kept may wait elsewhere. ``contexts`` is a ``context_fn`` of ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

import torch

Results = tuple[Any, ...]
"""Tensors, and what else an operator gives beside them."""
Kept = tuple[Callable[[], Any], ...]
"""Each gives back one of the results."""


def _same(result: Any) -> Any:
    return result


class _Side:
    """A block's forward, or with ``again`` its recomputation, for as long as it is entered."""

    def __init__(self, results: deque[Kept], again: bool, keep: Callable[[Any], Callable[[], Any]]) -> None:
        self.results, self.again, self.keep = results, again, keep
        self._before: Token[_Side | None] | None = None

    # Not for torch.compile, which would otherwise make a guarded graph of each block's own.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __enter__(self) -> None:
        self._before = _active.set(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        _active.reset(self._before)


_active: ContextVar[_Side | None] = ContextVar("ndbench_kept", default=None)
"""Of this thread: on GPUs backward recomputes in a thread of its own."""


def contexts(pack: Callable[[torch.Tensor], Any] = _same, unpack: Callable[[Any], Any] = _same) -> tuple[_Side, _Side]:
    """Contexts of one block's forward and of its recomputation, which gets what the first kept, in order and once.

    In between there is what ``pack`` makes of each tensor, and ``unpack`` makes it a tensor again.
    """
    results: deque[Kept] = deque()

    def keep(result: Any) -> Callable[[], Any]:
        if not isinstance(result, torch.Tensor):
            return functools.partial(_same, result)
        # The tensor itself becomes an output with a history, which would keep the activations alive.
        return functools.partial(unpack, pack(result.detach()))

    return _Side(results, False, keep), _Side(results, True, keep)


def keep(*results: Any) -> None:
    """Hand ``results`` to the recomputation; nothing happens outside of a forward that has one."""
    side = _active.get()
    if side is not None and not side.again:
        side.results.append(tuple(side.keep(each) for each in results))


def recalled() -> Results | None:
    """What forward kept here, when this is its recomputation; None when it is not."""
    side = _active.get()
    if side is None or not side.again:
        return None
    if not side.results:
        raise RuntimeError("backward goes a second time through a block that keeps its attention for one")
    return tuple(each() for each in side.results.popleft())
