"""What ranks run for the tests of offloaded activations: a case with them and without, and what was moved."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from ndbench.parallel.offload import Offload
from tests.parity import ranks
from tests.parity.cases import Case


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """What offloads made inside send to the host and bring back, and how much of both is on the device at a time."""
    seen: dict[str, Any] = {"made": [], "sent": Counter(), "ahead": 0, "late": 0, "left": 0, "there": 0}
    gone: list[weakref.ref[Any]] = []
    back: list[weakref.ref[Any]] = []
    init, send, bring = Offload.__init__, Offload._send, Offload._bring

    def made(self: Any, *args: Any) -> None:
        init(self, *args)
        seen["made"].append(self)

    def sending(self: Any, packed: Any) -> None:
        seen["sent"][f"{list(packed.shape)}"] += 1
        gone.append(weakref.ref(packed.tensor.untyped_storage()))
        send(self, packed)

    def bringing(self: Any, away: list[Any]) -> None:
        late = sum(each.passage.begun for each in away)
        seen["late"] += late
        seen["ahead"] += len(away) - late
        # Forward is over: what was sent must be gone. Of what came back, one block's may still be in use.
        seen["left"] = max(seen["left"], _alive(gone))
        seen["there"] = max(seen["there"], _alive(back))
        bring(self, away)
        back.extend(weakref.ref(each.tensor.untyped_storage()) for each in away)

    with (
        patch.object(Offload, "__init__", made),
        patch.object(Offload, "_send", sending),
        patch.object(Offload, "_bring", bringing),
    ):
        yield seen


def _alive(storages: list[weakref.ref[Any]]) -> int:
    storages[:] = [each for each in storages if each() is not None]
    return len(storages)


def both(case: Case, backend: str | None = None, device: str = "cpu") -> dict[str, Any]:
    """Which numbers of ``case`` are the same to the bit with what is kept on the host, and what was moved for it."""
    torch._dynamo.reset()
    there = replace(case, training=replace(case.training, activation_offload=True))
    compiler = functools.partial(torch.compile, backend=backend) if backend else torch.compile
    with patch.object(torch, "compile", compiler):
        plain, again = (ranks.train(case, device=device) for _ in range(2))
        with watched() as seen:
            moved = ranks.train(there, device=device)
    torch._dynamo.reset()
    (offload,) = seen.pop("made")
    return seen | {
        "repeats": _differing(plain, again) == [],
        "differing": _differing(plain, moved),
        "moving": len(offload._moving),
        "hosts": sum(len(each) for each in offload._free.values()),
    }


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = [each for each in ("loss", "norm", "tokens") if one[each] != other[each]]
    for each in ("gradients", "weights"):
        pairs = ((name, one[each][name][2], other[each][name][2]) for name in one[each])
        found += [f"{each} {name}" for name, mine, yours in pairs if not torch.equal(mine, yours)]
    return found
