"""Checkpoints of a training run: model, optimizer, random numbers and progress, in any layout and into any other.

A checkpoint is a folder of safetensors files and JSON. It is written under a hidden name, gets a marker when all ranks'
parts are on the disk, and is renamed then: a crash at any moment leaves the checkpoints that were whole. Background
writing needs no collective: rank 0 sees the other ranks' parts appear in the folder, which all of them share.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ndbench.parallel.mesh import Mesh
from ndbench.parallel.state_files import DTYPE_NAMES, CheckpointError, blocks, check_block, names_file, remove
from ndbench.parallel.state_gather import agree, together
from ndbench.parallel.state_huggingface import hf_config, write_hf
from ndbench.parallel.state_index import INDEX, Index, read_index, whole_checkpoints
from ndbench.parallel.state_optimizer import OptimizerState
from ndbench.parallel.state_pieces import Piece, elect, model_pieces, reshard
from ndbench.parallel.state_random import prepare_random_states, random_states
from ndbench.parallel.state_read import Slices
from ndbench.parallel.state_write import (
    Background,
    Part,
    announce,
    complete,
    remove_left_overs,
    wait_for,
    write_full,
    write_sharded,
)

MODES = ("sharded", "async", "full", "hf")

__all__ = ["MODES", "CheckpointError", "Checkpoints"]


class Checkpoints:
    """The checkpoints in ``folder``, which all ranks share. ``keep`` of them stay, the newest ones.

    ``mode``: ``sharded`` (each rank writes a part), ``async`` (the same, while training goes on), ``full`` (rank 0
    writes whole tensors) or ``hf`` (the model as Hugging Face files, the rest sharded). Any of them is loaded by any.
    ``timeout`` limits, in seconds, how long ranks wait for each other's parts.
    """

    def __init__(
        self, folder: Path, mesh: Mesh, *, keep: int = 2, mode: str = "sharded", timeout: float = 1800.0
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"checkpoint mode '{mode}' is not known; known: {', '.join(MODES)}")
        if keep < 1:
            raise ValueError(f"checkpoints to keep is {keep}, it must be at least 1")
        self.folder, self.mesh, self.keep, self.mode, self.timeout = folder, mesh, keep, mode, timeout
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._background: Background | None = None
        self._buffers: dict[str, torch.Tensor] = {}

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        parameters: Sequence[nn.Parameter],
        progress: dict[str, Any],
    ) -> float:
        """Write a checkpoint of ``step``; returns the seconds that the caller was kept. Collective.

        ``parameters`` are the model's own, in the order of the optimizer's. ``progress`` is JSON. Raises
        :class:`CheckpointError` on every rank when any rank fails; what was whole before stays so. With ``async`` the
        error of a save is raised by the next :meth:`save` or :meth:`wait`.
        """
        began = time.perf_counter()
        self.wait()
        reshard(model)
        rest, pieces, values = together(lambda: self._capture(step, model, optimizer, parameters, progress))
        config = together(lambda: hf_config(model)) if self.mode == "hf" else {}
        draft = self.folder / f".step-{step:08d}.tmp"
        together(lambda: self._begin(draft))
        part: Part = {"values": values, "random": random_states(self.mesh.device_type)}
        finish = functools.partial(complete, draft, rest, self.world_size, self.keep) if self.rank == 0 else None
        if self.mode == "async":
            mine = self._stage(elect(pieces.values(), self.rank, spread=True))
            write = functools.partial(self._write_part, draft, part, lambda: write_sharded(draft, mine, self.rank))
            self._background = Background(draft, write, finish, self.timeout)
            return time.perf_counter() - began
        try:
            together(lambda: self._write_part(draft, part, lambda: self._written(draft, model, pieces, config)))
            together(lambda: self._finish_now(finish))
        except CheckpointError:
            self._give_up(draft)
            raise
        return time.perf_counter() - began

    def wait(self) -> None:
        """Until a save in the background is complete; raises its error, on every rank. Collective."""
        background, self._background = self._background, None
        if background is None:
            return
        try:
            agree(background.written())
            agree(background.finished())
        except Exception:
            background.cancel()
            self._give_up(background.draft)
            raise

    def newest(self) -> Path | None:
        """The checkpoint that was completed last, or None."""
        found = whole_checkpoints(self.folder)
        return found[-1][1] if found else None

    def load(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        parameters: Sequence[nn.Parameter],
    ) -> dict[str, Any]:
        """Fill model and optimizer (None: leave it out) from ``path``; returns its progress. Collective.

        All bytes are checked first, each by one rank, and nothing is changed when any is not right: then a
        :class:`CheckpointError` names the file. Random numbers go on as they were in the same layout only.
        """
        self.wait()
        reshard(model)
        index = together(lambda: read_index(path))
        pieces = model_pieces(model, self.world_size)
        state = together(lambda: self._match(index, model, pieces, optimizer, parameters))
        restore_random = together(lambda: self._random(index))
        slices = Slices(path, index.tensors)
        try:
            together(lambda: self._check_files(index, slices))
            together(lambda: self._read(index, pieces, state, slices))
            restore_random()
        finally:
            slices.close()
        progress: dict[str, Any] = index.rest["progress"]
        return progress

    # Writing

    def _capture(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        parameters: Sequence[nn.Parameter],
        progress: dict[str, Any],
    ) -> tuple[dict[str, Any], dict[str, Piece], dict[str, Any]]:
        try:
            json.dumps(progress, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"progress at step {step} cannot be written as JSON: {error}") from error
        pieces = model_pieces(model, self.world_size)
        values: dict[str, Any] = {}
        described: dict[str, Any] = {
            "step": step,
            "mode": self.mode,
            "degrees": self.mesh.config.sizes,
            "optimizer": None,
            "progress": progress,
        }
        if optimizer is not None:
            names = {id(p): name for name, p in model.named_parameters()}
            state = OptimizerState(optimizer, parameters, names, self.world_size)
            of_optimizer, values = state.pieces()
            pieces |= {piece.entry.name: piece for piece in of_optimizer}
            described["optimizer"] = state.description
        unknown = [piece.entry for piece in pieces.values() if piece.entry.dtype not in DTYPE_NAMES]
        if unknown:
            raise CheckpointError(f"{unknown[0].name} is {unknown[0].dtype}, which safetensors cannot hold")
        return described, pieces, values

    def _begin(self, draft: Path) -> None:
        if self.rank != 0:
            return
        with names_file(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        remove_left_overs(self.folder)
        with names_file(draft):
            draft.mkdir()

    def _stage(self, pieces: list[Piece]) -> list[Piece]:
        """Copies on the host, in buffers that serve every save; training may change the originals then."""
        staged = []
        for piece in pieces:
            buffer = self._buffers.get(piece.entry.name)
            if buffer is None or (buffer.shape, buffer.dtype) != (piece.tensor.shape, piece.tensor.dtype):
                pin = piece.tensor.device.type == "cuda"
                buffer = torch.empty_like(piece.tensor, device="cpu", pin_memory=pin, requires_grad=False)
                self._buffers[piece.entry.name] = buffer
            buffer.copy_(piece.tensor, non_blocking=True)
            staged.append(Piece(piece.entry, piece.shape, buffer, piece.holders))
        if self.mesh.device_type != "cpu":
            torch.cuda.synchronize()
        return staged

    def _written(self, draft: Path, model: nn.Module, pieces: dict[str, Piece], config: dict[str, Any]) -> Part:
        device = torch.device(self.mesh.device_type)
        if self.mode == "full":
            return write_full(draft, list(pieces.values()), device)
        part: Part = {"files": {}, "tensors": {}}
        if self.mode == "hf":
            part = write_hf(draft, model, config, self.mesh)
            pieces = {name: piece for name, piece in pieces.items() if name.startswith("optimizer/")}
        own = write_sharded(draft, elect(pieces.values(), self.rank, spread=True), self.rank)
        return {key: part[key] | own[key] for key in part}

    def _write_part(self, draft: Path, part: Part, write: Callable[[], Part]) -> None:
        announce(draft, part | write(), self.rank)

    def _finish_now(self, finish: Callable[[Callable[[Path], None]], None] | None) -> None:
        if finish is not None:
            finish(lambda path: wait_for(path, self.timeout, threading.Event()))

    def _give_up(self, draft: Path) -> None:
        dist.barrier()  # nobody writes into it any more
        if self.rank == 0 and draft.is_dir():
            with contextlib.suppress(CheckpointError):
                remove(draft)

    # Reading

    def _match(
        self,
        index: Index,
        model: nn.Module,
        pieces: dict[str, Piece],
        optimizer: torch.optim.Optimizer | None,
        parameters: Sequence[nn.Parameter],
    ) -> OptimizerState | None:
        saved = {name: stored for name, stored in index.tensors.items() if not name.startswith("optimizer/")}
        surplus, missing = sorted(saved.keys() - pieces.keys()), sorted(pieces.keys() - saved.keys())
        here = {name: (piece.entry.dtype, list(piece.shape)) for name, piece in pieces.items()}
        there = {name: (stored.dtype, list(stored.shape)) for name, stored in saved.items()}
        differing = [
            f"{name} is {there[name][0]} {there[name][1]} there, {dtype} {shape} here"
            for name, (dtype, shape) in here.items()
            if name in there and there[name] != (dtype, shape)
        ]
        reasons = [f"{len(surplus)} of its tensors are not this model's ({surplus[0]})"] if surplus else []
        reasons += [f"it lacks {len(missing)} of this model's ({missing[0]})"] if missing else []
        reasons += [f"{len(differing)} differ ({differing[0]})"] if differing else []
        if reasons:
            raise CheckpointError(f"{index.folder} is a checkpoint of another model: {'; '.join(reasons)}")
        if optimizer is None:
            return None
        if index.rest["optimizer"] is None:
            raise CheckpointError(f"{index.folder} has no optimizer state")
        names = {id(p): name for name, p in model.named_parameters()}
        state = OptimizerState(optimizer, parameters, names, self.world_size)
        if reason := state.refuse(index.rest["optimizer"]):
            raise CheckpointError(f"{index.folder} cannot be resumed: {reason}")
        return state

    def _random(self, index: Index) -> Callable[[], None]:
        if index.rest["degrees"] != self.mesh.config.sizes:
            return lambda: None
        try:
            return prepare_random_states(index.rest["random"][self.rank], self.mesh.device_type)
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{index.folder / INDEX} has no states of random numbers: {error}") from error

    def _check_files(self, index: Index, slices: Slices) -> None:
        """This rank's share of all blocks of all files, and of the files' headers."""
        every = [(name, block) for name, record in sorted(index.files.items()) for block in blocks(record)]
        for name, block in every[self.rank :: self.world_size]:
            check_block(index.folder / name, index.files[name], block)
        for name in sorted({file for stored in index.tensors.values() for file, _, _ in stored.pieces})[
            self.rank :: self.world_size
        ]:
            slices.check(name)

    def _read(self, index: Index, pieces: dict[str, Piece], state: OptimizerState | None, slices: Slices) -> None:
        for piece in pieces.values():
            slices.read(piece)
        if state is not None:
            shapes = {name: (stored.shape, stored.dtype) for name, stored in index.tensors.items()}
            state.restore(index.rest["optimizer"], index.rest["values"], shapes, slices.read)
