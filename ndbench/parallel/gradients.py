"""The norm of the global gradient, and clipping by it, whatever mixture of meshes the parameters live on.

Everything happens on local shards with one all-reduce for the norm; torch's ``clip_grad_norm_`` refuses parameters of
different meshes and costs a reduction a parameter. It knows nothing of losses or optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ndbench.parallel.held import Held


class Gradients:
    """The gradients of one model on this rank.

    ``partial`` names replicated parameters of which each tp rank holds a part of the gradient. ``group`` is all ranks
    of the layout, ``tp_group`` this rank's tp axis; None where there is only one rank. ``held`` is where backward
    leaves them, by default on the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        partial: Iterable[str] = (),
        group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        held: Held | None = None,
    ) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(named.values())
        self.group, self.tp_group, self.device = group, tp_group, device
        self.held = Held(model) if held is None else held
        self._partial = [named[name] for name in sorted(partial) if name in named]
        by_copies: dict[int, list[nn.Parameter]] = {}
        world = 1 if group is None else group.size()
        for parameter in self.parameters:
            by_copies.setdefault(copies(parameter, world), []).append(parameter)
        self._by_copies = sorted(by_copies.items())

    def sum_over_tp(self) -> None:
        """Complete the partial gradients: one all-reduce of all of them together."""
        if self.tp_group is None or not self._partial:
            return
        there = [(p, grad) for p, grad in ((p, self.held.of(p)) for p in self._partial) if grad is not None]
        flat = torch.cat([grad.reshape(-1).to(p.dtype) for p, grad in there]).to(self.device)
        dist.all_reduce(flat, group=self.tp_group)
        parts = torch.split(flat, [grad.numel() for _, grad in there])
        for (p, grad), part in zip(there, parts, strict=True):
            self.held.put(p, part.view_as(grad))

    def norm(self, *also_summed: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Euclidean norm of the global gradient, equal on every rank; more scalars are summed in the same all-reduce.

        A parameter that several ranks hold a copy of counts once. Float32 sums of squares a tensor, float64 across
        tensors and ranks.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        norm_of = self._norms()
        for count, parameters in self._by_copies:
            norms = [norm_of[id(p)] for p in parameters if id(p) in norm_of]
            if norms:
                total += torch.stack(norms).to(self.device, torch.float64).square().sum() / count
        packed = torch.stack([total, *(x.to(self.device, torch.float64) for x in also_summed)])
        if self.group is not None:
            dist.all_reduce(packed, group=self.group)
        return packed[0].sqrt(), list(packed[1:])

    def _norms(self) -> dict[int, torch.Tensor]:
        """Euclidean norm of each local gradient, by the parameter's id; the first are read while others come."""
        norms: dict[int, torch.Tensor] = {}
        for parameters in self.held.arrivals(self.parameters):
            there: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
            for p in parameters:
                known = self.held.norm_of(p)
                if known is not None:
                    norms[id(p)] = known
                    continue
                grad = self.held.of(p)
                if grad is not None and grad.numel():
                    there.setdefault(grad.dtype, []).append((id(p), grad))
            for pairs in there.values():  # of one dtype: only these are read in one pass
                ids, grads = zip(*pairs, strict=True)
                norms |= zip(ids, torch._foreach_norm(grads, 2, dtype=torch.float32), strict=True)
        return norms

    @staticmethod
    def clip_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
        """What :meth:`clip` multiplies by: max_norm / norm, at most 1."""
        return (max_norm / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Scale all gradients by max_norm / norm when the norm is larger; no copy to the host."""
        scale = self.clip_scale(norm, max_norm)
        grads = self._wide()
        torch._foreach_mul_(grads, scale.to(grads[0].device))

    def clip_by_value(self, limit: float) -> None:
        """Clamp each element of the global gradient to [-limit, limit]."""
        grads = self._wide()
        torch._foreach_clamp_min_(grads, -limit)
        torch._foreach_clamp_max_(grads, limit)

    def _wide(self) -> list[torch.Tensor]:
        """The local gradients in the parameters' dtype, to be changed in place."""
        self.held.widen()
        return [grad for grad in map(self.held.of, self.parameters) if grad is not None]


def copies(parameter: torch.Tensor, world_size: int) -> int:
    """On how many of ``world_size`` ranks each element of ``parameter`` is held."""
    if not isinstance(parameter, DTensor):
        return world_size
    parts = 1
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard() or type(placement).__name__ == "_StridedShard":
            parts *= parameter.device_mesh.size(dim)
    return world_size // parts
