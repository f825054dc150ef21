"""From a model on meta to weights on this rank: allocate, keep ties and buffers, fill each parameter by its name.

A weight is a pure function of (seed, parameter name in the unwrapped model) and of what computes with it, where it is
drawn: by torch's generator on a CPU, by a hash of its position on a GPU of any model, so that every layout starts from
the same numbers, but a GPU from others than a CPU. A rank draws only the rows that its shard touches, a few megabytes
at a time; 8 billion take a GPU a second or two.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ndbench.parallel._torch_private import local_tensor

ELEMENTS_A_DRAW = 2**20
"""Rows are drawn in groups of about this many elements, each group from a generator of its own."""


@dataclass(frozen=True)
class Weights:
    """How parameters start: matrices normal with ``std``; norm weights and biases constant, as the model has them.

    ``jitter`` is added to the constants as normal noise of that standard deviation: parity tests need norms and biases
    that are not constant. ``constants`` are the starting values that the model's own constructor gave.
    """

    seed: int
    std: float
    jitter: float = 0.0
    constants: dict[str, float] | None = None

    def constant(self, name: str, ndim: int) -> float | None:
        """The constant a parameter starts from; None for one that is drawn."""
        if self.constants is not None and name in self.constants:
            return self.constants[name]
        if ndim > 1:
            return None
        return 1.0 if name.rpartition(".")[2] == "weight" else 0.0

    def rows(
        self, name: str, shape: torch.Size, start: int, stop: int, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Rows ``start`` to ``stop`` (of dim 0) of a parameter as (first row, float32 tensor) pieces on ``device``."""
        constant = self.constant(name, len(shape))
        std = self.jitter if constant is not None else self.std
        width = math.prod(shape[1:])
        group = max(1, ELEMENTS_A_DRAW // max(width, 1))
        for index in range(start // group, -(-stop // group)):
            first, last = index * group, min((index + 1) * group, shape[0])
            if std:
                drawn = self._normal(name, index, (last - first, *shape[1:]), std, torch.device(device))
            else:
                drawn = torch.zeros(last - first, *shape[1:], device=device)
            if constant:
                drawn += constant
            low, high = max(first, start), min(last, stop)
            yield low, drawn[low - first : high - first]

    def whole(self, name: str, shape: torch.Size, device: torch.device | str = "cpu") -> torch.Tensor:
        """All of a parameter in one piece."""
        size = shape if len(shape) else torch.Size([1])
        made = torch.empty(size, device=device)
        for first, values in self.rows(name, size, 0, size[0], device):
            made.narrow(0, first, len(values)).copy_(values)
        return made.view(shape)

    def _normal(self, name: str, index: int, shape: tuple[int, ...], std: float, device: torch.device) -> torch.Tensor:
        """A group, always whole: what a generator gives depends on how many numbers it is asked for."""
        digest = hashlib.sha256(f"{self.seed}:{name}:{index}".encode()).digest()
        key = int.from_bytes(digest[:8], "little") >> 1
        if device.type == "cpu":
            return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(key))
        return hashed_normal(key, math.prod(shape), device).mul_(std).view(shape)


def hashed_normal(key: int, count: int, device: torch.device) -> torch.Tensor:
    """``count`` standard normal float32 numbers from ``key`` (below 2**63), the same on every device.

    The generator of a GPU gives other numbers where it has another number of processors. SplitMix64 (Steele et al.
    2014) of each position gives two uniform numbers of 24 bits, Box and Muller's transform in float64 a normal one.
    """
    bits = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    bits.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)  # int64 wraps around, as the hash wants it
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits.bitwise_xor_((bits >> shift) & (2 ** (64 - shift) - 1)).mul_(_signed(factor))
    bits.bitwise_xor_((bits >> 31) & (2**33 - 1))
    radius = ((bits >> 40) & (2**24 - 1)).double().add_(1).div_(2**24).log_().mul_(-2).sqrt_()
    angle = ((bits >> 16) & (2**24 - 1)).double().mul_(2 * math.pi / 2**24).cos_()
    return radius.mul_(angle).float()


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def materialize(model: nn.Module, device: torch.device, parameter_device: torch.device) -> None:
    """Allocate the parameters of ``model``; buffers keep the values they were built with; ties stay ties."""
    buffers = [(module, name, b) for module in model.modules() for name, b in module.named_buffers(recurse=False)]
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            ties.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=parameter_device)
    for module, name, value in buffers:
        assert not value.is_meta, f"buffer {name} of {type(module).__name__} was built on meta: its value is lost"
        module._buffers[name] = value.to(device)
    for (module, name), *others in ties.values():
        for other, other_name in others:
            other._parameters[other_name] = module._parameters[name]


@torch.no_grad()
def fill(model: nn.Module, weights: Weights) -> None:
    """Give every parameter its starting value; of a sharded one only this rank's slice."""
    for name, parameter in model.named_parameters():
        local = local_tensor(parameter)
        rows, columns = local_slice(parameter)
        assert rows.stop - rows.start == (local.shape[0] if local.ndim else 1), (name, rows, local.shape)
        shape = parameter.shape if parameter.ndim else torch.Size([1])
        target = local if local.ndim else local.view(1)
        for first, values in weights.rows(name, shape, rows.start, rows.stop, computing_device(parameter)):
            if columns is not None:
                values = values[:, columns.start : columns.stop]
            target.narrow(0, first - rows.start, len(values)).copy_(values)


def computing_device(parameter: torch.Tensor) -> torch.device:
    """Where ``parameter`` is computed with: its own device, or its mesh's when it is kept on the host."""
    device = local_tensor(parameter).device
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != device.type:
        return torch.device(parameter.device_mesh.device_type)
    return device


def local_slice(parameter: torch.Tensor) -> tuple[range, range | None]:
    """Rows (dim 0) and, when dim 1 is sharded, columns of the global tensor that this rank holds.

    tp is the last mesh dim and shards first; FSDP shards what tp left. Chunks are torch's: equal, but for the last.
    """
    rows = range(parameter.shape[0] if parameter.ndim else 1)
    columns: range | None = None
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for mesh_dim in reversed(range(mesh.ndim)):
            dim = getattr(parameter.placements[mesh_dim], "dim", None)
            if dim is None:
                continue
            assert dim in (0, 1), f"parameters are sharded over dims 0 and 1, not {dim}"
            whole = rows if dim == 0 else columns or range(parameter.shape[1])
            part = _chunk(whole, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
            rows, columns = (part, columns) if dim == 0 else (rows, part)
    return rows, columns


def _chunk(whole: range, parts: int, index: int) -> range:
    size = -(-len(whole) // parts)
    return whole[min(index * size, len(whole)) : min((index + 1) * size, len(whole))]
