"""Statistics of log step times: spreads, the prediction interval, Holm, and how small an effect can be seen.

The unit is the repeat (a process launch), never the step: steps of one process share its luck, so counting them as
independent makes noise look significant. Pure functions of numbers; nothing here knows of records or cells.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

MIN_REPEATS = 3
"""Repeats of the head below which no statistical verdict is given."""
MIN_SESSIONS = 3
"""Baseline sessions below which a slowdown is a suspect, never a regression."""
SESSION_SD = 0.01
"""Standard deviation added for the difference between sessions while too few of them were seen (relative)."""
PRIOR_SESSIONS = 8
"""Degrees of freedom that the expected spread is worth beside the observed one."""


@dataclass(frozen=True)
class Estimate:
    """How much slower the head is than the baseline, in log step time, and how sure that is."""

    effect: float
    """Mean of the head's repeats minus the mean of the baseline's; above zero is slower."""
    standard_error: float
    degrees: float

    def bound(self, confidence: float) -> float:
        """One-sided upper bound of the effect."""
        return self.effect + t_quantile(confidence, self.degrees) * self.standard_error

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Two-sided interval of the effect."""
        half = t_quantile(0.5 + confidence / 2, self.degrees) * self.standard_error
        return self.effect - half, self.effect + half

    @property
    def p_slower(self) -> float:
        """Probability of a larger effect if nothing had changed. The standard error is never zero (see prior)."""
        return t_tail(self.effect / self.standard_error, self.degrees)

    @property
    def p_faster(self) -> float:
        return t_tail(-self.effect / self.standard_error, self.degrees)


@functools.lru_cache(maxsize=4096)
def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def t_tail(value: float, degrees: float) -> float:
    """Probability that Student's t is above ``value``."""
    from scipy.special import stdtr

    return float(stdtr(degrees, -value))


def variance(values: Sequence[float]) -> float:
    """Unbiased variance; 0 for a single value, whose degrees of freedom are 0 too."""
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def pooled_variance(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Variance within groups of any sizes, and its degrees of freedom (0 when every group has one value)."""
    degrees = sum(len(group) - 1 for group in groups if group)
    if degrees == 0:
        return 0.0, 0
    return math.fsum(variance(group) * (len(group) - 1) for group in groups if group) / degrees, degrees


def estimate_one_session(head: Sequence[float], sessions: Sequence[Sequence[float]]) -> Estimate | None:
    """The effect against fewer than three sessions; null when nothing tells the spread (one repeat everywhere).

    Welch's form with a pooled variance between repeats, and in quadrature the difference between sessions: 1 %, or
    what two sessions show beyond their repeats' spread if that is more.
    """
    between, degrees = pooled_variance([head, *sessions])
    if degrees == 0:
        return None
    base = [value for session in sessions for value in session]
    extra = variance([fmean(session) for session in sessions]) - between * fmean([1 / len(s) for s in sessions])
    squared = between * (1 / len(head) + 1 / len(base)) + max(SESSION_SD**2, extra)
    return Estimate(fmean(head) - fmean(base), math.sqrt(squared), degrees)


def estimate_sessions(head: Sequence[float], sessions: Sequence[Sequence[float]], session_sd: float) -> Estimate:
    """The effect against K sessions: the prediction interval for one more session mean, t * s * sqrt(1 + 1/K).

    With three sessions s alone has two degrees of freedom: by luck it is near zero, or so uncertain that a threefold
    slowdown drowns. So s^2 is a weighted mean (empirical Bayes, Smyth 2004) of the observed variance of the session
    means, K - 1 degrees of freedom, and of an expected one, :data:`PRIOR_SESSIONS` degrees: ``session_sd`` squared
    plus the measured variance between repeats over the number of repeats. Identical sessions thus keep a spread.
    """
    count = len(sessions)
    assert count >= 2, "a prediction needs sessions to differ from each other"
    means = [fmean(session) for session in sessions]
    between, _ = pooled_variance([head, *sessions])
    harmonic = fmean([1 / len(values) for values in [head, *sessions]])
    expected = session_sd**2 + between * harmonic
    degrees = PRIOR_SESSIONS + count - 1
    squared = (PRIOR_SESSIONS * expected + (count - 1) * variance(means)) / degrees
    return Estimate(fmean(head) - fmean(means), math.sqrt(squared * (1 + 1 / count)), degrees)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which hypotheses are rejected when the chance of any false rejection is at most ``alpha`` (Holm 1979)."""
    rejected = [False] * len(p_values)
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for rank, index in enumerate(order):
        if not p_values[index] <= alpha / (len(p_values) - rank):  # also stops at a NaN
            break
        rejected[index] = True
    return rejected


def holm_levels(p_values: Sequence[float], alpha: float) -> list[float]:
    """The level that :func:`holm` compares each hypothesis at: ``alpha`` over the number of those not smaller."""
    levels = [alpha] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        levels[index] = alpha / (len(p_values) - rank)
    return levels


def minimal_effect(estimate: Estimate, alpha: float, power: float = 0.9) -> float:
    """Smallest log effect that this much spread lets one see with the given power: (t_(1-a) + t_power) * se."""
    return (t_quantile(1 - alpha, estimate.degrees) + t_quantile(power, estimate.degrees)) * estimate.standard_error


def repeats_to_pass(
    head: Sequence[float], sessions: Sequence[Sequence[float]], effect: float, limit: float, most: int = 100
) -> int | None:
    """Repeats of the head that would bring the upper bound of ``effect`` under ``limit``, all else equal; or null."""
    between, _ = pooled_variance([head, *sessions])
    base = sum(len(session) for session in sessions)
    for count in range(len(head) + 1, most + 1):
        degrees = count - 1 + base - len(sessions)
        error = math.sqrt(between * (1 / count + 1 / base) + SESSION_SD**2)
        if effect + t_quantile(0.95, degrees) * error < limit:
            return count
    return None


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Interval of the mean of independent values; null for fewer than two."""
    if len(values) < 2:
        return None
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return fmean(values) - half, fmean(values) + half
