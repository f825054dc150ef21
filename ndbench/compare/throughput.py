"""The verdict on speed: one hypothesis a cell, decided for all cells of a run together.

Repeats become one number each, the median log step time; a cell is regressed when the prediction interval of at least
three baseline sessions excludes it after Holm's correction over the gated cells, and the slowdown is worth telling.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from ndbench.compare.result import MetricVerdict
from ndbench.compare.statistics import (
    MIN_REPEATS,
    MIN_SESSIONS,
    SESSION_SD,
    Estimate,
    estimate_one_session,
    estimate_sessions,
    holm,
    minimal_effect,
    repeats_to_pass,
)
from ndbench.counted import counted
from ndbench.results.schema import Record

PASS_CONFIDENCE = 0.95
COARSE_FACTOR = 2.0
"""Where too few sessions give no interval: a step this many times longer in every launch is no session drift."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class GateRule:
    """``gate.*`` with its defaults filled in for one kind of device."""

    min_effect: float
    resolve: float
    session_sd: float
    """Spread to expect between sessions until they say otherwise: 1 % on a GPU. A shared CPU has been seen to differ
    by 10 to 16 % between launches of the same code."""
    alpha: float = 0.01


def gate_rule(accelerator: bool, min_effect: float | None, resolve: float | None, alpha: float) -> GateRule:
    defaults = (0.01, 0.03, SESSION_SD) if accelerator else (0.05, 0.30, 0.12)
    return GateRule(
        min_effect=defaults[0] if min_effect is None else min_effect,
        resolve=defaults[1] if resolve is None else resolve,
        session_sd=defaults[2],
        alpha=alpha,
    )


def log_mean_over_median(record: Record) -> float:
    """How much longer the mean of what :func:`log_step_time` takes the median of is: a few steps that stall."""
    steps = record["steps"]
    return math.log(fmean(steps["seconds"][steps["first_timed"] :])) - log_step_time(record)


def log_step_time(record: Record) -> float:
    """Median over the timed steps of log(seconds), seconds being those of the slowest rank."""
    steps = record["steps"]
    return median(math.log(seconds) for seconds in steps["seconds"][steps["first_timed"] :])


@dataclass(frozen=True)
class Timing:
    """Log step times of one cell: the head's repeats, and each baseline session's."""

    head: list[float]
    sessions: list[list[float]]
    rule: GateRule
    metric: str = "tokens_per_second"
    quantity: str = "step time"
    """What the times are times of, in a sentence."""
    same_hardware: bool = False
    """Known to be: without it a factor may be that of two machines."""
    accepted: bool = True
    """Whether the sessions are a baseline's, so that more can be accepted."""
    head_stalls: Sequence[float] = ()
    base_stalls: Sequence[float] = ()
    """Log of mean over median step time of each launch; none where they are not known."""


@dataclass(frozen=True)
class _Judged:
    timing: Timing
    measured: Estimate | None
    """With the spread as measured: for the interval shown and for a pass."""
    cautious: Estimate | None
    """With sessions expected to differ as on this kind of device: for a regression. Null when none can be called."""


def timing_of(
    head: Sequence[Record], sessions: Sequence[Sequence[Record]], rule: GateRule, accepted: bool = True
) -> Timing:
    """Step times of one cell, all from the same hardware."""
    return Timing(
        [log_step_time(record) for record in head],
        [[log_step_time(record) for record in session] for session in sessions],
        rule,
        same_hardware=True,
        accepted=accepted,
        head_stalls=[log_mean_over_median(record) for record in head],
        base_stalls=[log_mean_over_median(record) for session in sessions for record in session],
    )


def stalls(timing: Timing) -> float | None:
    """By which factor the mean step is longer beside the median one, in every launch against any before, where that is
    more than :data:`COARSE_FACTOR`: some steps stall, too few of them to move a median."""
    if min(len(timing.head_stalls), len(timing.base_stalls)) < MIN_REPEATS:
        return None
    apart = min(timing.head_stalls) - max(timing.base_stalls)
    return math.exp(apart) if apart > math.log(COARSE_FACTOR) else None


def coarse(timing: Timing) -> int:
    """+1 where every launch of the head is slower than every one of the baseline by more than :data:`COARSE_FACTOR`, -1
    where every one is faster by as much, else 0.

    Asked only where sessions are too few for an interval, on the same hardware, of at least three launches a side.
    """
    base = [value for session in timing.sessions for value in session]
    few_launches = min(len(timing.head), len(base)) < MIN_REPEATS
    if not timing.same_hardware or few_launches or len(timing.sessions) >= MIN_SESSIONS:
        return 0
    least = math.log(COARSE_FACTOR)
    if min(timing.head) - max(base) > least:
        return 1
    return -1 if min(base) - max(timing.head) > least else 0


def judge(timings: Mapping[Key, Timing]) -> dict[Key, MetricVerdict]:
    """The verdict on every timing. All of a run must be given at once: Holm counts them."""
    judged = {name: _estimate(timing) for name, timing in timings.items()}
    gated = [name for name in judged if judged[name].cautious is not None]
    estimates = [estimate for name in gated if (estimate := judged[name].cautious) is not None]
    alpha = min((timings[name].rule.alpha for name in gated), default=0.01)
    slower = dict(zip(gated, holm([estimate.p_slower for estimate in estimates], alpha), strict=True))
    faster = dict(zip(gated, holm([estimate.p_faster for estimate in estimates], alpha), strict=True))
    return {
        name: _verdict(one, slower.get(name, False), faster.get(name, False), alpha / max(1, len(gated)))
        for name, one in judged.items()
    }


