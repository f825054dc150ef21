"""When a step began and ended, which steps count, and the planted slowdown that tests the gate.

Knows nothing of models or engines. On CUDA a step is bounded by events on the current stream, so that nothing waits
inside the measured window; on CPU by ``perf_counter``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class StepClock:
    """Step times of one rank. ``start()``, then ``tick()`` after every step, then ``seconds()`` once at the end."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        """Begin at a step boundary; forgets what was measured before."""
        self._marks = []
        self.tick()

    def tick(self) -> None:
        """Mark a step boundary. Never waits for the device."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        from ndbench.measure._torch_private import cuda_event

        self._marks.append(cuda_event())

    def seconds(self) -> list[float]:
        """Seconds of each step so far, [steps]. On CUDA waits once for the last boundary.

        Raises ``RuntimeError`` for a clock that stands still or goes back, as one does that the measured code replaced.
        """
        if len(self._marks) < 2:
            return []
        pairs = pairwise(self._marks)
        if not self._cuda:
            taken = [after - before for before, after in pairs]
            if min(taken) <= 0:
                raise RuntimeError(f"step {taken.index(min(taken))} took {min(taken)} s by time.perf_counter")
            return taken
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Step time of the job, [steps]: for each step the largest over ranks (``per_rank``: [ranks][steps]).

    Raises ``ValueError`` when the ranks took different numbers of steps, or there is no rank.
    """
    if not per_rank:
        raise ValueError("no rank reported step times")
    counts = [len(seconds) for seconds in per_rank]
    if len(set(counts)) > 1:
        listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise ValueError(f"ranks report different numbers of steps ({listed})")
    return [max(step) for step in zip(*per_rank, strict=True)]


def throughput(tokens_per_step: float, seconds: float | Sequence[float]) -> float:
    """Tokens/s: *unique* tokens of the global batch over the step time (of several timed steps: their median).

    ``tokens_per_step`` counts each position of the global batch once, however many ranks of a tp x cp group hold it,
    so the number does not depend on tp or cp. Raises ``ValueError`` when ``seconds`` is not positive.
    """
    step = float(seconds) if isinstance(seconds, (int, float)) else step_seconds(seconds, first=0)
    if not step > 0:
        raise ValueError(f"step time must be positive, got {step}")
    return tokens_per_step / step


def step_seconds(seconds: Sequence[float], first: int) -> float:
    """The step time of a repeat: median over the timed steps, ``seconds[first:]``."""
    timed = seconds[first:]
    if not timed:
        raise ValueError(f"no timed step: {len(seconds)} steps, first timed step {first}")
    return median(timed)


STEADY_RELATIVE = 0.05
"""Steps within 5 % of the later ones are steady, whatever the noise."""
STEADY_SIGMAS = 4.0
"""... and so are steps within 4 standard deviations of the step-to-step noise."""
DRIFT_MIN_STEPS = 4
"""Fewer timed steps than this cannot be judged to drift."""


@dataclass(frozen=True)
class Steady:
    """Where the timed window begins."""

    first: int
    """Index of the first timed step = number of dropped steps."""
    steady: bool
    """False when the step time still drifted over the timed steps although half of all steps were dropped."""
    drift: float
    """Relative change of the median step time from the first to the second half of the timed steps."""


def steady_from(seconds: Sequence[float], warmup: int | None = None) -> Steady:
    """Where warm-up ends: the first step that is like the steps after it, over a window without drift.

    At least one step is dropped and at most half of them. A step is like the later ones when it differs from their
    median by less than ``STEADY_RELATIVE`` or ``STEADY_SIGMAS`` times the noise; a window drifts when the medians of
    its two halves differ by more than that (the noise of the difference of two medians). The noise is taken from
    successive differences, which a slow drift does not inflate; medians keep one spike from deciding anything.

    ``warmup`` drops exactly that many steps. Raises ``ValueError`` when this leaves no timed step.
    """
    count = len(seconds)
    if count == 0:
        raise ValueError("no steps were measured")
    if warmup is not None:
        if not 0 <= warmup < count:
            raise ValueError(f"warm-up of {warmup} steps leaves no timed step out of {count}")
        return Steady(warmup, not _drifts(seconds[warmup:]), _drift(seconds[warmup:]))
    cap = count // 2
    for first in range(min(1, cap), cap + 1):
        timed = seconds[first:]
        if _begins_like_the_rest(timed) and not _drifts(timed):
            return Steady(first, True, _drift(timed))
    return Steady(cap, not _drifts(seconds[cap:]), _drift(seconds[cap:]))


def _noise(seconds: Sequence[float]) -> float:
    """Robust standard deviation of one step time from successive differences (their median is 0.954 sd)."""
    steps = [abs(after - before) for before, after in pairwise(seconds)]
    return median(steps) / 0.954 if steps else 0.0


def _begins_like_the_rest(timed: Sequence[float]) -> bool:
    if len(timed) < 2:
        return True
    rest = median(timed[1:])
    return bool(abs(timed[0] - rest) <= max(STEADY_RELATIVE * rest, STEADY_SIGMAS * _noise(timed[1:])))


def _drift(timed: Sequence[float]) -> float:
    half = len(timed) // 2
    if half == 0:
        return 0.0
    return median(timed[-half:]) / median(timed[:half]) - 1.0


def _drifts(timed: Sequence[float]) -> bool:
    if len(timed) < DRIFT_MIN_STEPS:
        return False
    half = len(timed) // 2
    # A median of n values has 1.25 sd / sqrt(n); the difference of two has sqrt(2) times that.
    noise = _noise(timed) / median(timed) * 1.25 * sqrt(2 / half)
    return abs(_drift(timed)) > max(STEADY_RELATIVE, STEADY_SIGMAS * noise)


_cycles_per_second: dict[int, float] = {}


def burn(seconds: float, device: torch.device | str) -> None:
    """Keep the device busy for ``seconds``: CPU work on the host, or a busy kernel queued on the current stream.

    On CUDA nothing waits: a sleep of the host would hide behind queued work. The kernel's clock is calibrated once a
    device by a 10 ms kernel (this first call waits); the clock moves with load, so the time is right to a tenth or so.
    """
    import torch

    device = torch.device(device)
    if seconds <= 0:
        return
    if device.type != "cuda":
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return
    from ndbench.measure._torch_private import busy_kernel

    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _cycles_per_second:
        _cycles_per_second[index] = _calibrate()
    busy_kernel(int(seconds * _cycles_per_second[index]))


def _calibrate() -> float:
    from ndbench.measure._torch_private import busy_kernel, cuda_event

    cycles = 20_000_000
    busy_kernel(cycles)  # the clock rises under load; measure after it has
    before = cuda_event()
    busy_kernel(cycles)
    after = cuda_event()
    after.synchronize()
    return cycles / (float(before.elapsed_time(after)) / 1e3)


class Handicap:
    """Planted slowdown: after each step burn ``factor`` times the step's own time again.

    Create it at a step boundary and call ``after_step()`` before the clock's tick. On CUDA a step's own time is only
    known once it has run, so the burn follows the *previous* step's events (the first step waits for its own). On a GPU
    at its power limit the burn draws little power, so that the step beside it runs faster than it would alone.

    ``fence`` is called after each burn and must make the ranks wait for each other (a small all-reduce). Without it a
    rank's own time holds the wait for another rank's longer burn, is burnt again, and the slowdown grows step by step.
    """

    def __init__(self, factor: float, device: torch.device | str, fence: Callable[[], object] = lambda: None) -> None:
        if factor < 0:
            raise ValueError(f"measure.handicap must not be negative, got {factor}")
        self.factor = factor
        self._fence = fence
        self._device = device
        self._cuda = str(device).startswith("cuda")
        self._began: Any = self._mark() if factor else None
        self._previous: tuple[Any, Any] | None = None

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        from ndbench.measure._torch_private import cuda_event

        return cuda_event()

    def after_step(self, seconds: float | None = None) -> None:
        """Burn for the step that just ended; ``seconds`` is its own time when the caller knows it."""
        if not self.factor:
            return
        ended = self._mark()
        if seconds is None:
            if self._cuda:
                before, after = self._previous or (self._began, ended)
                self._previous = (self._began, ended)
                after.synchronize()
                seconds = before.elapsed_time(after) / 1e3
            else:
                seconds = ended - self._began
        burn(self.factor * seconds, self._device)
        self._fence()
        self._began = self._mark()
