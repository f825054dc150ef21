"""The whole training step as a CUDA graph: captured once a shape, then queued by the host in a single call.

What the host decides anew at each step reaches the device in tensors: the batch here, the learning rate in
``optimizer.py``. Results are copied out, so that the next replay does not change them. It knows nothing of layouts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ndbench.engines.protocol import Batch, StepResult
from ndbench.parallel._torch_private import local_tensor, watched
from ndbench.training.step import Step

WARM_UP_STEPS = 3
"""Steps of a shape before its capture. They compile, tune, connect the ranks and make the optimizer's state."""
MAX_SHAPES = 4
"""Each shape has a graph of its own; steps of further shapes are taken without."""

Shape = tuple[tuple[int, ...] | None, ...]


class Recorder(Protocol):
    """Turns work on the device into something that can be repeated."""

    def warm_up(self, work: Callable[[], StepResult], last: bool) -> tuple[StepResult, str | None]:
        """Do ``work`` where it will be captured; the ``last`` time also why it cannot be, as far as that shows."""

    def capture(self, work: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
        """Where the results of ``work`` will be, and what does it. Nothing is done yet; raises whatever is wrong."""

    def release(self, wait: bool) -> None:
        """Forget all captures and free their memory; without ``wait``, even while the device may be in one."""


@dataclass(frozen=True)
class Captured:
    batch: Batch
    """What the graph reads."""
    result: StepResult
    """What it writes."""
    replay: Callable[[], None]


class GraphedStep:
    """Takes the steps of ``step`` by replaying them; the first ones of each shape, which are steps too, without.

    When a capture fails, all later steps are taken without and :attr:`reason` says why; with ``required`` a
    ``RuntimeError`` does. Collective: all ranks come to the same answer.
    """

    def __init__(self, step: Step, recorder: Recorder, required: bool) -> None:
        self.step, self.required = step, required
        self.reason: str | None = None
        self.captures = self.replays = 0
        self._recorder = recorder
        self._warm: dict[Shape, int] = {}
        self._captured: dict[Shape, Captured] = {}
        self._fixed: _Fixed | None = None

    def __call__(self, batch: Batch) -> StepResult:
        if watched():
            # To who looks at single operations a replay shows none. The graph's memory is needed for them.
            self.release()
            return self.step(batch)
        shape = _shape(batch)
        if self.reason is not None or (shape not in self._warm and len(self._warm) == MAX_SHAPES):
            return self.step(batch)
        if self._fixed is not None and not self._fixed.holds():
            self.release()
        if (taken := self._warm.get(shape, 0)) < WARM_UP_STEPS:
            self._warm[shape] = taken + 1
            return self._warm_up(batch, last=taken + 1 == WARM_UP_STEPS)
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._capture(shape, batch)
            if captured is None:
                return self.step(batch)
        else:
            for held, new in zip(_tensors(captured.batch), _tensors(batch), strict=True):
                held.copy_(new)
        self.step.optimizer.advance()
        self.step.optimizer.prepare_replay()
        captured.replay()
        self.step.optimizer.replayed()
        self.replays += 1
        return _copied(captured.result)

    def release(self, wait: bool = True) -> None:
        """Forget what was captured; the next step is captured anew. Without ``wait`` for the end of the process."""
        if self._captured:
            self._captured.clear()
            self._fixed = None
            self._recorder.release(wait)

    def facts(self) -> dict[str, Any]:
        """For the record: ``reason`` is why steps are taken without, null when they are not."""
        return {"captures": self.captures, "replays": self.replays, "reason": self.reason}

    def _warm_up(self, batch: Batch, last: bool) -> StepResult:
        result, problem = self._recorder.warm_up(lambda: self.step(batch), last)
        if last:
            self._settle(problem)
        return result

    def _capture(self, shape: Shape, batch: Batch) -> Captured | None:
        captured, problem = None, None
        held = _cloned(batch)
        self.step.optimizer.prepare_capture()
        try:
            result, replay = self._recorder.capture(lambda: self.step.on_device(held))
            captured = Captured(held, result, replay)
        except Exception as error:  # whatever the model's code makes of being captured
            if self.required and isinstance(error, torch.OutOfMemoryError):
                raise
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self.step.optimizer.abandon()
        if not self._settle(problem) or captured is None:
            return None
        self._captured[shape] = captured
        self._fixed = _Fixed(self.step)
        self.captures += 1
        return captured

    def _settle(self, problem: str | None) -> bool:
        """Does it go on with graphs? All ranks do, or none."""
        if _on_any_rank(problem is not None, self.step.gradients.device):
            self.reason = problem or "another rank cannot be captured"
            # What this rank has just captured is in no table yet.
            self._captured.clear()
            self._fixed = None
            self._recorder.release(True)
            self.step.optimizer.abandon()
            if self.required:
                raise RuntimeError(f"training.cuda_graphs=true: the step cannot be captured: {self.reason}")
        return self.reason is None


class _Fixed:
    """What is fixed in a graph: the memory of parameters and optimizer state, and the numbers of the optimizer."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._numbers = self._read()
        self._state = [weakref.ref(tensor) for tensor in step.optimizer.state_tensors()]

    def holds(self) -> bool:
        # By identity: an address may come back, on one rank and not on the other.
        state = self._step.optimizer.state_tensors()
        same = len(state) == len(self._state) and all(
            held() is now for held, now in zip(self._state, state, strict=True)
        )
        return same and self._read() == self._numbers

    def _read(self) -> tuple[Any, ...]:
        optimizer = self._step.optimizer
        options = [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            for group in optimizer.optimizer.param_groups
        ]
        addresses = [local_tensor(parameter.data).data_ptr() for parameter in optimizer.parameters]
        return addresses, options, self._step.model.training


def _on_any_rank(problem: bool, device: torch.device | None) -> bool:
    """Waits for the device; asked twice a shape."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return problem
    told = torch.full((), int(problem), device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())


def _tensors(batch: Batch) -> list[torch.Tensor]:
    every = (batch.input_ids, batch.labels, batch.position_ids, batch.document_ids)
    return [tensor for tensor in every if tensor is not None]


def _shape(batch: Batch) -> Shape:
    documents = None if batch.document_ids is None else tuple(batch.document_ids.shape)
    return tuple(batch.input_ids.shape), tuple(batch.labels.shape), tuple(batch.position_ids.shape), documents


def _cloned(batch: Batch) -> Batch:
    documents = None if batch.document_ids is None else batch.document_ids.clone()
    return Batch(batch.input_ids.clone(), batch.labels.clone(), batch.position_ids.clone(), documents)


def _copied(result: StepResult) -> StepResult:
    return StepResult(loss=_copy(result.loss), grad_norm=_copy(result.grad_norm), tokens=_copy(result.tokens))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
