"""The ring in one process: a thread a rank, and rotations that hand tensors over in memory.

The schedule, the tiles, the merge and the blocks' kernels are the real ones; only the wire is not. Autograd has one
thread a device, where ranks that wait for each other would never end, so forward and backward are called by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any
from unittest import mock

import torch

from ndbench.parallel import ring
from ndbench.parallel.context import shard_sequence, unshard_sequence
from tests.context.cases import NAMES, Case, document_ids, inputs, reference

TIMEOUT = 90.0
"""Seconds that a rank waits for a message, a GPU's compilations included."""


Mail = dict[tuple[int, int], Queue[torch.Tensor | BaseException]]
"""(receiving rank, number of the message) -> what arrives; an exception when a rank has failed."""


class Place:
    """Stands for the process group of a rank that is a thread."""

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        self._rank, self._size, self.mail, self.sent = rank, size, mail, 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Rotation:
    """``ring._Rotation`` without a wire: message n of a rank goes to message n of the next, or of the one before."""

    def __init__(self, tensor: torch.Tensor, group: Place, back: bool = False) -> None:
        self.sent, self.group, self.number = tensor.contiguous(), group, group.sent
        group.sent += 1
        group.mail[(group.rank() + (-1 if back else 1)) % group.size(), self.number].put(self.sent.clone())

    def wait(self) -> torch.Tensor:
        arrived = self.group.mail[self.group.rank(), self.number].get(timeout=TIMEOUT)
        if isinstance(arrived, BaseException):
            raise RuntimeError("another rank has failed") from arrived
        return arrived


class Context:
    """What ``torch.autograd.Function`` keeps between forward and backward."""

    plan: ring.RingPlan
    saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def ring_alone(
    cp_size: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    documents: torch.Tensor | None = None,
    lay_out: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **plan: Any,
) -> list[torch.Tensor]:
    """Output and gradients of q, k, v, [b, heads, sequence, d] of the whole sequence, by ``cp_size`` threads.

    ``lay_out`` makes of a rank's shard the same numbers in another order in memory.
    """
    # n-1 rotations in forward, n-2 in backward, n-1 of the gradients. Made here: a dict that grows is no place to meet.
    mail: Mail = {(rank, number): Queue() for rank in range(cp_size) for number in range(3 * cp_size - 4)}
    shares: list[list[torch.Tensor]] = [[] for _ in range(cp_size)]
    failures: list[BaseException] = []

    def rank_of(rank: int) -> None:
        try:
            mine = [lay_out(shard_sequence(x, cp_size, rank, "ring", dim=2)) for x in (q, k, v, dout)]
            context = Context()
            place: Any = Place(rank, cp_size, mail)
            with torch.no_grad():
                out = ring._RingAttention.forward(context, *mine[:3], documents, ring.RingPlan(place, **plan))
                shares[rank] = [out, *ring._RingAttention.backward(context, mine[3])[:3]]
        except BaseException as failure:
            failures.append(failure)
            for box in mail.values():
                box.put(failure)

    with mock.patch.object(ring, "_Rotation", Rotation):
        threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(cp_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT)
    if failures:
        raise failures[0]
    return [unshard_sequence(list(parts), "ring", dim=2) for parts in zip(*shares, strict=True)]


SCALE = 0.3


def errors(case: Case, cp_size: int, lay_out: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, **plan: Any) -> Any:
    """||ring - reference|| / ||reference|| of the output and of each gradient; ``lay_out``: see :func:`ring_alone`."""
    whole, documents = inputs(case), document_ids(case.documents)
    documents = None if documents is None else documents.to(case.device)
    expected = reference(case, *whole, documents)
    actual = ring_alone(cp_size, *whole, documents, lay_out, scale=SCALE, window=case.window, **plan)
    assert all(x.dtype == case.dtype for x in actual)
    return {
        name: ((a.double() - e).norm() / e.norm()).item() for name, a, e in zip(NAMES, actual, expected, strict=True)
    }


def by_heads(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """As a projection leaves it: [b, s, h, d] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
