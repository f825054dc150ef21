"""The verdict on loss and gradient norm: one decision for a whole curve, by the strictest tier that applies.

First every step must be there and finite. Same hardware, software, code and a deterministic cell: equal to the bit.
Anything else: an envelope around the baseline's curve that grows with the step, wide as the precision demands. Steps
share a trajectory, so they are one observation and not tested one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ndbench.compare.comparability import code_change, hardware_changes, shorten, software_changes
from ndbench.compare.result import MetricVerdict
from ndbench.results.schema import Record

Curve = list[float | None]


@dataclass(frozen=True)
class Envelope:
    """Relative tolerance by step: ``start`` at step 0, growing by ``growth * start`` a step, never above ``most``."""

    start: float
    growth: float
    most: float

    def at(self, step: int) -> float:
        return min(self.most, self.start * (1 + self.growth * step))


ENVELOPES = {
    # step 0 is one forward pass: another order of summation moves fp32 by 1e-7 to 1e-6 (torchtitan gates at 1e-5).
    # FSDP v1 and v2 stay within 8e-5 over 50 steps (Megatron-LM#7041); a real shift of 1e-3 must not fit.
    "fp32": Envelope(1e-5, 1.0, 5e-4),
    "bf16": Envelope(1e-3, 0.1, 1e-2),
    "fp8": Envelope(5e-3, 0.1, 5e-2),
}
NORM_FACTOR = 10.0
"""A gradient norm moves about ten times as much as the loss under the same rounding."""
NOISE_FACTOR = 3.0
"""Where the baseline's own repeats differ, this many times their largest difference is allowed."""


def judge(head: Sequence[Record], baseline: Sequence[Record], series: str = "loss") -> MetricVerdict | None:
    """The verdict on ``loss`` or ``grad_norm`` of repeats against those of one baseline session; null without any.

    Raises nothing: incomparable data is a verdict. A non-finite or missing step is ``regressed`` when the baseline
    was finite there, ``invalid`` otherwise.
    """
    now = {record["repeat"]: curve for record in head if (curve := curve_of(record, series)) is not None}
    before = [record for record in baseline if curve_of(record, series) is not None]
    if not now or not before:
        return _one_sided(series, bool(now), bool(before))
    fault, old_fault = broken(head, series), broken(before, series)
    if fault:
        if old_fault:
            return MetricVerdict(series, "invalid", f"{fault}, and so it was in the baseline")
        return MetricVerdict(series, "regressed", f"{fault}; the baseline was finite at every step")
    if old_fault:
        return MetricVerdict(series, "incomparable", f"in the baseline {old_fault}")
    pairs = _pairs(head, before)
    if isinstance(pairs, str):
        return MetricVerdict(series, "incomparable", pairs)
    why_not = _why_not_bitwise(pairs[0][0], pairs[0][1], before, series)
    bitwise = _first_difference(pairs, series)
    if bitwise is None:
        return MetricVerdict(series, "pass", f"{_name(series)} equal to the bit at every step", change=0.0)
    if why_not is None:
        return MetricVerdict(
            series, "regressed", f"{bitwise}; same hardware, software and code: bitwise equality is due"
        )
    return _within(pairs, before, series, bitwise, why_not)


def curve_of(record: Record, series: str) -> Curve | None:
    return record["steps"][series] if record["steps"] else None


def best_reference(head: Record, sessions: Sequence[list[Record]]) -> list[Record]:
    """The latest session measured on the head's hardware and software, else the latest of all."""
    parts = ("hardware", "software")
    alike = [s for s in sessions if all(s[0]["fingerprint"][p] == head["fingerprint"][p] for p in parts)]
    return (alike or list(sessions))[-1]


def _name(series: str) -> str:
    return "gradient norm" if series == "grad_norm" else series


def _one_sided(series: str, now: bool, before: bool) -> MetricVerdict | None:
    if not now and not before:
        return None
    side = "the baseline" if now else "this run"
    return MetricVerdict(series, "incomparable", f"{_name(series)} was not recorded in {side}")


def broken(records: Sequence[Record], series: str) -> str | None:
    """The first non-finite or missing step of any repeat, in words."""
    for record in records:
        curve = curve_of(record, series)
        if curve is None:
            return f"{_name(series)} of repeat {record['repeat']} was not recorded"
        step = next((step for step, value in enumerate(curve) if value is None), None)
        if step is not None:
            return f"{_name(series)} at step {step} of repeat {record['repeat']} is not finite"
        expected = (record["cell"].get("training") or {}).get("steps", len(curve))
        if len(curve) != expected:
            return f"{_name(series)} of repeat {record['repeat']} has {len(curve)} of {expected} steps"
    return None


