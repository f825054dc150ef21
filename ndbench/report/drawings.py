"""What ``ndbench report RUN`` draws on a terminal: speed, step times, losses, collectives and history, cell by cell.

The facts of the page in rows of characters. Reads records, verdicts and history; knows no colour and no console.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from ndbench.compare.memory import said_bytes
from ndbench.compare.result import Comparison
from ndbench.report import facts, ranking
from ndbench.report.facts import Plan
from ndbench.report.figures import Measured, table_of
from ndbench.report.figures_cells import HERE, Point
from ndbench.report.strokes import NOT_FINITE, STEADY_SPAN, Row, Strokes, bar, drawing_width, sparkline, thinned

MOST = 12
"""Cells drawn of each kind; the page has them all."""
MOST_REPEATS = 6
MOST_SESSIONS = 32
THIS_RUN, ACCEPTED, MOVED = ">", "*", "|"
"""Stand before a session's level in a history."""


@dataclass(frozen=True)
class Section:
    title: str
    rows: list[Row]
    lines: list[str] = field(default_factory=list)
    """Sentences below the rows."""


def sections(
    comparison: Comparison,
    measured: Sequence[Measured],
    points: Mapping[str, Sequence[Point]],
    plan: Plan | None,
    strokes: Strokes,
    width: int,
) -> list[Section]:
    """Everything there is something to draw of. ``points`` are histories by cell; ``width`` the terminal's columns."""
    found = [
        *speed(comparison, plan, strokes, width),
        step_times(measured, strokes, width),
        losses(measured, strokes, width),
        collectives(measured, strokes, width),
        history(measured, points, strokes),
    ]
    return [section for section in found if section.rows]


def speed(comparison: Comparison, plan: Plan | None, strokes: Strokes, width: int) -> list[Section]:
    """Bars of tokens/s for every workload, the fastest and the Pareto front named."""
    made = []
    for group in ranking.workloads(comparison, plan):
        shown = group.ranked[:MOST]
        front = {cell.name for cell in ranking.pareto_front(group.ranked)} if len(group.ranked) > 1 else set()
        names = [facts.printable(cell.name) for cell in shown]
        figures = [facts.figure(ranking.speed_of(cell)) for cell in shown]
        said = []
        for place, cell in enumerate(shown):
            marks = ["fastest"] * (place == 0 and len(group.ranked) > 1) + ["Pareto front"] * (cell.name in front)
            said.append(", ".join([ranking.peak_of(cell)] * bool(ranking.peak_of(cell)) + marks))
        columns = drawing_width(names, figures, said, width)
        top = ranking.speed_of(shown[0])
        rows = [
            Row(name, figure, bar(ranking.speed_of(cell) / top, columns, strokes), text)
            for cell, name, figure, text in zip(shown, names, figures, said, strict=True)
        ]
        title = f"Speed in tokens/s, peak memory ({facts.printable(group.title)})"
        lines = ranking.sentences(group.ranked)[:1] if len(group.ranked) > 1 else []
        made.append(Section(title, rows, [*lines, *_left_out(len(group.ranked) - len(shown))]))
    return made


