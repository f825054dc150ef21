"""What the ranks of the FP8 tests run: a short training of a model that learns, its curve and what its layers are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.engines.bundled import BundledEngine
from ndbench.engines.protocol import Batch
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.mesh import build_mesh
from tests.parity.ranks import on_device

STEPS = 30


class Float8Casts(TorchDispatchMode):
    """Counts casts to each FP8 format."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is torch.ops.aten._to_copy.default and "float8" in str(dtype):
            name = str(dtype).removeprefix("torch.")
            self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def chain(model: ModelConfig, training: TrainingConfig, step: int, rank: int, ranks: int) -> Batch:
    """This rank's sequences of a chain that a small model learns: four followers a token, equally likely."""
    size = model.vocab_size
    assert size is not None
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(0, size, (training.global_batch_size,), generator=generator)]
    for _ in range(training.sequence_length):
        drawn = torch.randint(0, 4, (training.global_batch_size,), generator=generator)
        tokens.append((tokens[-1] * 5 + drawn) % size)
    own = torch.stack(tokens, dim=1).chunk(ranks)[rank]
    positions = torch.arange(training.sequence_length).repeat(len(own), 1)
    return Batch(own[:, :-1].contiguous(), own[:, 1:].contiguous(), positions, None)


def curve(
    case: tuple[ModelConfig, TrainingConfig, ParallelismConfig], device_type: str = "cpu", steps: int = STEPS
) -> dict[str, Any]:
    """Loss and gradient norm of every step, the engine's facts, and the FP8 casts of one more step's gradients."""
    model, training, layout = case
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    mesh = build_mesh(layout, device.type)
    engine = BundledEngine()
    engine.build(model, training, mesh, device)

    def data(step: int) -> Batch:
        return on_device(chain(model, training, step, mesh.batch_rank, mesh.batch_size), device)

    done = [engine.step(data(step)) for step in range(steps)]
    found: dict[str, Any] = {
        "loss": [float(step.loss) for step in done],
        "norm": [float(step.grad_norm) for step in done],
        "facts": engine.info(),
        "kinds": [type(module).__name__ for module in engine.stepper.model.modules()],
    }
    if not training.compile and device.type == "cpu":
        with Float8Casts() as casts:
            engine.stepper.backward(data(steps))
        found["casts"] = casts.count
    engine.close()
    if training.compile:
        torch._dynamo.reset()
    return found


def both(
    case: tuple[ModelConfig, TrainingConfig, ParallelismConfig], device_type: str = "cpu", steps: int = STEPS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(bf16, fp8) of the same training."""
    model, training, layout = case
    low, lower = (
        curve((model, replace(training, precision=precision), layout), device_type, steps)
        for precision in ("bf16", "fp8")
    )
    return low, lower


def products(case: tuple[ModelConfig, TrainingConfig, ParallelismConfig], device_type: str = "cuda") -> int:
    """Matrix products in FP8 of one step, without emulation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        curve(case, device_type, 1)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::_scaled_mm")


def in_one_process(function: Any, *arguments: Any) -> Any:
    """Call it with a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()
