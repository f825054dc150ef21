"""The report of a run as one HTML file that needs no network: verdicts first, then the table, then the figures.

Everything a reader must know stands in the page as text; the figures are drawn by the Plotly library inside the file
when they come into view. Templates escape all that comes from records.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ndbench.compare.memory import said_bytes
from ndbench.compare.result import Comparison
from ndbench.report import facts, figures, figures_cells, figures_layouts, page_facts, pictures
from ndbench.report.cells import speed_title, under
from ndbench.report.facts import Plan
from ndbench.report.figures import Figure, Measured
from ndbench.report.tracker import known_secrets
from ndbench.report.wandb_runs import without_secrets
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline
from ndbench.results.store import write_text

TEMPLATES = Path(__file__).parent / "page"
MARKS = {
    "regressed": "✗",
    "invalid": "!",
    "missing": "?",
    "inconclusive": "~",
    "improved": "▲",
    "pass": "✓",
    "incomparable": "≠",
    "new": "+",
    "no_baseline": "○",
}
"""A sign beside each verdict's colour."""


def render(
    comparison: Comparison,
    records: Sequence[Record],
    *,
    plan: Plan | None = None,
    baseline: Baseline | None = None,
    run_folder: str | Path | None = None,
    remarks: Sequence[str] = (),
    again: str | None = None,
) -> str:
    """The whole page. ``baseline`` is for the history of each cell; ``remarks`` are shown beside the run's notes;
    ``again`` is the command to repeat, where it is not the plan's.

    Raises ``ValueError`` naming the extra to install when Jinja2 or Plotly is absent.
    """
    try:
        import jinja2
        import markupsafe
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ValueError(f"an HTML report needs {error.name}: pip install 'ndbench[report]'") from error
    measured = page_facts.measured_cells(records, comparison, plan)
    stands = facts.standing_of(records, run_folder)
    rows, prints = page_facts.rows(measured, comparison, plan, baseline, run_folder, stands, again)
    drawn: dict[str, Figure] = {}
    overview = _overview(measured, drawn)
    for row in rows:
        for kind, made in (
            ("steps", figures_cells.step_times(row.measured)),
            ("history", figures_cells.history(row.points)),
        ):
            if made is not None:
                drawn[f"{kind}-{row.index}"] = made[0] | {"said": made[1]}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_without_secrets(markupsafe.Markup),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"bytes": said_bytes, "printable": facts.printable}
    return environment.get_template("report.html.j2").render(
        comparison=comparison,
        headline=facts.headline(comparison),
        exit_line=facts.brief_exit_line(comparison),
        baseline_line=facts.baseline_line(comparison),
        notes=[facts.printable(note) for note in [*comparison.notes, *remarks]],
        findings=page_facts.findings(measured, comparison, plan, baseline, again),
        remarks=[facts.printable(text) for text in facts.remarks(comparison)],
        few=facts.few_line(comparison),
        accept=facts.accept_command(comparison, run_folder, stands),
        accepted=facts.accepted_line(stands),
        measure=again or _measure_command(plan),
        rows=rows,
        verdicts=list(comparison.counts),
        word=facts.word,
        speed=speed_title(comparison.cells),
        under=under,
        marks=MARKS,
        overview=overview,
        drawn=drawn,
        prints=prints,
        away=facts.folded(plan),
        style=markupsafe.Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=markupsafe.Markup((TEMPLATES / "report.js").read_text(encoding="utf-8")),
        figures=markupsafe.Markup(_packed(json.dumps(drawn, allow_nan=False, separators=(",", ":")))),
        plotly=markupsafe.Markup(_packed(get_plotlyjs())),
    )


def write(path: str | Path, page: str) -> None:
    write_text(path, page)


def save_pictures(
    comparison: Comparison, records: Sequence[Record], folder: str | Path, *, plan: Plan | None = None
) -> list[Path]:
    """The overview figures as PNG files (1800 pixels wide), for a README or a slide; returns their paths.

    Raises ``ValueError`` when Matplotlib is absent or there is nothing to draw.
    """
    drawn: dict[str, Figure] = {}
    overview = _overview(page_facts.measured_cells(records, comparison, plan), drawn)
    if not overview:
        raise ValueError(f"run {comparison.run} has no picture to draw: no cell of it was measured to its end")
    return pictures.save(Path(folder), overview, drawn)


def overview_figures(comparison: Comparison, records: Sequence[Record], plan: Plan | None) -> dict[str, Figure]:
    """The figures that compare cells, by kind and number."""
    drawn: dict[str, Figure] = {}
    _overview(page_facts.measured_cells(records, comparison, plan), drawn)
    return drawn


_TITLES = {
    "pareto": "Which layout: speed against memory",
    "scaling": "Scaling",
    "losses": "Loss, layout by layout",
    "collectives": "Collectives by mesh axis",
}


def _overview(measured: Sequence[Measured], drawn: dict[str, Figure]) -> list[dict[str, Any]]:
    """Groups of cells that one question is asked of, each with its figures; these are added to ``drawn`` by id."""
    found: list[dict[str, Any]] = []
    for title, some in figures.groups(measured).items():
        # curves are compared with the simplest layout: the fewest axes, then the fewest devices
        ordered = sorted(some, key=lambda cell: (cell.layout.count("_"), cell.world))
        _add(found, drawn, title, "pareto", figures_layouts.pareto(some))
        _add(found, drawn, title, "losses", figures_layouts.losses(ordered))
        _add(found, drawn, title, "collectives", figures_layouts.collectives(some))
    for title, some in figures.groups(measured, batch=False).items():
        _add(found, drawn, title, "scaling", figures_layouts.scaling(some))
    return found


def _add(
    found: list[dict[str, Any]], drawn: dict[str, Figure], title: str, kind: str, made: tuple[Figure, str] | None
) -> None:
    if made is None:
        return
    group = next((group for group in found if group["title"] == title), None)
    if group is None:
        group = {"title": title, "figures": []}
        found.append(group)
    key = f"{kind}-g{len(drawn)}"
    drawn[key] = made[0]
    group["figures"].append({"id": key, "kind": kind, "title": _TITLES[kind], "said": made[1]})


def _measure_command(plan: Plan | None) -> str | None:
    import shlex

    overrides: Mapping[str, Any] = plan or {}
    return shlex.join(["ndbench", *overrides["overrides"]]) if overrides.get("overrides") else None


def _without_secrets(trusted: type[str]) -> Callable[[Any], Any]:
    """For all text that is printed: no key of a command line or a log reaches the page."""
    hide = known_secrets()
    return lambda value: (
        without_secrets(value, hide) if type(value) is str and not isinstance(value, trusted) else value
    )


def _packed(text: str) -> str:
    """Compressed, in letters that mean nothing to HTML; the same text gives the same letters."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")
