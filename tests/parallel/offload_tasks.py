"""What ranks run for the tests of offloaded activations: steps of the engine, and what left for the host in them."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from ndbench.engines.bundled import BundledEngine
from ndbench.parallel import offload
from ndbench.parallel.mesh import build_mesh
from tests.parity import ranks
from tests.parity.cases import Case, batch


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """What each :class:`offload.Offload` made inside sends to the host and brings back, and in how much memory."""
    seen: dict[str, Any] = {"sent": [], "made": [], "ahead": 0, "behind": 0}
    send, bring, init = offload.Offload._send, offload.Offload._bring, offload.Offload.__init__

    def sending(self: Any, packed: Any) -> None:
        seen["sent"].append((tuple(packed.shape), packed.tensor.dtype, weakref.ref(packed.tensor.untyped_storage())))
        send(self, packed)

    def bringing(self: Any, away: list[Any]) -> None:
        begun = sum(each.passage.begun for each in away)
        seen["behind"] += begun
        seen["ahead"] += len(away) - begun
        bring(self, away)

    def made(self: Any, *args: Any) -> None:
        init(self, *args)
        seen["made"].append(self)

    with (
        patch.object(offload.Offload, "_send", sending),
        patch.object(offload.Offload, "_bring", bringing),
        patch.object(offload.Offload, "__init__", made),
    ):
        yield seen


def both(case: Case, backend: str | None = None, plant: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Any:
    """(whether the case has the same numbers, to the bit, with what is kept on the host, what was sent and brought)."""
    torch._dynamo.reset()
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        off = replace(case, training=replace(case.training, activation_offload=True))
        plain = ranks.train(case)
        with watched() as seen, plant():
            moved = ranks.train(off)
    torch._dynamo.reset()
    same = {
        key: plain[key] == moved[key] if key in ("loss", "norm", "tokens") else _same(plain[key], moved[key])
        for key in ("loss", "norm", "tokens", "gradients", "weights")
    }
    shapes = Counter(f"{list(shape)} {dtype}" for shape, dtype, _ in seen["sent"])
    return same, dict(shapes), {"ahead": seen["ahead"], "behind": seen["behind"]}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name][2], other[name][2]) for name in one)
