"""On GPUs: what left for the host is what comes back, whatever the streams do, and the host waits for nothing."""

from __future__ import annotations

from collections import deque
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ndbench.engines.bundled import BundledEngine
from ndbench.parallel import offload as module
from ndbench.parallel.mesh import build_mesh
from ndbench.parallel.offload import Offload
from tests.parallel import offload_tasks
from tests.parity.cases import Case, batch, case, layout, llama, training
from tests.parity.gpus import on_ranks
from tests.parity.ranks import on_device

GPUS = min(torch.cuda.device_count(), 2)
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")

LAYERS = 4


def of(parallelism: Any, mode: str, **changes: Any) -> Case:
    steps = training(activation_checkpointing=mode, micro_batch_size=2, **changes)
    return case(
        parallelism, llama(num_hidden_layers=LAYERS, initializer_range=0.02), training=steps, weight_jitter=0.02
    )


CASES = {
    f"{name}_{mode}_{'compiled' if compiled else 'eager'}": of(at, mode, compile=compiled, precision=precision)
    for name, at in (("dp", layout(1, GPUS)), ("cp", layout(1, 1, GPUS)), ("tp", layout(1, 1, 1, GPUS)))
    for mode, compiled, precision in (
        ("full", False, "fp32"),
        ("attention", False, "bf16"),
        ("attention", True, "bf16"),
    )
}


def both(here: Case, device: str) -> dict[str, Any]:
    """Tensors of the tests are far below what is worth a copy."""
    try:
        with patch.object(module, "LEAST_BYTES", 1):
            return offload_tasks.both(here, device=device)
    except Exception as error:  # every rank meets it alike; the other cases are worth their minutes
        return {"error": f"{type(error).__name__}: {error}"}


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    return dict(zip(CASES, on_ranks(both, list(CASES.values()), GPUS, timeout=500.0), strict=False))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_gpu_training_is_the_same_to_the_bit(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    assert name in found, "the ranks were killed at their time limit before this case"
    for each in found[name]:
        assert "error" not in each, each["error"]
        assert each["sent"].total() == each["ahead"] > 0
        assert (each["late"], each["left"]) == (0, 0)
        if not each["repeats"]:
            pytest.skip("without offload these kernels do not give the same bits twice")
        assert each["differing"] == []


def test_gpu_most_cases_have_the_same_bits_twice(found: dict[str, list[dict[str, Any]]]) -> None:
    """Else the comparison above says nothing."""
    assert sum(all(each.get("repeats", False) for each in ranks) for ranks in found.values()) > len(CASES) / 2


def late(here: Case, device: str) -> dict[str, Any]:
    """A step with the lane far behind: whoever does not wait for it reads what is not there yet."""
    mesh, at = build_mesh(here.parallelism, device), torch.device(device, torch.cuda.current_device())
    results = []
    bring, send = Offload._bring, Offload._send

    def slow(move: Any) -> Any:
        def moving(self: Any, what: Any) -> None:
            with self._lane.after(None):
                torch.cuda._sleep(20_000_000)
            move(self, what)

        return moving

    for delayed in (False, False, True):
        with patch.object(module, "LEAST_BYTES", 1):
            engine = BundledEngine(weight_jitter=here.weight_jitter)
            engine.build(here.model, here.training, mesh, at)
        data = on_device(batch(here, 0, mesh.batch_rank, mesh.batch_size), at)
        engine.step(data)  # allocates host memory, which waits for the device
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        moves = {"_bring": slow(bring), "_send": slow(send)} if delayed else {"_bring": bring, "_send": send}
        try:
            with patch.multiple(Offload, **moves):
                done = [engine.step(data) for _ in range(3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([(float(each.loss), float(each.grad_norm)) for each in done])  # type: ignore[arg-type]
        engine.close()
    return dict(zip(("plain", "again", "late"), results, strict=True))


@pytest.mark.parametrize("mode", ["full", "attention"])
def test_gpu_a_slow_bus_changes_no_number_and_the_host_waits_for_none(mode: str) -> None:
    ((found,),) = on_ranks(late, [of(layout(), mode, activation_offload=True)], 1)
    for ours, plain in zip(found["late"], found["plain"], strict=True):
        assert ours == (plain if found["plain"] == found["again"] else pytest.approx(plain, rel=1e-4))


def test_gpu_memory_is_given_up_only_after_its_copy() -> None:
    """The computing stream writes over whatever it is given, while the lane has not begun to read."""
    device = torch.device("cuda", torch.cuda.current_device())
    offload = Offload(4, device)
    packed: deque[tuple[int, Any]] = deque()
    for index in range(4):
        with offload._passing(index, set()):
            with offload._lane.after(None):
                torch.cuda._sleep(20_000_000)
            packed.append((index, offload.pack(torch.full((2**20,), float(index), device=device))))
        for _ in range(4):
            torch.full((2**20,), -1.0, device=device)
    assert [each.host is not None for _, each in packed] == [True, True, True, False]
    assert all(each.host.is_pinned() for _, each in packed if each.host is not None)
    while packed:
        index, last = packed.pop()
        found = offload.unpack(last)
        del last
        for _ in range(4):
            torch.full((2**20,), -1.0, device=device)
        assert bool((found == index).all()), index
    offload._settle()
    assert not offload._moving