def _pairs(head: Sequence[Record], baseline: Sequence[Record]) -> list[tuple[Record, Record]] | str:
    """Each head repeat with a baseline repeat of the same data and seed, or why there is none."""
    if head[0]["data_hash"] != baseline[0]["data_hash"]:
        return (
            f"the data changed (hash {baseline[0]['data_hash']} → {head[0]['data_hash']}), so losses cannot be compared"
        )
    by_seed: dict[int, list[Record]] = {}
    for record in baseline:
        by_seed.setdefault(record["seed"], []).append(record)
    pairs = []
    for record in head:
        same = by_seed.get(record["seed"], [])
        if same:
            pairs.append((record, next((b for b in same if b["repeat"] == record["repeat"]), same[0])))
    if not pairs:
        return (
            f"the seeds differ ({sorted(by_seed)} → {sorted({r['seed'] for r in head})}), so losses cannot be compared"
        )
    return pairs


def _why_not_bitwise(head: Record, base: Record, baseline: Sequence[Record], series: str) -> str | None:
    """Why equality to the bit is not due, or null when it is."""
    changes = hardware_changes(base, head) + software_changes(base, head)
    if changes:
        return shorten(changes)
    if not (head["cell"].get("training") or {}).get("deterministic", False):
        return "training.deterministic is off"
    code = code_change(base, head)
    if code is not None:
        return code
    if _noise(baseline, series) > 0:
        return "the baseline's own repeats differ"
    return None


def _first_difference(pairs: Sequence[tuple[Record, Record]], series: str) -> str | None:
    """The earliest step at which a head repeat is not its baseline's, both values in full precision."""
    first: tuple[int, int, float, float] | None = None
    for head, base in pairs:
        now, before = curve_of(head, series) or [], curve_of(base, series) or []
        for step, (new, old) in enumerate(zip(now, before, strict=False)):
            if new is not None and old is not None and new != old and (first is None or step < first[0]):
                first = (step, head["repeat"], new, old)
    if first is None:
        return None
    step, repeat, new, old = first
    return f"{_name(series)} first differs at step {step} (repeat {repeat}): {new!r} against {old!r}"


def _relative(new: float, old: float) -> float:
    return abs(new - old) / max(abs(old), 1e-30)


def _noise(records: Sequence[Record], series: str) -> float:
    """Largest relative range over the repeats of one seed, at any step: zero for a deterministic cell."""
    by_seed: dict[int, list[Curve]] = {}
    for record in records:
        by_seed.setdefault(record["seed"], []).append(curve_of(record, series) or [])
    largest = 0.0
    for curves in by_seed.values():
        for step in zip(*curves, strict=False):
            values = [value for value in step if value is not None]
            if values and min(values) != max(values):
                largest = max(largest, _relative(max(values), min(values)))
    return largest


def _within(
    pairs: Sequence[tuple[Record, Record]], baseline: Sequence[Record], series: str, bitwise: str, why_not: str
) -> MetricVerdict:
    """The worst step of all repeats, measured in tolerances, decides for the curve."""
    precision = (pairs[0][0]["cell"].get("training") or {}).get("precision", "fp32")
    envelope = ENVELOPES.get(precision, ENVELOPES["bf16"])
    factor = NORM_FACTOR if series == "grad_norm" else 1.0
    noise = NOISE_FACTOR * _noise(baseline, series)
    worst = (0.0, 0, 0.0, 0.0, 0.0)
    for head, base in pairs:
        for step, (new, old) in enumerate(
            zip(curve_of(head, series) or [], curve_of(base, series) or [], strict=False)
        ):
            assert new is not None, "broken curves were decided before"
            assert old is not None, "broken curves were decided before"
            tolerance = max(envelope.at(step) * factor, noise)
            worst = max(worst, (_relative(new, old) / tolerance, step, new, old, tolerance))
    ratio, step, new, old, tolerance = worst
    change = (new - old) / old if old else None
    size = f"{_name(series)} at step {step} is {new!r} against {old!r} ({_relative(new, old):.2g} relative, "
    size += f"tolerance {tolerance:.2g} for {precision})"
    details = {"tier": "tolerance", "why_not_bitwise": why_not, "step": step, "first_difference": bitwise}
    if ratio > 1:
        return MetricVerdict(series, "regressed", f"{size}; {why_not}", change=change, details=details)
    reason = f"{_name(series)} within tolerance, not bitwise ({why_not}): {bitwise}"
    return MetricVerdict(series, "pass", reason, change=change, details=details)
