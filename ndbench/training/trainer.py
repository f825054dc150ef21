"""Training from a first step to a last on one rank: steps, evaluation, log, checkpoints, and a clean stop.

Every rank makes one :class:`Trainer` and calls ``run``. It knows nothing of how ranks are started, nor of who asks for
a stop. The random numbers and the data of a step are functions of the step alone, so that resuming repeats nothing.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ndbench.config import Config
from ndbench.engines.bundled import BundledEngine
from ndbench.engines.protocol import StepResult
from ndbench.parallel.mesh import Mesh
from ndbench.parallel.peer_memory import uncounted_bytes
from ndbench.parallel.state import CheckpointError, Checkpoints
from ndbench.parallel.state_huggingface import load_hf
from ndbench.training.data import Dataset
from ndbench.training.evaluate import evaluate
from ndbench.training.log import TrainingLog

LOG = "log.jsonl"
SETTLE_SECONDS = 1.0
"""On a GPU results are fetched this often: fetching waits for the device."""


@dataclass(frozen=True)
class Control:
    """What a trainer hears from, and tells, whoever started it."""

    stop: Callable[[], int] = lambda: 0
    """Asked before each step: above 0 (a signal's number, say) it was the last. One rank's answer is enough."""
    beat: Callable[[], None] = lambda: None
    """Called whenever something was achieved, so that a hanging run is seen."""
    agree_timeout: float = 600.0
    """Seconds that ranks wait for each other's answer."""


@dataclass(frozen=True)
class Outcome:
    step: int
    """Optimizer steps taken since the first start."""
    stopped: int = 0
    """What ``Control.stop`` answered; 0 when trained to the end."""
    validation_loss: float | None = None
    checkpoint: str | None = None
    """The newest whole checkpoint."""


class Trainer:
    """One rank of a run. ``folder`` holds the log and, with ``save``, the checkpoints; without one nothing is written.

    Raises ``ValueError`` for what the model's own plan does not allow, or a checkpoint that does not fit.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        train: Dataset,
        validation: Dataset | None = None,
        *,
        folder: Path | None = None,
        save: bool = True,
        control: Control | None = None,
    ) -> None:
        self.config, self.mesh, self.device = config, mesh, device
        self.train, self.validation, self.folder = train, validation, folder
        self.control = control or Control()
        self.step = self.sequences = 0
        self._engine = BundledEngine()
        self._engine.build(config.model, config.training, mesh, device)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._agreement = _host_group(device, self.control.agree_timeout)
        self._results: list[tuple[dict[str, Any], StepResult]] = []
        self._since = time.perf_counter()
        self._validation_loss: float | None = None
        self._checkpoints: Checkpoints | None = None
        self._data = train.identity
        if folder is not None and save:
            keep, mode = config.checkpoint.keep, config.checkpoint.mode
            self._checkpoints = Checkpoints(folder, mesh, keep=keep, mode=mode, timeout=self.control.agree_timeout)
        if config.resume is not None:
            self._resume(config.resume)
        if config.checkpoint.weights is not None and self.step == 0:
            load_hf(Path(config.checkpoint.weights).expanduser(), self.model, mesh)
        self._log = None if folder is None or self._rank else TrainingLog(folder / LOG, self.step)

    @property
    def model(self) -> torch.nn.Module:
        return self._engine.stepper.model

    def close(self) -> None:
        """Release the engine, before the process group is destroyed."""
        self._engine.close()

    def run(self) -> Outcome:
        """Train to ``training.steps``, or until a stop is asked for, which ends with a checkpoint too."""
        steps, evaluation, every = self.config.training.steps, self.config.evaluation, self.config.checkpoint.every
        saved, stopped = self.step, 0
        self._since = time.perf_counter()
        while self.step < steps:
            stopped, memory = self._agree()
            if stopped:
                break
            self._one_step(memory)
            last = self.step == steps
            due = last or (evaluation.every is not None and self.step % evaluation.every == 0)
            save = self._checkpoints is not None and (last or (every is not None and self.step % every == 0))
            if due or save or self.device.type == "cpu" or time.perf_counter() - self._since > SETTLE_SECONDS:
                lines = self._fetch()
                if due and self.validation is not None:
                    self._evaluate(lines)
                if save:
                    self._save(lines)
                    saved = self.step
                self._write(lines)
                self._since = time.perf_counter()
        lines = self._fetch()
        if self._checkpoints is not None:
            if saved < self.step:
                self._save(lines)
            self._checkpoints.wait()
        self._write(lines)
        if self._log is not None:
            self._log.close()
        newest = None if self._checkpoints is None else self._checkpoints.newest()
        return Outcome(self.step, stopped, self._validation_loss, None if newest is None else str(newest))

    def _one_step(self, memory: int) -> None:
        training, mesh = self.config.training, self.mesh
        # Dropout and the like: the ranks of a tp group compute the same thing and draw the same numbers.
        drawn = mesh.batch_rank * mesh.config.cp_size + mesh.cp.get_local_rank()
        torch.manual_seed((training.seed * 1_000_003 + self.step) * 65_537 + drawn)
        batch = self.train.batch_from(self.sequences, mesh.batch_rank, mesh.batch_size, self.device)
        result = self._engine.step(batch)
        epoch = self.sequences / self.train.sequences if self.train.sequences else None
        self.step += 1
        self.sequences += training.global_batch_size
        if self._rank == 0:
            rate = self._engine.stepper.optimizer.optimizer.param_groups[0].get("lr")
            rate = None if rate is None else float(rate)
            line = {"step": self.step, "learning_rate": rate, "memory_bytes": memory, "epoch": epoch}
            self._results.append((line, result))
        self.control.beat()

    def _agree(self) -> tuple[int, int]:
        """(stop asked for on any rank, the largest memory of a rank); every rank returns the same."""
        told = torch.tensor([self.control.stop(), _memory_bytes(self.device)], dtype=torch.int64)
        if self.mesh.config.world_size > 1:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._agreement)
        stop, memory = told.tolist()
        return stop, memory

    def _fetch(self) -> list[dict[str, Any]]:
        """Log lines of the steps since the last call, rank 0 only. Raises ``RuntimeError`` when a loss is no number."""
        lines = []
        for line, result in self._results:
            norm = None if result.grad_norm is None else float(result.grad_norm)
            tokens = None if result.tokens is None else int(result.tokens)
            lines.append({"step": line["step"], "loss": float(result.loss), "grad_norm": norm, "tokens": tokens} | line)
        self._results.clear()
        # Only now are the steps known to be done: on a GPU they share the time since the last call.
        seconds = (time.perf_counter() - self._since) / max(len(lines), 1)
        for line in lines:
            line |= {"seconds": seconds, "tokens_per_second": self.train.tokens_per_step / seconds}
        for line in lines:
            for name in ("loss", "grad_norm"):
                if line[name] is not None and not math.isfinite(line[name]):
                    self._write(lines)
                    raise RuntimeError(f"{name} is {line[name]} at step {line['step']}: nothing sound comes after it")
        return lines

    def _evaluate(self, lines: list[dict[str, Any]]) -> None:
        assert self.validation is not None, "asked for"
        began = time.perf_counter()
        loss, tokens = evaluate(
            self._engine.stepper, self.validation, self.config.evaluation.batches, self.device, self.control.beat
        )
        self._validation_loss = loss
        if lines:
            seconds = time.perf_counter() - began
            lines[-1] |= {"validation_loss": loss, "validation_tokens": tokens, "validation_seconds": seconds}

    def _save(self, lines: list[dict[str, Any]]) -> None:
        assert self._checkpoints is not None, "asked for"
        self.control.beat()
        optimizer = self._engine.stepper.optimizer
        progress = {
            "step": self.step,
            "sequences": self.sequences,
            "schedule_step": optimizer.taken,
            "seed": self.config.training.seed,
            "data": self._data,
            "config": dataclasses.asdict(self.config),
        }
        seconds = self._checkpoints.save(
            self.step, self.model, optimizer.optimizer, list(optimizer.parameters), progress
        )
        if lines:
            lines[-1]["checkpoint_seconds"] = seconds
        self.control.beat()

    def _resume(self, resume: str) -> None:
        """Go on from a checkpoint: the newest whole one for ``auto`` (a fresh start where there is none), or a path."""
        if self._checkpoints is None:
            raise ValueError(f"resume={resume} needs checkpoint.dir")
        path = self._checkpoints.newest() if resume == "auto" else Path(resume)
        if path is None:
            return
        optimizer = self._engine.stepper.optimizer
        progress = self._checkpoints.load(path, self.model, optimizer.optimizer, list(optimizer.parameters))
        self.step, self.sequences = int(progress["step"]), int(progress["sequences"])
        optimizer.taken = int(progress["schedule_step"])
        if progress["data"] != self._data:
            raise CheckpointError(
                f"{path} was trained on other data ({progress['data']}, here it is {self._data}): its position in them "
                "means nothing here"
            )

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._log is not None:
            for line in lines:
                self._log.write(line)


def _host_group(device: torch.device, timeout: float) -> dist.ProcessGroup | None:
    """A group for words between hosts: with it no step waits for a device. None is the default group, gloo on CPU."""
    if device.type == "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return group


def _memory_bytes(device: torch.device) -> int:
    """Peak of what tensors hold on an accelerator, the process's resident set on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) + uncounted_bytes()
    return int(psutil.Process().memory_info().rss)
