"""When a repeat that came to its end measured nothing: its step time never settled, or its device was throttled.

Limits only; what they are applied to is measured elsewhere. Below them a repeat counts, but ``compare`` lets no such
speed pass in silence.
"""

from __future__ import annotations

DRIFT_LIMITS = {"cpu": 1.0}
"""Change of the step time over the timed steps beyond which a repeat is invalid, by kind of device. On a CPU that other
work shares a burst of load may halve the speed; only a twofold change tells of the repeat itself."""
DRIFT_LIMIT = 0.10
"""... on any other device; within a launch a GPU's steps vary by 1 to 2 %."""
LEAST_STEPS = 8
"""Timed steps that it takes to call a repeat invalid for its drift."""
THROTTLED_LIMIT = 0.10
"""Share of the launch during which a device was slowed down for its temperature or by a power brake."""


def drift_limit(device: str) -> float:
    return DRIFT_LIMITS.get(device, DRIFT_LIMIT)


def why_invalid(
    device: str, *, steady: bool | None, drift: float, timed_steps: int, throttled: float | None
) -> str | None:
    """Why the figures of a repeat are no measurement of its cell, or null. ``steady`` of null was not judged."""
    if throttled is not None and throttled > THROTTLED_LIMIT:
        return (
            f"a device was throttled for {throttled:.0%} of the launch (limit {THROTTLED_LIMIT:.0%}): too hot, or short"
            " of power"
        )
    limit = drift_limit(device)
    if steady is False and timed_steps >= LEAST_STEPS and not 1 / (1 + limit) <= 1 + drift <= 1 + limit:
        return (
            f"not steady: step time changed by {drift:+.0%} over the {timed_steps} timed steps (limit {limit:.0%});"
            " more training.steps leave more of them for warm-up"
        )
    return None
