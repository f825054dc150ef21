"""What each rank runs in a test of checkpoints: build, step, save, load, and hand back plain numbers."""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ndbench.engines.bundled import BundledEngine
from ndbench.parallel import state
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.initialize import local_slice
from ndbench.parallel.mesh import Mesh, build_mesh
from ndbench.parallel.state import CheckpointError, Checkpoints
from ndbench.parallel.state_huggingface import export_hf, hf_config, load_hf
from tests.parity.cases import Case, batch
from tests.parity.ranks import on_device

Held = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.Tensor] | None]
"""What one rank holds of each tensor: offset (empty for a whole one), global shape, values."""


class OwnAdamW(torch.optim.AdamW):
    """Not a class of torch.optim: it is given the distributed parameters themselves."""


class Run:
    """An engine in training on this rank."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case = case
        self.mesh: Mesh = build_mesh(case.parallelism, device)
        self.device = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
        self.engine = BundledEngine(weight_jitter=case.weight_jitter)
        self.engine.build(case.model, case.training, self.mesh, self.device)
        assert self.engine.model is not None
        assert self.engine._step is not None
        self.model, self.optimizer = self.engine.model, self.engine._step.optimizer
        self.arguments = (self.model, self.optimizer.optimizer, self.optimizer.parameters)

    def steps(self, first: int, count: int) -> list[float]:
        """Train; the loss of each step."""
        losses = []
        for step in range(first, first + count):
            data = batch(self.case, step, self.mesh.batch_rank, self.mesh.batch_size)
            loss = self.engine.step(on_device(data, self.device)).loss
            assert isinstance(loss, torch.Tensor)
            losses.append(loss.item())
        return losses

    def spoil(self, value: float) -> None:
        """Every element of every parameter and moment becomes ``value``."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                local_tensor(parameter).fill_(value)
            for state in self.optimizer.optimizer.state.values():
                for each in state.values():
                    local_tensor(each).fill_(value)

    def held(self) -> Held:
        """Copies of this rank's pieces of every parameter and moment."""
        found: Held = {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        optimizer = self.optimizer.optimizer
        for own, parameter in zip(optimizer.param_groups[0]["params"], self.optimizer.parameters, strict=True):
            rows, columns = local_slice(parameter)
            offset = (rows.start, columns.start if columns is not None else 0)[: parameter.ndim]
            name, local = names[id(parameter)], local_tensor(parameter).detach()
            found[name] = (offset, tuple(parameter.shape), local.clone().cpu())
            for key, value in optimizer.state.get(own, {}).items():
                if value is None:
                    found[f"{name}/{key}"] = None
                elif local_tensor(value).shape == local.shape:
                    found[f"{name}/{key}"] = (offset, tuple(parameter.shape), local_tensor(value).clone().cpu())
                else:
                    found[f"{name}/{key}"] = ((), tuple(value.shape), value.clone().cpu())
        return found


def save(
    case: Case, folder: Path, mode: str, steps: int, evaluate: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Take ``steps``, save, and take one more."""
    run = Run(case, device)
    run.steps(0, steps)
    if evaluate:  # gathers the root's parameters, and no backward frees them again
        sequence = torch.zeros(1, case.training.sequence_length // run.mesh.config.cp_size, dtype=torch.long)
        with torch.no_grad():
            run.model(input_ids=sequence, position_ids=sequence, use_cache=False)
    checkpoints = Checkpoints(folder, run.mesh, mode=mode)
    seconds = checkpoints.save(steps, *run.arguments, {"step": steps, "next": {"document": 3}})
    held = run.held()
    losses = run.steps(steps, 1)
    checkpoints.wait()
    return {"held": held, "loss": losses, "seconds": seconds}


def load(case: Case, folder: Path, stepped: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Load into an engine in another state, and take one step."""
    run = Run(case, device)
    run.steps(0, stepped)
    run.spoil(7.0)
    checkpoints = Checkpoints(folder, run.mesh)
    newest = checkpoints.newest()
    assert newest is not None
    progress = checkpoints.load(newest, *run.arguments)
    held = run.held()
    groups = [{key: v for key, v in g.items() if key != "params"} for g in run.optimizer.optimizer.param_groups]
    return {"held": held, "progress": progress, "loss": run.steps(progress["step"], 1), "groups": groups}


def refused(case: Case, path: Path, without_optimizer: bool = False) -> tuple[str, bool]:
    """The error of loading ``path``, and whether model and optimizer are what they were."""
    run = Run(case)
    run.steps(0, 1)
    before = run.held()
    model, optimizer, parameters = run.arguments
    try:
        Checkpoints(path.parent, run.mesh).load(path, model, None if without_optimizer else optimizer, parameters)
    except CheckpointError as error:
        return str(error), same(before, run.held())
    return "loaded", same(before, run.held())


def same(one: Held, other: Held) -> bool:
    """Bitwise."""
    if one.keys() != other.keys():
        return False
    for name, mine in one.items():
        theirs = other[name]
        if mine is None or theirs is None:
            if mine is not theirs:
                return False
        elif not (mine[:2] == theirs[:2] and torch.equal(mine[2], theirs[2])):
            return False
    return True


def random_numbers(case: Case, folder: Path) -> list[tuple[list[float], list[float]]]:
    """Numbers drawn after a save, and after loading it."""
    run = Run(case)
    torch.manual_seed(run.mesh.batch_rank)
    random.seed(1 + run.mesh.batch_rank)
    np.random.seed(2 + run.mesh.batch_rank)
    checkpoints = Checkpoints(folder, run.mesh)
    checkpoints.save(1, *run.arguments, {})
    first = _draw()
    _draw()
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(newest, *run.arguments)
    return [(first, _draw())]


def _draw() -> list[float]:
    return [*torch.rand(3).tolist(), random.random(), random.gauss(0, 1), *np.random.rand(3).tolist()]


def save_with_limit(case: Case, folder: Path, mode: str, limit: int | None) -> tuple[str, list[str]]:
    """A save that works, then one in which rank 1 (``full`` and ``hf``: rank 0) may write files of ``limit`` bytes only
    (None: whatever the disk has room for). The error of the second, and what is in the folder then."""
    run = Run(case)
    run.steps(0, 1)
    checkpoints = Checkpoints(folder, run.mesh, mode=mode)
    checkpoints.save(1, *run.arguments, {"step": 1})
    checkpoints.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    victim = 0 if mode in ("full", "hf") else 1
    if limit is not None and dist.get_rank() == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    text = "saved"
    try:
        checkpoints.save(2, *run.arguments, {"step": 2})
        checkpoints.wait()
    except CheckpointError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    if limit is not None:
        checkpoints.save(3, *run.arguments, {"step": 3})
        checkpoints.wait()
    return text, left


def save_steps(case: Case, folder: Path, mode: str, keep: int, steps: list[int]) -> list[str]:
    """Save ``steps`` one after the other; the name that :meth:`Checkpoints.newest` gives after each."""
    run = Run(case)
    checkpoints = Checkpoints(folder, run.mesh, keep=keep, mode=mode)
    names = []
    for step in steps:
        checkpoints.save(step, *run.arguments, {"step": step})
        checkpoints.wait()
        newest = checkpoints.newest()
        assert newest is not None
        names.append(newest.name)
        dist.barrier()
    return names


def save_without_wait(case: Case, folder: Path, seconds: float) -> tuple[float, bool, float]:
    """An async save whose writing takes ``seconds``: how long it kept the caller, whether it was complete then, and
    the weight of its checkpoint after training went on."""
    run = Run(case)
    run.steps(0, 1)
    run.spoil(5.0)
    checkpoints = Checkpoints(folder, run.mesh, mode="async")
    write = state.write_sharded

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return write(*arguments)

    state.write_sharded = slow
    try:
        stall = checkpoints.save(1, *run.arguments, {"step": 1})
        complete = checkpoints.newest() is not None
        run.spoil(6.0)
        checkpoints.wait()
    finally:
        state.write_sharded = write
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(newest, *run.arguments)
    return stall, complete, float(next(iter(run.held().values()))[2].flatten()[0])  # type: ignore[index]


def save_for_ever(case: Case, folder: Path, mode: str) -> None:
    """Save again and again, every number being that of the step, until killed; ``begun`` appears after the first."""
    run = Run(case)
    run.steps(0, 1)
    checkpoints = Checkpoints(folder, run.mesh, mode=mode)
    for step in range(1, 10_000):
        run.spoil(float(step))
        checkpoints.save(step, *run.arguments, {"step": step})
        if step == 1:
            checkpoints.wait()
            (folder / "begun").touch()


def resume(case: Case, folder: Path) -> tuple[str, int, set[float]]:
    """What a run after a crash finds: the newest checkpoint, its step, and all numbers in it; then it saves, too."""
    run = Run(case)
    checkpoints = Checkpoints(folder, run.mesh)
    newest = checkpoints.newest()
    assert newest is not None
    progress = checkpoints.load(newest, *run.arguments)
    numbers = {number for piece in run.held().values() if piece is not None for number in piece[2].unique().tolist()}
    checkpoints.save(progress["step"] + 1, *run.arguments, progress)
    return newest.name, progress["step"], numbers


def export(case: Case, folder: Path, max_shard_bytes: int, steps: int = 1) -> tuple[Held, torch.Tensor | None]:
    """Export after ``steps``; this rank's weights, and its logits for :func:`tokens` (without cp)."""
    run = Run(case)
    run.steps(0, steps)
    export_hf(folder, run.model, hf_config(run.model), run.mesh, max_shard_bytes)
    weights = {name: piece for name, piece in run.held().items() if "/" not in name}
    logits = None
    if run.mesh.config.cp_size == 1:
        ids = tokens(case)
        positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
        with torch.no_grad():
            logits = run.model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return weights, logits


def tokens(case: Case) -> torch.Tensor:
    """Two sequences of random tokens."""
    assert case.model.vocab_size is not None
    return torch.randint(0, case.model.vocab_size, (2, 16), generator=torch.Generator().manual_seed(3))


def load_exported(case: Case, folder: Path) -> tuple[str, Held, int]:
    """The error of reading ``folder`` (or ""), this rank's weights then, and the bytes it read."""
    run = Run(case)
    run.spoil(7.0)
    text, read = "", 0
    try:
        read = load_hf(folder, run.model, run.mesh)
    except CheckpointError as error:
        text = str(error)
    return text, run.held(), read
