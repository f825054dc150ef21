"""The attention kernel: asked for or refused by name, else the fastest of the device; and it is the one that runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ndbench.config import Cell, Config
from ndbench.engines.bundled import BundledEngine
from ndbench.parallel import sdpa
from ndbench.parallel.attention import attention_kernel, whole_attention
from ndbench.parallel.sdpa import choose_kernel

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
HEADS = (torch.bfloat16, 8, 2, 64)


def device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], serving: set[str], hip: str | None = None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(sdpa, "_serves", lambda name, *_: name in serving)


@pytest.mark.parametrize(
    ("capability", "hip", "serving", "chosen"),
    [
        ((9, 0), None, {"cudnn", "flash"}, "cudnn"),
        ((10, 0), None, {"cudnn", "flash"}, "cudnn"),
        ((8, 0), None, {"cudnn", "flash"}, "flash"),
        ((9, 4), "6.4", {"cudnn", "flash"}, "flash"),
        ((9, 0), None, {"flash"}, "flash"),
        ((9, 0), None, set(), None),
    ],
)
def test_cudnn_is_taken_from_hopper_on_where_it_serves(
    capability: tuple[int, int], hip: str | None, serving: set[str], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(monkeypatch, capability, serving, hip)
    assert choose_kernel(CUDA, *HEADS) == chosen


def test_what_was_asked_for_is_taken_or_refused_with_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    device(monkeypatch, (9, 0), {"flash"})
    assert choose_kernel(CUDA, *HEADS, "flash") == "flash"
    with pytest.raises(
        ValueError, match=r"'cudnn' cannot serve 8 heads, 2 kv heads, head dim 64, torch.bfloat16 on cuda"
    ):
        choose_kernel(CUDA, *HEADS, "cudnn")


def test_a_cpu_leaves_it_to_pytorch() -> None:
    assert choose_kernel(CPU, *HEADS) is None


def test_an_unknown_kernel_is_refused_by_name_before_any_rank_starts() -> None:
    config = Config(world_size=1)
    assert BundledEngine(attention="cudnn").refuse(Cell("single", "test", config)) is None
    said = BundledEngine(attention="fastest").refuse(Cell("single", "test", config))
    assert said == "engine.options.attention 'fastest' is not known; known: flash4, cudnn, flash"
    with pytest.raises(ValueError, match="'fastest' is not known; known: flash4, cudnn, flash"):
        choose_kernel(CPU, *HEADS, "fastest")


def test_the_chosen_kernel_runs_where_only_causality_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(scale)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    monkeypatch.setitem(sdpa.KERNELS, "cudnn", (lambda call: True, kernel))
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    assert torch.equal(whole_attention(q, k, k, 0.5, kernel="cudnn"), whole_attention(q, k, k, 0.5))
    assert calls == [0.5]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    for masked in ({"window": 2}, {"documents": documents}, {"softcap": 5.0}):
        whole_attention(q, k, k, 0.5, kernel="cudnn", **masked)  # type: ignore[arg-type]
    assert calls == [0.5], "these have masks that it does not take"


def test_the_record_names_the_kernel() -> None:
    def named(cp: int, method: str, kernel: str | None = "cudnn", **masks: bool) -> str:
        return attention_kernel("cuda", torch.bfloat16, cp, method, kernel, **masks)

    assert named(1, "ring") == "cudnn"
    assert named(2, "ulysses") == "ulysses:cudnn"
    assert named(2, "ring") == "ring:cudnn"
    assert named(2, "ring", None) == "ring:flash"
    assert named(1, "ring", bounded=True) == named(1, "ring", documents=True) == "sdpa"
    assert named(2, "ring", bounded=True) == named(2, "ring", documents=True) == "ring:efficient"
    assert named(1, "ring", "flash4", bounded=True) == "flash4"
    assert named(2, "ulysses", "flash4", bounded=True) == "ulysses:flash4"
    assert named(1, "ring", "flash4", documents=True) == "sdpa"
    assert named(2, "ring", "flash4", bounded=True) == "ring:efficient"
