"""What the ranks of the trainer's tests run: whole and killed runs, evaluation, the examples."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ndbench.config import Config
from ndbench.engines.bundled import BundledEngine
from ndbench.engines.protocol import Batch
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.mesh import build_mesh
from ndbench.training.data import build_split
from ndbench.training.evaluate import evaluate
from ndbench.training.log import read_log
from ndbench.training.trainer import LOG, Control, Trainer

CPU = torch.device("cpu")


class Killed(Exception):
    """Stands for kill -9: nothing of the trainer runs after it."""


def train(config: Config, folder: str | None, kill_before: int | None = None) -> dict[str, Any]:
    """Train on this rank; what was read, logged and learnt. ``kill_before``: the process ends before that step."""
    dist.barrier()
    mesh = build_mesh(config.parallelism, "cpu")
    data, validation = build_split(config)
    read: list[int] = []
    batch_from = data.batch_from

    def recorded(first: int, *arguments: Any) -> Batch:
        read.append(first)
        return batch_from(first, *arguments)

    data.batch_from = recorded  # type: ignore[method-assign]
    trainer: Trainer | None = None

    def stop() -> int:
        if trainer is not None and kill_before is not None and trainer.step + 1 == kill_before:
            raise Killed
        return 0

    place = None if folder is None else Path(folder)
    trainer = Trainer(config, mesh, CPU, data, validation, folder=place, control=Control(stop=stop))
    began, outcome = trainer.step, None
    with contextlib.suppress(Killed):
        outcome = trainer.run()
    found = {
        "began": began,
        "read": read,
        "outcome": outcome,
        "weights": {name: local_tensor(p).detach().clone() for name, p in trainer.model.named_parameters()},
        "log": read_log(place / LOG) if place is not None and dist.get_rank() == 0 else [],
    }
    dist.barrier()
    return found


def evaluated(config: Config, batches: int) -> tuple[float, int, list[bool]]:
    """(loss, tokens, whether a training step afterwards is as if there had been no evaluation)."""
    mesh = build_mesh(config.parallelism, "cpu")
    data, validation = build_split(config)
    assert validation is not None
    engine = BundledEngine()
    engine.build(config.model, config.training, mesh, CPU)
    result = evaluate(engine.stepper, validation, batches, CPU)
    batch = data.batch(0, mesh.batch_rank, mesh.batch_size, CPU)
    after = engine.step(batch)
    other = BundledEngine()
    other.build(config.model, config.training, mesh, CPU)
    alone = other.step(batch)
    return *result, [bool(after.loss == alone.loss), bool(after.grad_norm == alone.grad_norm)]


def example(path: str, arguments: dict[str, Any]) -> Any:
    """Run ``main`` of an example's file on this rank."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(**arguments)
