"""Tensor parallelism by a plan: module name pattern -> style, as transformers' models carry it, or the user's own.

``plan.py`` decides what each module becomes; this file does it. Every parameter becomes a DTensor on the tp axis,
replicated where the plan is silent, so that one norm, one clip and one optimizer serve all of them. Inside a forward,
parameters are plain tensors and communication is explicit (``collectives.py``): no DTensor dispatch in the step.
It knows nothing of FSDP or of losses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ndbench.parallel.collectives import (
    Group,
    enter_replicated,
    gather_last,
    gather_sequence,
    own_part,
    scatter_partials,
    split_last,
    sum_partials,
)
from ndbench.parallel.plan import TensorPlan

Swap = Callable[[nn.Module], None]


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> frozenset[str]:
    """Shard ``model``, whose parameters are on meta, over the 1-D ``mesh`` as ``plan`` says, in place.

    Returns the names of the replicated parameters whose gradients each rank holds only a part of (they saw a shard of
    the sequence or of the heads): ``gradients.py`` sums these over tp.
    """
    group = Group(mesh.get_group())
    modules = dict(model.named_modules())
    for name, module in modules.items():
        style = plan.styles.get(name, "replicated")
        if style in ("colwise", "partial", "replicated"):
            _become(module, _Local)
        elif style == "colwise_gather_output":
            _become(module, _ColwiseGathered, group=group, out_features=_features(module, 0))
        elif style in ("rowwise", "rowwise_split_input"):
            split = style == "rowwise_split_input"
            _become(module, _Rowwise, group=group, split=split, scatter=plan.sequence_parallel)
        else:
            assert style == "embedding_rowwise", style
            _become(module, _VocabularyEmbedding, group=group, scatter=plan.sequence_parallel)
    for name in plan.entries:
        modules[name].register_forward_pre_hook(
            functools.partial(_enter, group=group, gather=plan.sequence_parallel), with_kwargs=True
        )
    return _distribute(model, mesh, plan)


def _distribute(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> frozenset[str]:
    """Make every parameter a DTensor, keep ties, and return the names of those with partial gradients."""
    done: dict[int, nn.Parameter] = {}
    partial = set()
    for module_name, module in model.named_modules():
        style = plan.styles.get(module_name, "replicated")
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement, is_partial = _placement(style, name, plan.sequence_parallel)
            if id(parameter) not in done:
                done[id(parameter)] = _shard(parameter, mesh, placement)
                if is_partial:
                    partial.add(f"{module_name}.{name}" if module_name else name)
            module.register_parameter(name, done[id(parameter)])
    return frozenset(partial)


def _placement(style: str, name: str, sequence_parallel: bool) -> tuple[Placement, bool]:
    """Placement of a parameter on tp, and whether its gradient is partial."""
    if style.startswith("colwise") or style == "embedding_rowwise":
        return Shard(0), False
    if style.startswith("rowwise"):
        # The bias is added after the sum: to a shard of the sequence, or once to the whole of it.
        return (Shard(1), False) if name == "weight" else (Replicate(), sequence_parallel)
    return Replicate(), style == "partial"


def _shard(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    assert parameter.is_meta, "tensor parallelism is applied before any parameter is allocated"
    local = parameter.data
    if isinstance(placement, Shard):
        local = own_part(local, Group(mesh.get_group()), placement.dim).contiguous()
    distributed = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)


def _enter(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: Group, gather: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a module whose work is split over tp: its hidden states, gathered over the sequence when sharded."""
    enter = gather_sequence if gather else enter_replicated
    if args:
        return (enter(args[0], group), *args[1:]), kwargs
    assert "hidden_states" in kwargs, f"{type(module).__name__} is called without hidden states"
    return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group)}


def _features(module: nn.Module, dim: int) -> int:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[dim]


# Modules change class, as fully_shard does it too: names stay, isinstance holds, and compile sees plain Python.


class _Local(nn.Module):
    """Parameters read inside forward are this rank's plain tensors; everyone else sees the DTensors."""

    tp_group: Group
    tp_inside = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.tp_inside = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.tp_inside = False


class _ColwiseGathered(_Local):
    tp_out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gather_last(super().forward(x), self.tp_group, self.tp_out_features)


class _Rowwise(_Local):
    tp_split: bool
    tp_scatter: bool

    @property
    def bias(self) -> nn.Parameter | None:
        # The product is without it: it is added once, after the sum.
        return None if self.tp_inside else self._parameters["bias"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp_split:
            x = split_last(x, self.tp_group)
        out = super().forward(x)
        out = scatter_partials(out, self.tp_group) if self.tp_scatter else sum_partials(out, self.tp_group)
        return out if self._parameters["bias"] is None else out + local_parameter(self, "bias")


class _VocabularyEmbedding(_Local):
    """Looks up the rows it has; tokens of other ranks give zeros, which the sum over ranks fills in."""

    num_embeddings: int
    padding_idx: int | None
    tp_scatter: bool

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        chunk = -(-self.num_embeddings // self.tp_group.size)
        start = self.tp_group.rank * chunk
        rows = min(chunk, self.num_embeddings - start)
        local = input_ids - start
        elsewhere = (local < 0) | (local >= rows)
        whole_padding = self.padding_idx
        if whole_padding is not None:
            self.padding_idx = whole_padding - start if start <= whole_padding < start + rows else None
        out = super().forward(local.masked_fill(elsewhere, 0))
        self.padding_idx = whole_padding
        out = out.masked_fill(elsewhere[..., None], 0)
        return scatter_partials(out, self.tp_group) if self.tp_scatter else sum_partials(out, self.tp_group)


def _become(module: nn.Module, kind: type[_Local], **attributes: Any) -> None:
    names = tuple(name for name, _ in module.named_parameters(recurse=False))
    if not names:
        return
    module.__class__ = _local_class(type(module), kind, names)  # type: ignore[arg-type]
    for name, value in attributes.items():
        setattr(module, f"tp_{name}", value)


@functools.cache
def _local_class(base: type[nn.Module], kind: type[_Local], names: tuple[str, ...]) -> type[nn.Module]:
    own = [name for name in names if name not in vars(kind)]
    parameters = {name: property(functools.partial(_parameter, name=name)) for name in own}
    return type(f"{kind.__name__.strip('_')}{base.__name__}", (kind, base), {**parameters})


def _parameter(module: _Local, name: str) -> torch.Tensor:
    return local_parameter(module, name) if module.tp_inside else module._parameters[name]  # type: ignore[return-value]


def local_parameter(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter as this rank's plain tensor, with autograd: its gradient arrives as a DTensor placed like it."""
    parameter = module._parameters[name]
    assert parameter is not None, name
    if isinstance(parameter, DTensor):
        local: torch.Tensor = parameter.to_local(grad_placements=parameter.placements)
        return local
    return parameter
