"""The two-stage rule: a screen that names suspects and decides nothing, and a confirm stage of fresh pairs that does.

The unit is the pair: base and head measured next to each other, as the log of head time over base time. Two fixed
looks, each with half of alpha, Holm over the confirmed cells at each. Pure functions of numbers; runs nothing.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ndbench.compare.statistics import holm, holm_levels, t_quantile, t_tail, variance
from ndbench.counted import counted

LAUNCH_LOOKS = (10, 20)
"""Pairs of process launches after which the confirm stage decides."""
TURN_LOOKS = (6, 12)
"""Residencies (both sides' ranks at once, taking turns) after which it does: each is some hundred turns."""
MOST_SUSPECTS = 8
"""Suspects that are confirmed; the others stay inconclusive, so that a slow machine cannot make a run endless. Where
sessions differ by 0.5 % each, about five of thirty unchanged cells are suspects by chance: with room for five alone, a
cell that is 3 % slower is crowded out too often."""
PASS_CONFIDENCE = 0.95

DECISIONS = ("regressed", "improved", "pass", "inconclusive")


@dataclass(frozen=True)
class ConfirmRule:
    """``gate.*`` with its defaults filled in."""

    min_effect: float
    """Relative slowdown below which nothing is a regression."""
    resolve: float
    """A cell passes when the upper bound of its slowdown is below this."""
    alpha: float = 0.01
    """Chance of any false alarm over all confirmed cells and both looks."""
    looks: tuple[int, int] = LAUNCH_LOOKS


@dataclass(frozen=True)
class Decision:
    """What the pairs of one cell and one quantity (wall time, CPU seconds) say at a look."""

    verdict: str
    """One of :data:`DECISIONS`; null-like ``go on`` is told by :attr:`final`."""
    final: bool
    """False when more pairs may still change it."""
    reason: str
    pairs: int
    effect: float
    """Mean log ratio of the pairs; above zero is slower. The reported effect is this alone."""
    low: float
    high: float
    """95 % interval of the effect; infinite for a single pair."""
    p_slower: float
    minimal_effect: float
    """Smallest log effect that this spread and this number of pairs show in nine of ten cases."""
    enough: int | None = None
    """Pairs that would settle an inconclusive cell, when some number would."""


def suspects(effects: Mapping[str, float], min_effect: float, most: int = MOST_SUSPECTS) -> tuple[list[str], list[str]]:
    """(the ``most`` largest slowdowns of at least ``min_effect``, the other such cells), each by size.

    ``effects``: log step time of the head minus that of the baseline. No test and no correction here: a screen that
    must find 2 % in noise of 1 % cannot also have few false alarms; the confirm stage has.
    """
    least = math.log1p(min_effect)
    found = sorted((name for name, effect in effects.items() if effect >= least), key=lambda name: -effects[name])
    return found[:most], found[most:]


def p_slower(ratios: Sequence[float]) -> float:
    """One-sided p of a paired t-test that the mean log ratio is above zero.

    Pairs without any spread are decided by their value: 0 when all are the same amount slower, 1 when not slower. One
    pair tells no spread: 1. Raises ``ValueError`` for a ratio that is not finite; a failed pair is no pair.
    """
    return _p_values(ratios)[0]


def _p_values(ratios: Sequence[float]) -> tuple[float, float]:
    """One-sided p of slower and of faster."""
    _refuse_nonfinite(ratios)
    if len(ratios) < 2:
        return 1.0, 1.0
    mean, spread = fmean(ratios), variance(ratios)
    error = math.sqrt(spread / len(ratios))
    if error <= 1e-12 * max(1.0, abs(mean)):
        return (0.0 if mean > 0 else 1.0), (0.0 if mean < 0 else 1.0)
    return t_tail(mean / error, len(ratios) - 1), t_tail(-mean / error, len(ratios) - 1)


def _refuse_nonfinite(ratios: Sequence[float]) -> None:
    bad = [index for index, ratio in enumerate(ratios) if not math.isfinite(ratio)]
    if bad:
        raise ValueError(f"pair {bad[0]} has the log ratio {ratios[bad[0]]}: a failed measurement is not a pair")


def decide(
    pairs: Mapping[str, Sequence[float]], rule: ConfirmRule, confirmed: int | None = None
) -> dict[str, Decision]:
    """The decision on every quantity, all with the number of pairs of one look (cells that have fewer say so).

    ``pairs``: log ratios by cell. Give every cell that is still undecided; ``confirmed`` is the number of cells that
    the confirm stage began with (those ended early still count in Holm's correction, those already called slower do
    not). After the first look a mean under ``min_effect / 2`` ends a cell.
    """
    total = max(len(pairs), confirmed or 0)
    first, last = rule.looks
    ready = [name for name, ratios in pairs.items() if len(ratios) >= first]
    both = {name: _p_values(ratios) for name, ratios in pairs.items()}
    p_values = {name: slow for name, (slow, _) in both.items()}
    p_faster = {name: fast for name, (_, fast) in both.items()}
    absent = [1.0] * (total - len(ready))
    slow = [*(p_values[name] for name in ready), *absent]
    slower = dict(zip(ready, holm(slow, rule.alpha / 2), strict=False))
    levels = dict(zip(ready, holm_levels(slow, rule.alpha / 2), strict=False))
    faster = dict(zip(ready, holm([*(p_faster[name] for name in ready), *absent], rule.alpha / 2), strict=False))
    return {
        name: _decision(
            ratios,
            rule,
            total,
            p_values[name],
            levels[name] if slower.get(name) else None,
            faster.get(name, False),
            last,
        )
        for name, ratios in pairs.items()
    }


def _decision(
    ratios: Sequence[float],
    rule: ConfirmRule,
    total: int,
    p_value: float,
    slower: float | None,
    faster: bool,
    last: int,
) -> Decision:
    """``slower``: the level at which Holm found it slower, null when it did not."""
    count = len(ratios)
    effect = fmean(ratios) if count else 0.0
    error = math.sqrt(variance(ratios) / count) if count > 1 else math.inf
    half = t_quantile(0.975, count - 1) * error if count > 1 else math.inf
    low, high = effect - half, effect + half
    level = rule.alpha / 2 / max(1, total)
    least = minimal_paired_effect(error, count, level)
    bound = effect + t_quantile(PASS_CONFIDENCE, count - 1) * error if count > 1 else math.inf
    size = f"{math.expm1(effect):+.1%} time" + (
        f" [{math.expm1(low):+.1%}, {math.expm1(high):+.1%}]" if count > 1 else ""
    )
    size += f", {counted(count, 'pair')}"
    least_slow, ended = math.log1p(rule.min_effect), count >= last
    enough: int | None = None
    if slower is not None and effect >= least_slow:
        verdict, final = "regressed", True
        reason = f"{size}: slower, confirmed (p {p_value:.2g} ≤ {slower:.2g})"
    elif faster and -effect >= least_slow:
        verdict, final, reason = "improved", True, f"{size}: faster"
    elif count < rule.looks[0]:
        verdict, final = "inconclusive", False
        reason = f"{size}; a decision needs {rule.looks[0]} pairs"
    else:
        under = bound < math.log1p(rule.resolve)
        final = ended or effect < math.log1p(rule.min_effect / 2)
        verdict = "pass" if under else "inconclusive"
        if under:
            reason = f"{size}; slower by at most {math.expm1(bound):.1%} (95 %), under {rule.resolve:.0%}"
        else:
            enough = pairs_to_settle(ratios, level, max(least_slow, effect))
            wanted = f"; about {enough} pairs would settle it" if enough else ""
            reason = f"{size}; the smallest slowdown these pairs can show is {math.expm1(least):.1%}{wanted}"
    return Decision(verdict, final, reason, count, effect, low, high, p_value, least, enough)


def minimal_paired_effect(error: float, count: int, level: float, power: float = 0.9) -> float:
    """(t_(1-level) + t_power) * s / sqrt(P): the log effect that P pairs show with this power. Infinite for one."""
    if count < 2:
        return math.inf
    return (t_quantile(1 - level, count - 1) + t_quantile(power, count - 1)) * error


def pairs_to_settle(ratios: Sequence[float], level: float, effect: float, most: int = 500) -> int | None:
    """The number of pairs at which ``effect`` would be seen in nine of ten cases, if they keep spreading as they do."""
    spread = math.sqrt(variance(ratios))

    def seen(count: int) -> bool:
        return minimal_paired_effect(spread / math.sqrt(count), count, level) <= effect

    if not seen(most):
        return None
    # more pairs always show more, so the first number that suffices is found by halving
    return bisect.bisect_left(range(most + 1), True, lo=max(2, len(ratios) + 1), key=seen)
