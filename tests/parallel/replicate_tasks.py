"""What ranks run for the tests of replicated gradients: a toy whose ranks use different parts of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.mesh import build_mesh
from ndbench.parallel.precision import ComputeCopies
from ndbench.parallel.replicate import HeldInBuckets
from ndbench.parallel.state_pieces import holders


class Toy(nn.Module):
    """Three blocks between an input and an output; ``forward`` runs those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, use: list[int]) -> torch.Tensor:
        x = self.first(x)
        for index in use:
            x = x + self.blocks[index](x)
        return x * self.gain


def _inputs(rank: int, micro: int) -> torch.Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(10 * rank + micro))


def uneven(low: bool, micro_batches: int) -> dict[str, Any]:
    """Rank r uses the blocks 0 and 1 + r, in the last micro-batch the block 0 alone; the block 3 is never used."""
    model, rank = Toy(), dist.get_rank()
    copies = ComputeCopies(model, torch.bfloat16) if low else None
    leaves = [(p, p) for p in model.parameters()] if copies is None else copies.leaves
    held = HeldInBuckets(model, leaves, model.blocks, dist.group.WORLD)
    wanted = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    reference = Toy().to(torch.bfloat16) if low else Toy()

    def used(who: int, micro: int) -> list[int]:
        return [0] if micro and micro == micro_batches - 1 else [0, 1 + who]

    for who in range(dist.get_world_size()):
        part = {name: torch.zeros_like(value) for name, value in wanted.items()}
        for micro in range(micro_batches):
            reference.zero_grad()
            x = _inputs(who, micro).to(reference.gain.dtype)
            reference(x, used(who, micro)).float().square().sum().backward()
            for name, p in reference.named_parameters():
                if p.grad is not None:
                    part[name] += p.grad
        for name, value in part.items():
            wanted[name] += value
    for micro in range(micro_batches):
        held.expect(last=micro == micro_batches - 1)
        x = _inputs(rank, micro)
        if copies is None:
            model(x, used(rank, micro)).float().square().sum().backward()
        else:
            with copies.active():
                model(x.bfloat16(), used(rank, micro)).float().square().sum().backward()
    found = {name: held.of(p) for name, p in model.named_parameters()}
    wrong = [name for name, value in found.items() if value is None or not torch.equal(value, wanted[name])]
    unused = float(model.blocks[3].weight.new_tensor(0) + found["blocks.3.weight"].abs().sum())  # type: ignore[union-attr]
    dtypes = sorted({str(value.dtype) for value in found.values() if value is not None})
    held.settle()
    assert all(torch.equal(p.grad, wanted[name]) for name, p in model.named_parameters())  # type: ignore[arg-type]
    held.forget()
    left = [name for name, p in model.named_parameters() if held.of(p) is not None]
    return {"wrong": wrong, "unused": unused, "dtypes": dtypes, "left": left}


def started(micro_batches: int) -> list[int]:
    """After each backward that uses every block: the all-reduces that have begun before anyone asked for a gradient."""
    model = Toy()
    del model.blocks[2:]
    held = HeldInBuckets(model, [(p, p) for p in model.parameters()], model.blocks, dist.group.WORLD)
    counts, begun = [], []
    real = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (begun.append(1), real(*args, **kwargs))[1]  # type: ignore[func-returns-value]
    try:
        for micro in range(micro_batches):
            held.expect(last=micro == micro_batches - 1)
            model(_inputs(dist.get_rank(), micro), [0, 1]).square().sum().backward()
            counts.append(len(begun))
    finally:
        dist.all_reduce = real
    held.of(model.gain)
    held.forget()
    return counts


def holding() -> list[tuple[int, ...]]:
    """In ddp2 x tp2: the ranks that hold what this one does of a weight sharded over tp, and of a replicated one."""
    mesh = build_mesh(ParallelismConfig(dp_replicate_size=2, tp_size=2), "cpu")
    placed = (DTensor.from_local(torch.ones(2), mesh.tp, [each], run_check=False) for each in (Shard(0), Replicate()))
    return [holders(tensor, dist.get_world_size()) for tensor in placed]
