"""What each rank runs in a parity test: build the engine for a layout, take steps, hand back plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ndbench.engines.bundled import BundledEngine
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.initialize import local_slice
from ndbench.parallel.mesh import build_mesh
from tests.parity.cases import Case, batch

Piece = tuple[range, range | None, torch.Tensor]
"""Rows and columns of a global tensor, and its values there, as one rank holds them."""


def train(case: Case, plant: Callable[[], AbstractContextManager[Any]] = nullcontext) -> dict[str, Any]:
    """Run ``case`` on this rank: losses, norms and tokens of each step, pieces of gradients and weights.

    ``plant`` makes a context in which the engine has a fault.
    """
    with plant():
        return _train(case)


def _train(case: Case) -> dict[str, Any]:
    mesh = build_mesh(case.parallelism, "cpu")
    engine = BundledEngine(weight_jitter=case.weight_jitter)
    engine.build(case.model, case.training, mesh, torch.device("cpu"))
    assert engine.model is not None
    assert engine._step is not None
    result: dict[str, Any] = {"loss": [], "norm": [], "tokens": [], "facts": engine.info()}
    if case.tensors:
        engine._step.backward(batch(case, 0, mesh.batch_rank, mesh.batch_size))
        result["gradients"] = pieces({name: p.grad for name, p in engine.model.named_parameters()})
        engine.model.zero_grad()
    for step in range(case.steps):
        done = engine.step(batch(case, step, mesh.batch_rank, mesh.batch_size))
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


def pieces(tensors: dict[str, torch.Tensor | None]) -> dict[str, Piece]:
    """This rank's part of each tensor that exists."""
    return {
        name: (*local_slice(tensor), local_tensor(tensor).detach().clone())
        for name, tensor in tensors.items()
        if tensor is not None
    }
