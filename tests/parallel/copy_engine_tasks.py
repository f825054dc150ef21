"""What ranks do for ``test_copy_engine.py``: the engine with its peer memory in files that the ranks map."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ndbench.engines.bundled import BundledEngine
from ndbench.engines.protocol import Batch
from ndbench.measure.collectives import CollectiveRecorder, totals
from ndbench.parallel import copy_engine, peer_memory, peer_scatter
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.joined import one_after_another
from ndbench.parallel.mesh import build_mesh
from ndbench.training import models
from ndbench.training.models import build_model
from tests.parity.cases import Case, batch
from tests.parity.ranks import on_device

BLOCK_MATRICES = 7
"""q, k, v, o, gate, up, down."""


class FileMemory:
    """:class:`peer_memory.PeerMemory` of CPU ranks."""

    folder = ""
    made = 0

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.world, self.group = group.rank(), group.size(), group
        index, FileMemory.made = FileMemory.made, FileMemory.made + 1
        ranks = dist.get_process_group_ranks(group)
        names = [str(Path(self.folder, f"{index}.{rank}")) for rank in ranks]
        for name in names:
            Path(name).touch()
            os.truncate(name, size)  # of this size already, nothing happens to it
        self.files = [np.memmap(name, np.uint8, "r+", shape=size) for name in names]

    def of(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.files[rank], dtype=dtype, count=numel, offset=start)

    def barrier(self, channel: int) -> None:
        dist.barrier(self.group)


def trained(at: Case, folder: str, memory: str = "FileMemory", change: str = "nothing") -> dict[str, Any]:
    """Losses, norms, a checksum of the parameters, the collectives of the last step.

    ``change`` is one of CHANGES or of BUILDS.
    """
    FileMemory.folder, FileMemory.made = folder, 0
    with (
        patch.object(copy_engine, "PeerMemory", globals()[memory]),
        patch.object(peer_memory, "why_not", lambda group: None),
        patch.object(
            peer_scatter.Reducer, "__init__", with_norms if change == "fused" else peer_scatter.Reducer.__init__
        ),
        patch.object(models, "build_model", BUILDS.get(change, build_model)),
    ):
        mesh = build_mesh(at.parallelism, "cpu")
        engine = BundledEngine(weight_jitter=at.weight_jitter)
        engine.build(at.model, at.training, mesh, torch.device("cpu"))
        results = []
        for step in range(at.steps):
            results.append(engine.step(batch(at, step, mesh.batch_rank, mesh.batch_size)))
            CHANGES.get(change, nothing)(engine, batch(at, step, mesh.batch_rank, mesh.batch_size))
        with CollectiveRecorder(mesh.axis_of_group) as recorder:
            results.append(engine.step(batch(at, at.steps, mesh.batch_rank, mesh.batch_size)))
        held = [p._local_tensor if hasattr(p, "_local_tensor") else p for p in engine.model.parameters()]  # type: ignore[union-attr]
        found = {
            "losses": [float(each.loss) for each in results],
            "norms": [float(each.grad_norm) for each in results],
            "parameters": [p.detach().double().sum().item() for p in held],
            "totals": totals(recorder.table()),
            "buffers": FileMemory.made,
            "siblings": siblings(engine),
        }
        engine.close()
    return found


def siblings(engine: BundledEngine) -> set[bool]:
    """Do queries', keys' and values' weights lie one after another in what computes? Of every block that has all."""
    engines = engine._copy_engines
    if engines is None or engines.shards is None:
        return set()
    matrices = [[local_tensor(leaf) for leaf in unit if leaf.ndim == 2] for unit in engines.shards.leaves]
    return {one_after_another(unit[:3]) is not None for unit in matrices if len(unit) == BLOCK_MATRICES}


def partly_frozen(*args: Any, **kwargs: Any) -> Any:
    """Embedding, a whole block and a norm are not trained, so that backward ends before the first block."""
    built = build_model(*args, **kwargs)
    for name, parameter in built.model.named_parameters():
        frozen = ("embed_tokens", "layers.0.", "layers.2.input_layernorm")
        parameter.requires_grad_(not any(part in name for part in frozen))
    return built


