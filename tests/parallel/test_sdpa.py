"""The preferred attention kernel: asked by name, refused by name, and only where a device offers a choice."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ndbench.config import Cell, Config
from ndbench.engines.bundled import BundledEngine
from ndbench.parallel import sdpa
from ndbench.parallel.sdpa import kernel_order, preferring

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "hip", "first", "order"),
    [
        ((9, 0), None, None, ("cudnn", "flash", "efficient")),
        ((10, 0), None, None, ("cudnn", "flash", "efficient")),
        ((8, 0), None, None, ("flash", "efficient", "cudnn")),
        ((9, 4), "6.4", None, ("flash", "efficient", "cudnn")),
        ((9, 0), None, "flash", ("flash", "cudnn", "efficient")),
        ((8, 0), None, "cudnn", ("cudnn", "flash", "efficient")),
    ],
)
def test_cudnn_comes_first_from_hopper_on_and_what_was_asked_for_before_all(
    capability: tuple[int, int],
    hip: str | None,
    first: str | None,
    order: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert kernel_order(torch.device("cuda"), first) == order


def test_a_cpu_has_no_choice() -> None:
    assert kernel_order(CPU) == kernel_order(CPU, "flash") == ()
    with preferring(()):
        pass


def test_the_order_holds_inside_and_the_one_before_comes_back() -> None:
    before = torch._C._get_sdp_priority_order()
    with preferring(("efficient", "flash", "cudnn")):
        inside = torch._C._get_sdp_priority_order()
        assert inside[:4] == [
            int(b.value) for b in (*(sdpa.KERNELS[n][0] for n in ("efficient", "flash", "cudnn")), sdpa.SDPBackend.MATH)
        ]
    assert torch._C._get_sdp_priority_order() == before


def test_an_unknown_kernel_is_refused_by_name_before_any_rank_starts() -> None:
    cell = Cell("single", "test", dataclasses.replace(Config(), world_size=1))
    assert BundledEngine(attention="cudnn").refuse(cell) is None
    said = BundledEngine(attention="fastest").refuse(cell)
    assert said == "engine.options.attention 'fastest' is not known; known: cudnn, flash, efficient"
    with pytest.raises(ValueError, match="'fastest' is not known; known: cudnn, flash, efficient"):
        kernel_order(CPU, "fastest")
