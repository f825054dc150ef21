"""FlashAttention-4's operators: gradients, tracing, checkpoints, the choice. The CPU's kernel stands in for its own.

On a GPU ``tests/context/test_alone.py`` runs the kernels themselves against float64.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ndbench.config import Cell, Config
from ndbench.engines.bundled import BundledEngine
from ndbench.measure.attention_flops import attention_formulas
from ndbench.measure.fingerprint import software
from ndbench.parallel import _flash4_private, kernels, sdpa
from ndbench.parallel._flash4_private import TRIED_FLASH_ATTN_4, flash4
from ndbench.parallel.attention import whole_attention
from ndbench.parallel.checkpointing import apply_checkpointing
from ndbench.parallel.config import ATTENTION_KERNELS
from tests.context.alone import by_heads, by_rows, errors
from tests.context.cases import Case

CUDA = torch.device("cuda")
HEADS = (torch.bfloat16, 8, 2, 64)


class OnCpu:
    """The package's two functions as it has them, [b, s, h, d] in and out, by the formulas.

    Backward takes the statistics that it is given, as FlashAttention's does: those of the whole row under the ring.
    """

    def __init__(self) -> None:
        self.forwards, self.deterministic = 0, False

    def forward(self, q: Any, k: Any, v: Any, *, return_lse: bool, **mask: Any) -> Any:
        assert return_lse
        self.forwards += 1
        scores, _ = self._scores(q, k, **mask)
        lse = scores.logsumexp(-1)
        out = torch.exp(scores - lse[..., None]) @ self._heads(v, q)
        return out.transpose(1, 2).contiguous(), lse.float(), None, None, None

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, deterministic: bool, **mask: Any
    ) -> Any:
        assert lse.is_contiguous()
        self.deterministic = deterministic
        scores, slope = self._scores(q, k, **mask)
        weights = torch.exp(scores - lse[..., None])
        dout_h, out_h = dout.transpose(1, 2), out.transpose(1, 2)
        dscores = dout_h @ self._heads(v, q).transpose(2, 3) - (dout_h * out_h).sum(-1, keepdim=True)
        dscores = weights * dscores * slope * mask["softmax_scale"]
        dq = dscores @ self._heads(k, q)
        grouped = (
            x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (dscores.mT @ q.transpose(1, 2), weights.mT @ dout_h)
        )
        return tuple(x.transpose(1, 2).contiguous() for x in (dq, *grouped))

    @staticmethod
    def _heads(x: Any, q: Any) -> Any:
        return x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], dim=1)

    def _scores(
        self, q: Any, k: Any, *, softmax_scale: float, causal: bool, window_size_left: int | None,
        window_size_right: int | None, softcap: float,
    ) -> Any:  # fmt: skip
        """Scores [b, h, queries, keys], masked, and what their cap makes of a small change of them."""
        scores = q.transpose(1, 2) @ self._heads(k, q).transpose(2, 3) * softmax_scale
        bent = torch.tanh(scores / softcap) if softcap else None
        behind = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
        if window_size_left is not None:
            assert window_size_right == 0
            seen = seen & (behind <= window_size_left)
        scores = scores if bent is None else bent * softcap
        return scores.masked_fill(~seen, float("-inf")), 1.0 if bent is None else 1 - bent.square()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    functions = OnCpu()
    monkeypatch.setattr(_flash4_private, "_functions", lambda: functions)
    return functions


def heads(count: int, tokens: int = 24, d: int = 16) -> torch.Tensor:
    return torch.randn(2, tokens, count, d).transpose(1, 2).requires_grad_()


def gradients(attention: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.randn(out.shape))]


BOUNDS: list[dict[str, Any]] = [{}, {"window": 5}, {"softcap": 0.7}, {"window": 1, "softcap": 2.0}]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return whole_attention(q, k, v, 0.3, kernel="flash4")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda bounds: "_".join(bounds) or "causal")
def test_output_and_gradients_are_those_of_pytorchs_attention(compiled: bool, bounds: dict[str, Any]) -> None:
    def mine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return whole_attention(q, k, v, 0.3, kernel="flash4", **bounds)

    q, k, v = heads(4), heads(2), heads(2)
    torch._dynamo.reset()
    call = torch.compile(mine, fullgraph=True, dynamic=False) if compiled else mine
    found = gradients(call, q, k, v)
    due = gradients(lambda *x: whole_attention(*x, 0.3, **bounds), q, k, v)
    for each, want in zip(found, due, strict=True):
        torch.testing.assert_close(each, want)


@pytest.mark.usefixtures("on_cpu")
def test_documents_are_left_to_pytorch(on_cpu: OnCpu) -> None:
    documents = torch.tensor([[0] * 10 + [1] * 14] * 2)
    whole_attention(heads(4), heads(2), heads(2), 0.3, documents=documents, kernel="flash4")
    assert not on_cpu.forwards


needs_its_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() and _flash4_private.installed()), reason="needs a GPU and flash-attn-4"
)


@needs_its_kernels
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bounds", [{}, {"window": 300}, {"softcap": 5.0}, {"window": 300, "softcap": 5.0}], ids=str)
def test_its_kernels_on_the_gpu_are_attention_in_float32(bounds: dict[str, Any], head_dim: int) -> None:
    torch.manual_seed(0)
    inputs = [heads(count, 1024, head_dim).to("cuda", torch.bfloat16).detach().requires_grad_() for count in (8, 2, 2)]
    exact = [x.detach().float().requires_grad_() for x in inputs]
    torch.manual_seed(1)
    dout = torch.randn(2, 8, 1024, head_dim, device="cuda")
    found, due = [], []
    for results, given, kernel in ((found, inputs, "flash4"), (due, exact, None)):
        out = whole_attention(*given, head_dim**-0.5, kernel=kernel, **bounds)
        results += [out, *torch.autograd.grad(out, given, dout.to(out.dtype))]
    for each, want in zip(found, due, strict=True):
        assert (each.float() - want).norm() / want.norm() < 1e-2


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_traced_is_what_runs(causal: bool) -> None:
    q, k, v = (heads(count).detach().transpose(1, 2).requires_grad_() for count in (4, 2, 2))
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    torch.library.opcheck(flash4, (q, k, v, 0.3, causal), test_utils=tests)


def test_deterministic_training_asks_for_its_deterministic_backward(on_cpu: OnCpu) -> None:
    gradients(attend, heads(2), heads(2), heads(2))
    assert not on_cpu.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        gradients(attend, heads(2), heads(2), heads(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert on_cpu.deterministic


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_ring_on_its_blocks_is_one_process(cp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "block_kernel", lambda *_: "flash4")
    for lay_out in (by_rows, by_heads):
        worst = errors(Case("ring"), cp_size, lay_out, kernel="flash4")
        assert max(worst.values()) < 2e-6, worst


def test_a_backward_without_the_whole_rows_statistics_would_be_seen(
    on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "block_kernel", lambda *_: "flash4")
    backward = on_cpu.backward

    def own_statistics(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **options: Any) -> Any:
        mask = {name: value for name, value in options.items() if name != "deterministic"}
        out, lse = on_cpu.forward(q, k, v, return_lse=True, **mask)[:2]
        return backward(q, k, v, out, dout, lse, **options)

    monkeypatch.setattr(on_cpu, "backward", own_statistics)
    assert max(errors(Case("ring"), 2, kernel="flash4").values()) > 1e-3


def test_two_threads_do_not_compile_at_once(on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [], []
    forward = on_cpu.forward

    def slowly(*args: Any, **options: Any) -> Any:
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return forward(*args, **options)

    monkeypatch.setattr(on_cpu, "forward", slowly)
    q, k, v = (heads(2).detach() for _ in range(3))
    threads = [threading.Thread(target=attend, args=(q, k, v)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert most == [1, 1, 1, 1]


@pytest.mark.parametrize("mode", ["full", "selective", "attention"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_checkpoints_keep_it_where_they_keep_attention(mode: str, compiled: bool, on_cpu: OnCpu) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(attend(x.sin(), x.cos(), x))

    torch.manual_seed(0)
    x = heads(2)
    plain, block = Block(), Block()
    apply_checkpointing([block], mode)
    due = gradients(plain, x)
    on_cpu.forwards = 0
    torch._dynamo.reset()
    found = gradients(torch.compile(block) if compiled else block, x)
    for mine, want in zip(found, due, strict=True):
        torch.testing.assert_close(mine, want)
    assert on_cpu.forwards == (2 if mode == "full" else 1)


@pytest.mark.usefixtures("on_cpu")
def test_its_arithmetic_is_counted_like_that_of_other_kernels() -> None:
    counts = []
    for kernel in ("flash4", None):
        with FlopCounterMode(display=False, custom_mapping=attention_formulas()) as counter:
            gradients(
                lambda q, k, v, name=kernel: whole_attention(q, k, v, 0.3, kernel=name), heads(4), heads(2), heads(2)
            )
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 2 * 2 * 4 * 24 * 24 * 16 * 7


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: FakeHeads(shape, options["dtype"]))
    monkeypatch.setattr(sdpa, "SDPAParams", lambda q, *_: FakeCall(q))
    for name in ("cudnn", "flash"):
        monkeypatch.setitem(sdpa.KERNELS, name, (lambda call: True, sdpa.KERNELS[name][1]))


class FakeHeads:
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.device = shape, dtype, CUDA


class FakeCall:
    def __init__(self, query: FakeHeads) -> None:
        self.query = query


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("installed", "error", "heads", "chosen"),
    [
        (True, None, HEADS, "flash4"),
        (False, None, HEADS, "cudnn"),
        (True, "ImportError: no libcute", HEADS, "cudnn"),
        (True, None, (torch.float32, 8, 2, 64), "cudnn"),
        (True, None, (torch.bfloat16, 8, 2, 264), "cudnn"),
    ],
)
def test_it_is_taken_where_it_is_installed_and_serves(
    installed: bool, error: str | None, heads: Any, chosen: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(_flash4_private, "installed", lambda: installed)
    monkeypatch.setattr(_flash4_private, "import_error", lambda: error)
    with caplog.at_level(logging.WARNING):
        assert sdpa.choose_kernel(CUDA, *heads) == chosen
    assert caplog.messages == ([f"flash-attn-4 is installed and cannot be loaded: {error}"] if error else [])
    if chosen != "flash4":
        with pytest.raises(ValueError, match="attention kernel 'flash4' cannot serve"):
            sdpa.choose_kernel(CUDA, *heads, "flash4")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "served"),
    [
        (torch.bfloat16, 128, 9, True),
        (torch.float16, 256, 9, True),
        (torch.float32, 128, 9, False),
        (torch.bfloat16, 60, 9, False),
        (torch.bfloat16, 128, 10, True),
        (torch.bfloat16, 192, 10, False),
        (torch.bfloat16, 64, 8, False),
        (torch.bfloat16, 64, 12, False),
    ],
)
def test_what_its_kernels_take(dtype: torch.dtype, head_dim: int, capability: int, served: bool) -> None:
    assert _flash4_private.serves(dtype, head_dim, capability) == served


def test_asked_for_where_it_is_not_installed_it_is_refused_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ndbench.engines.bundled_refusals.distributions", lambda name: iter(()))
    said = BundledEngine(attention="flash4").refuse(Cell("single", "test", Config(world_size=1)))
    assert said == ("engine.options.attention 'flash4' needs the package flash-attn-4: pip install 'ndbench[flash4]'")
    monkeypatch.setattr("ndbench.engines.bundled_refusals.distributions", lambda name: iter((name,)))
    assert BundledEngine(attention="flash4").refuse(Cell("single", "test", Config(world_size=1))) is None
    assert ATTENTION_KERNELS[0] == "flash4"


def test_its_version_is_recorded_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flash-attn-4": "4.0.0b36"}
    monkeypatch.setattr("ndbench.measure.fingerprint._package", versions.get)
    assert software()["flash-attn-4"] == "4.0.0b36"
    versions.clear()
    assert "flash-attn-4" not in software()


def test_the_installed_package_has_the_functions_that_are_called() -> None:
    if not _flash4_private.installed():
        pytest.skip("flash-attn-4 is not installed")
    assert _flash4_private.import_error() is None
    if software()["flash-attn-4"] not in TRIED_FLASH_ATTN_4:
        pytest.skip(f"flash-attn-4 {software()['flash-attn-4']} has not been tried on a GPU")


def forward(q, k, v, qv=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
            window_size_right=None, return_lse=False): ...  # fmt: skip


def backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
             window_size_right=None, deterministic=False): ...  # fmt: skip


def without_softcap(q, k, v, softmax_scale=None, causal=False, window_size_left=None, window_size_right=None,
                    return_lse=False): ...  # fmt: skip


def another_order(dout, q, k, v, out, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
                  window_size_right=None, deterministic=False): ...  # fmt: skip


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ((forward, backward), None),
        ((without_softcap, backward), "its _flash_attn_fwd has no softcap; tried with 4.0.0b36"),
        ((forward, another_order), "its _flash_attn_bwd takes dout, q, k, v, out, lse; tried with 4.0.0b36"),
    ],
    ids=["as_tried", "keyword_gone", "another_order"],
)
def test_a_version_with_other_functions_is_not_used(
    functions: Any, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(_flash_attn_fwd=functions[0], _flash_attn_bwd=functions[1])
    monkeypatch.setattr(_flash4_private, "_functions", lambda: _flash4_private._Functions(module))
    _flash4_private.import_error.cache_clear()
    try:
        assert _flash4_private.import_error() == (said and f"ImportError: {said}")
    finally:
        _flash4_private.import_error.cache_clear()
