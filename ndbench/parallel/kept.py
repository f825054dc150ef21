"""What a block's forward hands to its own recomputation, which then need not compute it again.

For code that selective checkpointing cannot serve: the ring's result is made of several kernels' outputs, each of which
PyTorch would keep. ``contexts`` is a ``context_fn`` of ``torch.utils.checkpoint``.
"""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar, Token

import torch

Results = tuple[torch.Tensor, ...]


class _Side:
    """A block's forward, or with ``again`` its recomputation, for as long as it is entered."""

    def __init__(self, results: deque[Results], again: bool) -> None:
        self.results, self.again = results, again
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


def contexts() -> tuple[_Side, _Side]:
    """Contexts of one block's forward and of its recomputation, which gets what the first kept, in order and once."""
    results: deque[Results] = deque()
    return _Side(results, again=False), _Side(results, again=True)


def keep(*results: torch.Tensor) -> None:
    """Hand ``results`` to the recomputation; nothing happens outside of a forward that has one."""
    side = _active.get()
    if side is not None and not side.again:
        # The tensors themselves become outputs with a history, which would keep the activations alive.
        side.results.append(tuple(each.detach() for each in results))


def recalled() -> Results | None:
    """What forward kept here, when this is its recomputation; None when it is not."""
    side = _active.get()
    if side is None or not side.again:
        return None
    if not side.results:
        raise RuntimeError("backward goes a second time through a block that keeps its attention for one")
    return side.results.popleft()
