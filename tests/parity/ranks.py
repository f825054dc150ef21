"""What each rank runs in a parity test: build the engine for a layout, take steps, hand back plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ndbench.engines.bundled import BundledEngine
from ndbench.engines.protocol import Batch
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.initialize import local_slice
from ndbench.parallel.mesh import build_mesh
from tests.parity.cases import Case, batch

Piece = tuple[range, range | None, torch.Tensor]
"""Rows and columns of a global tensor, and its values there, as one rank holds them."""


def train(
    case: Case, plant: Callable[[], AbstractContextManager[Any]] = nullcontext, device: str = "cpu"
) -> dict[str, Any]:
    """Run ``case`` on this rank: losses, norms and tokens of each step, pieces of gradients and weights on the CPU.

    ``plant`` makes a context in which the engine has a fault.
    """
    with plant():
        return _train(case, torch.device(device))


def _train(case: Case, device: torch.device) -> dict[str, Any]:
    mesh = build_mesh(case.parallelism, device.type)
    engine = BundledEngine(weight_jitter=case.weight_jitter)
    engine.build(case.model, case.training, mesh, device)

    def data(step: int) -> Batch:
        return on_device(batch(case, step, mesh.batch_rank, mesh.batch_size), device)

    assert engine.model is not None
    assert engine._step is not None
    result: dict[str, Any] = {"loss": [], "norm": [], "tokens": [], "facts": engine.info()}
    if case.tensors:
        engine._step.backward(data(0))
        engine._step.gradients.held.settle()
        result["gradients"] = pieces({name: p.grad for name, p in engine.model.named_parameters()})
        engine.model.zero_grad()
    for step in range(case.steps):
        done = engine.step(data(step))
        assert isinstance(done.loss, torch.Tensor)
        assert isinstance(done.grad_norm, torch.Tensor)
        assert isinstance(done.tokens, torch.Tensor)
        result["loss"].append(done.loss.item())
        result["norm"].append(done.grad_norm.item())
        result["tokens"].append(int(done.tokens))
    if case.tensors:
        result["weights"] = pieces(dict(engine.model.named_parameters()))
    engine.close()
    return result


def on_device(whole: Batch, device: torch.device) -> Batch:
    parts = (whole.input_ids, whole.labels, whole.position_ids, whole.document_ids)
    return Batch(*(None if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]


def pieces(tensors: dict[str, torch.Tensor | None]) -> dict[str, Piece]:
    """This rank's part of each tensor that exists."""
    return {
        name: (*local_slice(tensor), local_tensor(tensor).detach().to("cpu", copy=True))
        for name, tensor in tensors.items()
        if tensor is not None
    }
