"""Suites with known truth, drawn at once with numpy, and what each rule says about them.

log time of a step = session + process + step noise (autocorrelated); a repeat is one process. Other tools' rules are
written from their documentation and get the very same draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from ndbench.compare.confirm import ConfirmRule, Decision, decide, suspects

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the log of a step's time."""

    between: float
    within: float
    correlation: float
    session: float = 0.0
    """Of each session; two sessions differ by 1.4 times as much."""


NOISE = {
    "quiet": Noise(0.003, 0.006, 0.3),
    "typical": Noise(0.01, 0.01, 0.5),
    "drift 0.5 %": Noise(0.01, 0.01, 0.5, 0.005),
    "drift 1.5 %": Noise(0.01, 0.01, 0.5, 0.015),
}
"""A drift is each session's own, of every cell by itself."""
CELLS, REPEATS, STEPS, PAIRS = 30, 5, 20, 20


@dataclass(frozen=True)
class Draws:
    """Log step times of suites in which nothing changed, [suites, cells, repeats, steps]; and spare launches."""

    base: Array
    head: Array
    launches: Array
    """Median log times of more launches with neither session nor shift: what the confirm stage measures afresh."""

    @cached_property
    def effects(self) -> Array:
        """Head minus base of every cell, in log step time, [suites, cells]."""
        effects: Array = np.median(self.head, axis=-1).mean(-1) - np.median(self.base, axis=-1).mean(-1)
        return effects

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """(head, base) as times."""
        return Side.of(np.exp(self.head)), Side.of(np.exp(self.base))


@dataclass(frozen=True)
class Side:
    """What the rules of other tools look at, [suites, cells] each; a slowdown scales all of it."""

    run_median: Array
    run_mean: Array
    """Of the first process alone: these tools start one."""
    mean: Array
    variance: Array
    """Of every step of every process."""
    steps: Array

    @classmethod
    def of(cls, seconds: Array) -> Side:
        run = seconds[:, :, 0]
        pooled = seconds.reshape(*seconds.shape[:2], -1)
        return cls(np.median(run, -1), run.mean(-1), pooled.mean(-1), pooled.var(-1, ddof=1), pooled)

    def slower(self, factor: Array) -> Side:
        """``factor``: [cells]."""
        steps = self.steps * factor[:, None] if factor.max() > 1 else self.steps
        scaled = (self.run_median * factor, self.run_mean * factor, self.mean * factor, self.variance * factor**2)
        return Side(*scaled, steps)


def draw(noise: Noise, suites: int, rng: np.random.Generator) -> Draws:
    def side() -> Array:
        shape = (suites, CELLS, REPEATS)
        fixed = rng.normal(0, noise.session, shape[:2])[..., None] + rng.normal(0, noise.between, shape)
        return fixed[..., None] + steps(shape)

    def steps(shape: tuple[int, ...]) -> Array:
        values = rng.normal(0, noise.within, (*shape, STEPS))
        fresh = math.sqrt(1 - noise.correlation**2)
        for step in range(1, STEPS):
            values[..., step] = noise.correlation * values[..., step - 1] + fresh * values[..., step]
        return values

    spare = (30_000,)
    launches = np.median(steps(spare), axis=-1) + rng.normal(0, noise.between, spare)
    return Draws(side(), side(), launches)


@dataclass
class Tally:
    """How often a rule called the suite red, and the shifted cell slower, in per cent of suites."""

    red: float
    found: float


def our_rule(draws: Draws, shift: Array, rng: np.random.Generator, rule: ConfirmRule) -> Tally:
    """The shipped screen and the shipped decision, with fresh pairs for the suspects. ``shift``: [cells], log."""
    effects = draws.effects + shift
    red = found = 0
    candidates = np.flatnonzero((effects >= math.log1p(rule.min_effect)).any(axis=1))
    for suite in candidates:
        chosen, _ = suspects({str(cell): float(effects[suite, cell]) for cell in range(CELLS)}, rule.min_effect)
        fresh = draws.launches[rng.integers(len(draws.launches), size=(2, len(chosen), PAIRS))]
        ratios = fresh[0] - fresh[1] + shift[[int(name) for name in chosen], None]
        slower = confirmed(dict(zip(chosen, ratios.tolist(), strict=True)), rule)
        red += bool(slower)
        found += "0" in slower
    suites = len(effects)
    return Tally(100 * red / suites, 100 * found / suites)


def confirmed(pairs: dict[str, list[float]], rule: ConfirmRule) -> set[str]:
    """The cells that both looks together call slower."""
    first = decide({name: values[: rule.looks[0]] for name, values in pairs.items()}, rule)
    slower = {name for name, decision in first.items() if decision.verdict == "regressed"}
    open_cells = {name: pairs[name] for name, decision in first.items() if not decision.final}
    if not open_cells:
        return slower
    second: dict[str, Decision] = decide(open_cells, rule, len(pairs) - len(slower))
    return slower | {name for name, decision in second.items() if decision.verdict == "regressed"}


def megatron(now: Side, before: Side) -> NDArray[np.bool_]:
    """Median of one run's later steps, within 5 % either way (so a speed-up fails too)."""
    outside: NDArray[np.bool_] = np.abs(now.run_median - before.run_median) > 0.05 * before.run_median
    return outside


def asv(now: Side, before: Side) -> NDArray[np.bool_]:
    """Mann-Whitney p < 0.002 over all samples, and 10 % or more."""
    far = now.mean > 1.08 * before.mean  # worth a median: it is the slower one to compute
    for suite, cell in zip(*np.nonzero(far), strict=True):
        a, b = now.steps[suite, cell], before.steps[suite, cell]
        far[suite, cell] = np.median(a) > 1.1 * np.median(b) and stats.mannwhitneyu(a, b).pvalue < 0.002
    return far


def pyperf(now: Side, before: Side) -> NDArray[np.bool_]:
    """Student's t of pooled variance at 95 %, every value of every process a sample; slower when its mean is higher."""
    count = now.steps.shape[-1]
    t = (now.mean - before.mean) / np.sqrt((now.variance + before.variance) / count)
    slower: NDArray[np.bool_] = t > special.stdtrit(2 * count - 2, 0.975)
    return slower


def action(now: Side, before: Side) -> NDArray[np.bool_]:
    """github-action-benchmark: one value a run, alert above 200 % of the previous."""
    alert: NDArray[np.bool_] = now.run_median > 2 * before.run_median
    return alert


def pytest_benchmark(now: Side, before: Side) -> NDArray[np.bool_]:
    """``--benchmark-compare-fail=mean:5%``: mean of the rounds of one process."""
    fails: NDArray[np.bool_] = now.run_mean > 1.05 * before.run_mean
    return fails


Rule = Callable[[Side, Side], NDArray[np.bool_]]
OTHERS: dict[str, Rule] = {
    "Megatron 5 %": megatron,
    "asv": asv,
    "pyperf t-test": pyperf,
    "github-action 200 %": action,
    "pytest-benchmark mean:5%": pytest_benchmark,
}


def other_rules(draws: Draws, shift: Array) -> dict[str, Tally]:
    """What each of the others says about the same suites."""
    head, base = draws.sides
    slower = head.slower(np.exp(shift))
    flagged = {name: rule(slower, base) for name, rule in OTHERS.items()}
    return {
        name: Tally(100 * float(flags.any(axis=1).mean()), 100 * float(flags[:, 0].mean()))
        for name, flags in flagged.items()
    }