def _estimate(timing: Timing) -> _Judged:
    head, sessions = timing.head, timing.sessions
    if len(sessions) < MIN_SESSIONS:
        return _Judged(timing, estimate_one_session(head, sessions), None)
    measured = estimate_sessions(head, sessions, SESSION_SD)
    if len(head) < MIN_REPEATS:
        return _Judged(timing, measured, None)
    return _Judged(timing, measured, estimate_sessions(head, sessions, timing.rule.session_sd))


def _verdict(judged: _Judged, slower: bool, faster: bool, alpha: float) -> MetricVerdict:
    timing, rule, estimate = judged.timing, judged.timing.rule, judged.measured
    effect = fmean(timing.head) - fmean([fmean(s) for s in timing.sessions]) if estimate is None else estimate.effect
    slowdown = math.expm1(effect)
    low, high = (None, None) if estimate is None else estimate.interval()
    size = f"{timing.quantity} {_sentence(slowdown, low, high, len(timing.head), timing.sessions)}"
    least = None if judged.cautious is None else math.expm1(minimal_effect(judged.cautious, alpha))
    bound = None if estimate is None else math.expm1(estimate.bound(PASS_CONFIDENCE))
    apart = coarse(timing)

    if slower and slowdown >= rule.min_effect:
        verdict, reason = "regressed", f"{size}; noise does this in under {rule.alpha:.0%} of suites"
    elif faster and math.expm1(-effect) >= rule.min_effect:
        verdict, reason = "improved", size
    elif apart:
        verdict = "regressed" if apart > 0 else "improved"
        word = "slower" if apart > 0 else "faster"
        reason = (
            f"{size}; every launch is {word} than every one before by more than a factor of {COARSE_FACTOR:g}, "
            "which no difference between sessions explains"
        )
    elif (factor := stalls(timing)) is not None:
        # On a shared CPU a burst of other work does this too.
        verdict = "regressed" if rule.session_sd <= SESSION_SD else "inconclusive"
        reason = (
            f"{size} in the median, but on average a step takes {factor:.1f} times as long or more: some steps stall"
        )
    elif len(timing.head) < MIN_REPEATS:
        verdict = "inconclusive"
        reason = f"{size}; a verdict needs at least {MIN_REPEATS} repeats, there are {len(timing.head)}"
    elif slowdown >= rule.min_effect:
        verdict, reason = "inconclusive", f"{size}; {_what_it_takes(judged, least)}"
    elif bound is not None and bound < rule.resolve:
        verdict, reason = "pass", f"{size}; slower by at most {bound:.1%} (95 %), under {rule.resolve:.0%}"
    else:
        verdict, reason = "inconclusive", f"{size}; {_how_to_pass(judged, bound)}"
    log_effect = effect
    if timing.metric == "tokens_per_second":  # of the rate, not of the time
        effect, low, high = -effect, None if high is None else -high, None if low is None else -low
    return MetricVerdict(
        timing.metric,
        verdict,
        reason,
        change=math.expm1(effect),
        low=None if low is None else math.expm1(low),
        high=None if high is None else math.expm1(high),
        details={
            "log_effect": log_effect,
            "sessions": len(timing.sessions),
            "upper_bound": bound,
            "minimal_effect": least,
            "p_slower": None if judged.cautious is None else judged.cautious.p_slower,
            "gated_cells_alpha": alpha,
        },
    )


def _sentence(slowdown: float, low: float | None, high: float | None, repeats: int, sessions: list[list[float]]) -> str:
    known = low is not None and high is not None and repeats >= MIN_REPEATS  # of fewer it would only be absurdly wide
    interval = f" [{math.expm1(low or 0.0):+.1%}, {math.expm1(high or 0.0):+.1%}]" if known else ""
    total = sum(len(session) for session in sessions)
    base = f"{counted(total, 'repeat')} of {counted(len(sessions), 'session')}"
    return f"{slowdown:+.1%}{interval}, {repeats} against {base}"


def _what_it_takes(judged: _Judged, least: float | None) -> str:
    if least is None:
        if not judged.timing.accepted:
            return "suspected slower, but two runs do not tell how sessions differ: ndbench ab measures both in turns"
        lacking = MIN_SESSIONS - len(judged.timing.sessions)
        return (
            f"suspected slower, but a regression needs {MIN_SESSIONS} baseline sessions to know how sessions differ: "
            f"accept {lacking} more"
        )
    return (
        f"suspected slower, but launches and sessions differ too much to tell: "
        f"the smallest slowdown this baseline can show is {least:.0%}"
    )


def _how_to_pass(judged: _Judged, bound: float | None) -> str:
    timing, rule = judged.timing, judged.timing.rule
    if bound is None:
        return "one repeat on each side does not tell how launches differ"
    said = f"it may be slower by {bound:.1%} (95 %), not under gate.resolve {rule.resolve:.0%}"
    assert judged.measured is not None
    enough = repeats_to_pass(timing.head, timing.sessions, judged.measured.effect, math.log1p(rule.resolve))
    if enough is None:
        what = "a quieter machine" + (" or more baseline sessions" if timing.accepted else "")
        return f"{said}; more repeats would not settle it, {what} would"
    return f"{said}; measure.repeats={enough} would settle it if launches keep differing as they do"
