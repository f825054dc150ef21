"""What each rank runs in a test of checkpoints: build, step, save, load, and hand back plain numbers."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ndbench.engines.bundled import BundledEngine
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.initialize import local_slice
from ndbench.parallel.mesh import Mesh, build_mesh
from ndbench.parallel.state import Checkpoints
from tests.parity.cases import Case, batch


class Run:
    """An engine in training on this rank."""

    def __init__(self, case: Case, seed: int | None = None) -> None:
        self.case = case
        self.mesh: Mesh = build_mesh(case.parallelism, "cpu")
        self.engine = BundledEngine(weight_jitter=case.weight_jitter)
        self.engine.build(case.model, case.training, self.mesh, torch.device("cpu"))
        assert self.engine.model is not None
        assert self.engine._step is not None
        self.model, self.optimizer = self.engine.model, self.engine._step.optimizer
        self.arguments = (self.model, self.optimizer.optimizer, self.optimizer.parameters)

    def steps(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            loss = self.engine.step(batch(self.case, step, self.mesh.batch_rank, self.mesh.batch_size)).loss
            assert isinstance(loss, torch.Tensor)
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """This rank's pieces of every parameter and moment as (offset, values); what is whole has no offset."""
        found: dict[str, Any] = {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        held = [p for group in self.optimizer.optimizer.param_groups for p in group["params"]]
        for own, parameter in zip(held, self.optimizer.parameters, strict=True):
            rows, columns = local_slice(parameter)
            offset = (rows.start, columns.start if columns is not None else 0)
            name, local = names[id(parameter)], local_tensor(parameter).detach()
            found[name] = (offset, tuple(parameter.shape), local.clone())
            for key, value in self.optimizer.optimizer.state.get(own, {}).items():
                if value is None:
                    found[f"{name}/{key}"] = None
                elif local_tensor(value).shape == local.shape:
                    found[f"{name}/{key}"] = (offset, tuple(parameter.shape), local_tensor(value).clone())
                else:
                    found[f"{name}/{key}"] = ((), tuple(value.shape), value.clone())
        return found


def save(case: Case, folder: Path, mode: str, steps: int, then: int = 1) -> dict[str, Any]:
    """Take ``steps``, save, and take ``then`` more."""
    run = Run(case)
    run.steps(0, steps)
    state = run.state()
    checkpoints = Checkpoints(folder, run.mesh, mode=mode)
    checkpoints.save(steps, *run.arguments, {"step": steps})
    losses = run.steps(steps, then)
    checkpoints.wait()
    return {"state": state, "loss": losses}


def load(case: Case, folder: Path, then: int = 1) -> dict[str, Any]:
    """Load into a model that starts from other weights, and take ``then`` steps."""
    run = Run(case)
    with torch.no_grad():
        for parameter in run.model.parameters():
            local_tensor(parameter).fill_(7.0)
    checkpoints = Checkpoints(folder, run.mesh)
    newest = checkpoints.newest()
    assert newest is not None
    progress = checkpoints.load(newest, *run.arguments)
    return {"state": run.state(), "progress": progress, "loss": run.steps(progress["step"], then)}
