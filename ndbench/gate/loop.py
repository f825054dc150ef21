"""The confirm loop: pairs up to the first look, decide, and on to the second for what is still open.

Works the same for an A/B and for a run's suspects; which pairs (launches or residencies) follows from the device.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ndbench.compare.confirm import LAUNCH_LOOKS, TURN_LOOKS, ConfirmRule, Decision, decide
from ndbench.compare.result import MetricVerdict
from ndbench.compare.throughput import gate_rule
from ndbench.config import Cell, GateConfig
from ndbench.counted import counted
from ndbench.gate.pairs import CPU, WALL, Bench, Pair, by_turns, measure_pair
from ndbench.report.progress import duration

TURN_RESOLVE = 0.08
"""``gate.resolve`` of pairs on a CPU: pairs by turns are several times quieter than launches."""

Measure = Callable[[Bench, Cell, Cell, int], Pair]


@dataclass
class Confirmed:
    """What the pairs say about each cell."""

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    decisions: dict[str, dict[str, Decision]] = field(default_factory=dict)
    """By cell and quantity; none for a cell whose pairs failed."""
    failed: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, list[MetricVerdict]]:
        """The verdicts to stand in a comparison, by cell."""
        found = {
            name: [_metric(quantity, decision, self.ratios(name, quantity)) for quantity, decision in made.items()]
            for name, made in self.decisions.items()
        }
        for name, reason in self.failed.items():
            found[name] = [MetricVerdict("outcome", "invalid", f"a pair could not be measured: {reason}")]
        return found

    def ratios(self, name: str, quantity: str) -> list[float]:
        """Log ratios of the pairs that could be measured."""
        return [pair.ratios[quantity] for pair in self.pairs[name] if quantity in pair.ratios]

    def to_json(self) -> dict[str, Any]:
        """The log ratios themselves, for whoever wants to decide otherwise."""
        return {
            name: {
                "pairs": [{**pair.ratios, **pair.details, "failed": pair.failed} for pair in pairs],
                "decisions": {quantity: vars(made) for quantity, made in self.decisions.get(name, {}).items()},
            }
            for name, pairs in self.pairs.items()
        }


def _metric(quantity: str, decision: Decision, ratios: list[float]) -> MetricVerdict:
    sign = -1.0 if quantity == WALL else 1.0  # tokens a second fall when time grows
    what = "wall time of pairs" if quantity == WALL else "CPU seconds of pairs"
    ends = sorted((sign * decision.low, sign * decision.high))
    finite = all(math.isfinite(end) for end in ends)
    return MetricVerdict(
        quantity,
        decision.verdict,
        f"{what}: {decision.reason}",
        change=math.expm1(sign * decision.effect),
        low=math.expm1(ends[0]) if finite else None,
        high=math.expm1(ends[1]) if finite else None,
        details={
            "log_effect": decision.effect,
            "confirmed": True,
            "pairs": ratios,
            "p_slower": decision.p_slower,
            "minimal_effect": math.expm1(decision.minimal_effect) if math.isfinite(decision.minimal_effect) else None,
            "enough_pairs": decision.enough,
        },
    )


def confirm_rule(cell: Cell, gate: GateConfig) -> ConfirmRule:
    """``gate.*`` for one cell, with the defaults of pairs."""
    rule = gate_rule(cell.config.hardware.device != "cpu", gate.min_effect, gate.resolve, gate.alpha)
    turns = by_turns(cell)
    resolve = TURN_RESOLVE if turns and gate.resolve is None else rule.resolve
    return ConfirmRule(rule.min_effect, resolve, rule.alpha, TURN_LOOKS if turns else LAUNCH_LOOKS)


def confirm(
    bench: Bench,
    cells: Mapping[str, tuple[Cell, Cell]],
    gate: GateConfig,
    *,
    say: Callable[[str], None],
    measure: Measure = measure_pair,
    into: Confirmed | None = None,
) -> Confirmed:
    """Measure and decide every cell of ``cells`` (name → base's and head's cell), all on one kind of device.

    What is known is in ``into`` after each pair, for whoever is interrupted.
    """
    rule = confirm_rule(next(iter(cells.values()))[1], gate)
    result = Confirmed() if into is None else into
    result.pairs.update({name: [] for name in cells})
    taken: list[float] = []
    undecided, found_slower, quantities = list(cells), 0, 1
    generator = random.Random(bench.seed)
    for look in rule.looks:
        for index in range(max((len(result.pairs[name]) for name in undecided), default=0), look):
            for name in generator.sample(undecided, len(undecided)):
                began = time.monotonic()
                pair = measure(bench, *cells[name], index)
                taken.append(time.monotonic() - began)
                result.pairs[name].append(pair)
                if pair.failed is not None:
                    result.failed[name] = pair.failed
                    undecided.remove(name)
                missing = sum(look - len(result.pairs[other]) for other in undecided)
                say(_said(name, index, look, pair) + _left(fmean(taken) * missing))
        values = {
            (name, quantity): result.ratios(name, quantity)
            for name in undecided
            for quantity in (WALL, CPU)
            if result.ratios(name, quantity)
        }
        quantities = max((sum(key[0] == name for key in values) for name in undecided), default=quantities)
        keys = {f"{name} {quantity}": (name, quantity) for name, quantity in values}
        made = decide({key: values[pair] for key, pair in keys.items()}, rule, quantities * (len(cells) - found_slower))
        for key, (name, quantity) in keys.items():
            result.decisions.setdefault(name, {})[quantity] = made[key]
        slower = [n for n in undecided if any(d.verdict == "regressed" for d in result.decisions[n].values())]
        found_slower += len(slower)
        undecided = [
            name
            for name in undecided
            if name not in slower and not all(decision.final for decision in result.decisions[name].values())
        ]
        if not undecided:
            break
    return result


def so_far(found: Confirmed, cells: Mapping[str, tuple[Cell, Cell]], gate: GateConfig) -> list[str]:
    """What pairs that were stopped in the middle say of each cell, as the partial result that it is."""
    rule = confirm_rule(next(iter(cells.values()))[1], gate)
    lines = []
    for name in cells:
        pairs = [pair for pair in found.pairs.get(name, []) if pair.failed is None]
        line = f"{name}: {len(pairs)} of the {rule.looks[0]} pairs that a decision needs"
        if name in found.failed:
            line = f"{name}: a pair could not be measured: {found.failed[name]}"
        elif len(pairs) >= rule.looks[0]:
            line = f"{name}: {counted(len(pairs), 'pair')} of {rule.looks[1]}"
        ratios = {quantity: found.ratios(name, quantity) for quantity in (WALL, CPU)} if pairs else {}
        said = []
        for quantity, made in decide({key: values for key, values in ratios.items() if values}, rule).items():
            ends = f" [{math.expm1(made.low):+.1%}, {math.expm1(made.high):+.1%}]" if made.pairs > 1 else ""
            said.append(f"{'CPU' if quantity == CPU else 'time'} {math.expm1(made.effect):+.1%}{ends}")
        lines.append(f"{line}; head against base so far: {', '.join(said)}" if said else line)
    return lines


def _left(seconds: float) -> str:
    return f", about {duration(seconds)} to the next decision" if seconds >= 1 else ""


def _said(name: str, index: int, look: int, pair: Pair) -> str:
    if pair.failed is not None:
        return f"[{index + 1}/{look}] {name}  {pair.failed}"
    parts = [f"{'CPU' if quantity == CPU else 'time'} {math.expm1(r):+.1%}" for quantity, r in pair.ratios.items()]
    return f"[{index + 1}/{look}] {name}  head against base: {', '.join(parts)}"
