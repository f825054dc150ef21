"""The learning rate of an optimizer step, as a factor of ``training.learning_rate``: arithmetic of the step's index.

The index counts optimizer steps: the schedule is the same for every layout and every number of micro-steps. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

SCHEDULES = ("constant", "linear", "cosine", "wsd")
"""After the warm-up: stay, fall along a line or half a cosine wave, or stay and fall along a line at the end."""

WSD_DECAY = 0.2
"""Part of the steps in which ``wsd`` (warm-up, stable, decay; arXiv:2404.06395) falls, when ``decay_steps`` is null."""


class Schedule(Protocol):
    """What the arithmetic reads of a training configuration."""

    @property
    def steps(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int | None: ...
    @property
    def min_learning_rate_ratio(self) -> float: ...


def decay_length(schedule: Schedule) -> int:
    """Steps at the end in which the rate falls."""
    if schedule.decay_steps is not None:
        return schedule.decay_steps
    after_warmup = max(schedule.steps - schedule.warmup_steps, 0)
    return min(math.ceil(WSD_DECAY * schedule.steps), after_warmup) if schedule.schedule == "wsd" else after_warmup


def learning_rate_factor(schedule: Schedule, step: int) -> float:
    """Factor of optimizer step ``step`` (from 0).

    Warm-up of w steps: (step + 1) / w, so that the first step is not wasted. Decay of d steps up to ``steps``: from 1
    towards ``min_learning_rate_ratio`` by progress (step - (steps - d)) / d; after ``steps`` it stays at that ratio.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    length = decay_length(schedule)
    begin = schedule.steps - length
    if schedule.schedule == "constant" or step < begin:
        return 1.0
    progress = min((step - begin) / length, 1.0) if length else 1.0
    height = (1 + math.cos(math.pi * progress)) / 2 if schedule.schedule == "cosine" else 1 - progress
    lowest = schedule.min_learning_rate_ratio
    return lowest + (1 - lowest) * height


def schedule_factors(schedule: Schedule) -> Callable[[int], float]:
    """:func:`learning_rate_factor` of one configuration."""
    return lambda step: learning_rate_factor(schedule, step)


def refuse_schedule(schedule: Schedule) -> list[str]:
    """What is wrong with the configuration, one line each with the numbers."""
    reasons = []
    steps, warmup, decay = schedule.steps, schedule.warmup_steps, schedule.decay_steps
    if schedule.schedule not in SCHEDULES:
        reasons.append(f"schedule '{schedule.schedule}' is not known; known: {', '.join(SCHEDULES)}")
    if warmup < 0:
        reasons.append(f"warmup_steps is {warmup}, it must be at least 0")
    if decay is not None and (decay < 0 or decay + max(warmup, 0) > steps):
        reasons.append(f"warmup_steps {warmup} and decay_steps {decay} do not fit into {steps} steps")
    if not 0 <= schedule.min_learning_rate_ratio <= 1:
        reasons.append(f"min_learning_rate_ratio is {schedule.min_learning_rate_ratio}, it must be from 0 to 1")
    return reasons
