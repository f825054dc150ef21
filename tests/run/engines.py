"""Small engines for the tests of the harness: one that is well, and one for each way of going wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ndbench.config import Cell
from ndbench.engines.protocol import Batch, StepResult
from ndbench.parallel.mesh import Mesh


class SmallEngine:
    """An embedding and a linear layer, gradients summed by hand; ``fault`` says what goes wrong, on which rank."""

    def __init__(
        self,
        fault: str | None = None,
        at_step: int = 2,
        on_rank: int | None = 1,
        seconds: float = 0.0,
        norm_every: int = 1,
    ) -> None:
        self.fault, self.at_step, self.on_rank, self.seconds = fault, at_step, on_rank, seconds
        self.norm_every = norm_every
        self.steps = 0

    def refuse(self, cell: Cell) -> str | None:
        if self.fault == "refuse raises":
            raise KeyError("shape")
        return "this engine was told to refuse 1 cell" if self.fault == "refuse" else None

    def setup(self, cell: Cell, mesh: Mesh) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        vocab = cell.config.model.vocab_size
        assert vocab is not None
        self.model = torch.nn.Sequential(torch.nn.Embedding(vocab, 16), torch.nn.Linear(16, vocab))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if self.fault == "setup":
            raise ValueError("the 3 weights do not fit 4 ranks")

    def step(self, batch: Batch) -> StepResult:
        now = self.steps == self.at_step and self.on_rank in (self.rank, None)
        self.steps += 1
        time.sleep(self.seconds)
        if now:
            self._go_wrong()
        if self.fault == "nothing":
            return None  # type: ignore[return-value]
        if self.fault == "text":
            return StepResult("x", None, None)  # type: ignore[arg-type]
        logits = self.model(batch.input_ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        (loss / batch.labels.numel() / dist.get_world_size()).backward()
        if self.fault == "late" and self.rank == self.on_rank:
            time.sleep(0.2)  # the others wait in the collective
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.optimizer.zero_grad()
        totals = torch.tensor([float(loss.detach()), float((batch.labels != -100).sum())], dtype=torch.float64)
        dist.all_reduce(totals)
        mean = totals[0] / totals[1]
        if self.fault == "nonfinite" and self.steps > self.at_step:
            mean = mean * float("nan")
        if now and self.fault == "disagree":
            mean = mean + 1e-6
        tokens = totals[1] + (7 if self.fault == "tokens" and self.steps > self.at_step else 0)
        return StepResult(mean, None if (self.steps - 1) % self.norm_every else norm, tokens)

    def _go_wrong(self) -> None:
        if self.fault in ("killed", "hang"):
            # a helper in a session of its own, out of reach of a signal to the group
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit":
            os._exit(7)
        if self.fault == "exit 0":
            os._exit(0)
        if self.fault == "sys.exit":
            sys.exit(0)
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        if self.fault == "raise":
            raise RuntimeError("loss scale 0 at step 2")
        if self.fault == "oom":
            raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB")
        if self.fault == "hang":
            time.sleep(3600)

    def info(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def close(self) -> None:
        pass