def step_times(measured: Sequence[Measured], strokes: Strokes, width: int) -> Section:
    """The timed steps of each repeat, on one scale a cell."""
    cells = [cell for cell in measured if any(_timed(record) for record in cell.good)]
    names, said, series = [], [], []
    for cell in cells[:MOST]:
        repeats = [timed for record in cell.good if (timed := _timed(record))]
        every = [value for timed in repeats for value in timed]
        first = sorted({int(record["steps"]["first_timed"] or 0) for record in cell.good})
        dropped = " to ".join(str(steps) for steps in dict.fromkeys((first[0], first[-1])))
        more = f", {MOST_REPEATS} of {len(repeats)} repeats" * (len(repeats) > MOST_REPEATS)
        names.append(facts.printable(cell.name))
        said.append(f"{_range(every)}{f', {dropped} dropped a repeat' if first[-1] else ''}{more}")
        series.append(repeats[:MOST_REPEATS])
    columns = drawing_width(names, [], said, width)
    rows = []
    for name, text, repeats in zip(names, said, series, strict=True):
        every = [value for timed in repeats for value in timed]
        low = min(every)
        high = max(max(every), low + STEADY_SPAN * median(every))
        each = max(1, (columns + 1) // len(repeats) - 1)
        pieces = [sparkline(thinned(timed, each), strokes, low, high) for timed in repeats]
        rows.append(Row(name, "", "|".join(pieces), text))
    title = "Step times, repeat by repeat: median (least to most), warm-up dropped"
    return Section(title, rows, _left_out(len(cells) - len(rows)))


def losses(measured: Sequence[Measured], strokes: Strokes, width: int) -> Section:
    """The loss of the first good repeat, step by step; what is not finite stands as a sign of its own."""
    cells = [cell for cell in measured if cell.good and cell.good[0]["steps"]["loss"]]
    names, said = [], []
    for cell in cells[:MOST]:
        loss = cell.good[0]["steps"]["loss"]
        bad = [step for step, value in enumerate(loss) if value is None or not math.isfinite(value)]
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        names.append(facts.printable(cell.name))
        said.append(f"{_loss(loss[0])} to {_loss(loss[-1])}" + (f", not finite at step {bad[0]}{more}" if bad else ""))
    plain = [text.partition(",")[0] for text in said]
    columns = drawing_width(names, [], plain, width)
    rows = []
    for cell, name, text in zip(cells, names, said, strict=False):
        loss = cell.good[0]["steps"]["loss"]
        finite = [value for value in loss if value is not None and math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        rows.append(Row(name, "", sparkline(thinned(loss, columns), strokes, low, high), text))
    gaps = any(NOT_FINITE in row.drawing for row in rows)
    title = "Loss (nats a token), step by step" + (f"; {NOT_FINITE}: not finite" if gaps else "")
    return Section(title, rows, _left_out(len(cells) - len(rows)))


def collectives(measured: Sequence[Measured], strokes: Strokes, width: int) -> Section:
    """Bytes one rank sends in a step, a bar for every mesh axis."""
    cells = [(cell, table) for cell in measured if (table := table_of(cell))]
    entries: list[tuple[str, str, float]] = []
    for cell, table in cells[:MOST]:
        axes: dict[str, float] = {}
        for entry in table:
            axes[str(entry["axis"])] = axes.get(str(entry["axis"]), 0.0) + entry["bytes"]
        name = facts.printable(cell.name)
        for place, (axis, sent) in enumerate(sorted(axes.items(), key=lambda item: -item[1])):
            entries.append(("" if place else name, facts.printable(axis), sent))
    top = max((sent for _, _, sent in entries), default=0.0) or 1.0
    said = [said_bytes(sent) for _, _, sent in entries]
    columns = drawing_width([name for name, _, _ in entries], [axis for _, axis, _ in entries], said, width)
    rows = [
        Row(name, axis, bar(sent / top, columns, strokes), text)
        for (name, axis, sent), text in zip(entries, said, strict=True)
    ]
    return Section("Collectives: bytes a rank sends in one step, by mesh axis", rows, _left_out(len(cells) - MOST))


def history(measured: Sequence[Measured], points: Mapping[str, Sequence[Point]], strokes: Strokes) -> Section:
    """Tokens/s of every accepted session and of this run, with change points and what was accepted on purpose."""
    drawn = {cell.name: [point for point in points.get(cell.name, ()) if point.values] for cell in measured}
    names = [name for name, held in drawn.items() if len(held) > 1]
    rows, lines = [], []
    said = []
    for name in names[:MOST]:
        held = drawn[name]
        older = f", {len(held) - MOST_SESSIONS} older left out" if len(held) > MOST_SESSIONS else ""
        said.append(f"{facts.figure(fmean(held[0].values))} to {facts.figure(fmean(held[-1].values))}{older}")
    for name, text in zip(names, said, strict=False):
        held = drawn[name][-MOST_SESSIONS:]
        means = [fmean(point.values) for point in held]
        low, high = min(means), max(means)
        low = min(low, high - STEADY_SPAN * median(means))
        marks = [_mark(point) for point in held]
        levels = [sparkline([mean], strokes, low, high) for mean in means]
        drawing = "".join(mark + level for mark, level in zip(marks, levels, strict=True))
        rows.append(Row(facts.printable(name), "", drawing, text))
        lines += [f"{facts.printable(name)}: {event}" for event in _events(held)]
    title = f"History, tokens/s by session: {THIS_RUN} this run"
    if lines:
        title += f", {MOVED} level moved, {ACCEPTED} accepted on purpose"
    return Section(title, rows, [*lines, *_left_out(len(names) - len(rows))])


def _mark(point: Point) -> str:
    here = THIS_RUN if point.session == HERE else ""
    return (MOVED if point.change is not None else "") + (ACCEPTED if point.mark else "") + here


def _events(held: Iterable[Point]) -> list[str]:
    found = []
    for point in held:
        when = f"session {point.session} ({point.when})"
        if point.change is not None:
            found.append(f"the level moved at {when}: step time {point.change:+.1%}")
        if point.mark:
            found.append(f"accepted on purpose as {point.mark}, {when}: {facts.printable(point.reason)}")
    return found


def _timed(record: Mapping[str, object]) -> list[float]:
    steps = record["steps"]
    assert isinstance(steps, Mapping), "a good repeat has steps"
    timed = steps["seconds"][int(steps["first_timed"] or 0) :]
    return [float(value) for value in timed if value is not None and math.isfinite(value)]


def _range(seconds: Sequence[float]) -> str:
    scale, unit = (1.0, "s") if median(seconds) >= 1 else (1e3, "ms")
    middle, low, high = (_three(value * scale) for value in (median(seconds), min(seconds), max(seconds)))
    return f"{middle} {unit} ({low} to {high})"


def _three(value: float) -> str:
    """Three significant digits, never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{2 - max(-3, math.floor(math.log10(value or 1.0)))}f}"


def _loss(value: float | None) -> str:
    return f"{value:.4f}" if value is not None and math.isfinite(value) else "not finite"


def _left_out(count: int) -> list[str]:
    return [f"and {count} more cells; ndbench report RUN --html FILE draws them all"] if count > 0 else []
