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


NOISE = {
    "quiet": Noise(0.003, 0.006, 0.3),
    "typical": Noise(0.01, 0.01, 0.5),
    "drift 0.5 %": Noise(0.01, 0.01, 0.5, 0.005),
    "drift 1.5 %": Noise(0.01, 0.01, 0.5, 0.015),
}
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
    def seconds(self) -> tuple[Array, Array]:
        """(head, base) as times."""
        return np.exp(self.head), np.exp(self.base)


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
        pairs = {
            name: rng.choice(draws.launches, PAIRS) - rng.choice(draws.launches, PAIRS) + shift[int(name)]
            for name in chosen
        }
        slower = confirmed({name: values.tolist() for name, values in pairs.items()}, rule)
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


def megatron(now: Array, before: Array) -> NDArray[np.bool_]:
    """Median of one run's later steps, within 5 % either way (so a speed-up fails too)."""
    run, golden = np.median(now[:, :, 0], -1), np.median(before[:, :, 0], -1)
    outside: NDArray[np.bool_] = np.abs(run - golden) > 0.05 * golden
    return outside


def asv(now: Array, before: Array) -> NDArray[np.bool_]:
    """Mann-Whitney p < 0.002 over all samples, and 10 % or more."""
    far = now.mean((2, 3)) > 1.08 * before.mean((2, 3))  # worth a median: it is the slower one to compute
    for suite, cell in zip(*np.nonzero(far), strict=True):
        a, b = now[suite, cell].ravel(), before[suite, cell].ravel()
        far[suite, cell] = np.median(a) > 1.1 * np.median(b) and stats.mannwhitneyu(a, b).pvalue < 0.002
    return far


def pyperf(now: Array, before: Array) -> NDArray[np.bool_]:
    """Student's t of pooled variance at 95 %, every value of every process a sample; slower when its mean is higher."""
    count = now.shape[2] * now.shape[3]
    error = np.sqrt((now.var((2, 3), ddof=1) + before.var((2, 3), ddof=1)) / count)
    t = (now.mean((2, 3)) - before.mean((2, 3))) / error
    slower: NDArray[np.bool_] = t > special.stdtrit(2 * count - 2, 0.975)
    return slower


def action(now: Array, before: Array) -> NDArray[np.bool_]:
    """github-action-benchmark: one value a run, alert above 200 % of the previous."""
    alert: NDArray[np.bool_] = np.median(now[:, :, 0], -1) > 2 * np.median(before[:, :, 0], -1)
    return alert


def pytest_benchmark(now: Array, before: Array) -> NDArray[np.bool_]:
    """``--benchmark-compare-fail=mean:5%``: mean of the rounds of one process."""
    fails: NDArray[np.bool_] = now[:, :, 0].mean(-1) > 1.05 * before[:, :, 0].mean(-1)
    return fails


OTHERS: dict[str, Callable[[Array, Array], NDArray[np.bool_]]] = {
    "Megatron 5 %": megatron,
    "asv": asv,
    "pyperf t-test": pyperf,
    "github-action 200 %": action,
    "pytest-benchmark mean:5%": pytest_benchmark,
}


def other_rule(rule: Callable[[Array, Array], NDArray[np.bool_]], draws: Draws, shift: Array) -> Tally:
    head, base = draws.seconds
    flagged = rule(head * np.exp(shift)[None, :, None, None], base)
    return Tally(100 * float(flagged.any(axis=1).mean()), 100 * float(flagged[:, 0].mean()))