def mostly_frozen(*args: Any, **kwargs: Any) -> Any:
    """FSDP fetches the last frozen block ahead, for which nobody asks."""
    built = build_model(*args, **kwargs)
    for name, parameter in built.model.named_parameters():
        frozen = ("embed_tokens", *(f"layers.{index}." for index in range(4)))
        parameter.requires_grad_(not any(part in name for part in frozen))
    return built


def partly_unused(*args: Any, **kwargs: Any) -> Any:
    """A block has a layer that its forward does not use."""
    built = build_model(*args, **kwargs)
    with torch.device("meta"):
        built.model.model.layers[1].unused = torch.nn.Linear(6, 5)
    return built


BUILDS = {"frozen": partly_frozen, "mostly_frozen": mostly_frozen, "unused": partly_unused}


def broken(engine: BundledEngine, batch: Batch) -> None:
    """A further step breaks off in a block, as by an error in its code, and training goes on."""

    def fails(*_: Any) -> None:
        raise ArithmeticError("a block failed")

    blocks: Any = engine.model.model.layers  # type: ignore[union-attr]
    handle = blocks[2].mlp.register_forward_hook(fails)
    with pytest.raises(ArithmeticError, match="a block failed"):
        engine.step(batch)
    handle.remove()


def with_norms(reducer: peer_scatter.Reducer, *args: Any) -> None:
    """A reducer as ``fused`` makes it, without waiting for a compiler."""
    construct(reducer, *args)
    reducer._add_up = peer_scatter._add_up_with_norms


construct = peer_scatter.Reducer.__init__


def nothing(engine: BundledEngine, batch: Batch) -> None:
    """Steps follow each other."""


def scaled(engine: BundledEngine, batch: Batch) -> None:
    """The weights change between steps, as when a checkpoint is loaded."""
    with torch.no_grad():
        for parameter in engine.training_state()[2]:
            parameter.mul_(1.0625)


def evaluated(engine: BundledEngine, batch: Batch) -> None:
    """Everything is gathered outside of a step."""
    step = engine.stepper
    with torch.no_grad(), step.computing():
        for labels, inputs in step.micro_batches(batch):
            step.loss_sum(labels=labels, **inputs)


CHANGES = {"scaled": scaled, "evaluated": evaluated, "broken": broken}
"""What differs from plain training, or comes between its steps."""


def out_of_order(at: Case, folder: str) -> str:
    """What is said when a block is asked for while the one whose memory it has to take still computes."""
    FileMemory.folder, FileMemory.made = folder, 0
    with (
        patch.object(copy_engine, "PeerMemory", FileMemory),
        patch.object(peer_memory, "why_not", lambda group: None),
    ):
        mesh = build_mesh(at.parallelism, "cpu")
        engine = BundledEngine()
        engine.build(at.model, at.training, mesh, torch.device("cpu"))
        for step in range(at.steps):
            engine.step(batch(at, step, mesh.batch_rank, mesh.batch_size))
        blocks: Any = engine.model.model.layers  # type: ignore[union-attr]
        assert engine._copy_engines is not None
        with engine._copy_engines.step(engine._kind(batch(at, 0, mesh.batch_rank, mesh.batch_size))):
            blocks[0].unshard()
            blocks[1].unshard()
            try:
                blocks[2].unshard()
            except RuntimeError as error:
                return str(error)
    return "nothing"


class ForgetfulMemory(FileMemory):
    """Peers see the memory as it was when it was made: what was written later is not there."""

    def of(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return super().of(rank, start, numel, dtype) if rank == self.rank else torch.zeros(numel, dtype=dtype)


def on_gpu(at: Case, device: str) -> list[float]:
    """Losses and norms of a rank with a GPU of its own."""
    import os

    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    mesh = build_mesh(at.parallelism, device)
    engine = BundledEngine(weight_jitter=at.weight_jitter)
    here = torch.device(device, torch.cuda.current_device())
    engine.build(at.model, at.training, mesh, here)
    results = []
    for step in range(at.steps):
        results.append(engine.step(on_device(batch(at, step, mesh.batch_rank, mesh.batch_size), here)))
    found = [float(x) for each in results for x in (each.loss, each.grad_norm)]  # type: ignore[arg-type]
    engine.close()
    return found
