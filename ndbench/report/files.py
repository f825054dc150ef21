"""The report of a run folder as files: the page and the pictures, with the baseline that gives the page its history."""

from __future__ import annotations

from pathlib import Path

from ndbench.compare.result import Comparison
from ndbench.report import html as page
from ndbench.results.fit import hardware_key
from ndbench.results.schema import Record
from ndbench.results.sessions import Baseline, read_baseline
from ndbench.results.store import PairsFolder, RunFolder


def write_files(
    run: RunFolder,
    comparison: Comparison,
    *,
    html: Path | None,
    png: Path | None,
    results_dir: Path | None = None,
    source: str | None = None,
    again: str | None = None,
) -> list[Path]:
    """Write what is asked for and return the paths. ``source`` is the history's baseline, by default the run's own;
    ``again`` the command to repeat, where it is not the plan's.

    Raises ``ValueError`` when a library is absent or a ``source`` that was named cannot be read.
    """
    records = run.records()
    plan = run.plan if run.has_plan else None
    written: list[Path] = []
    text = None
    if html is not None:
        baseline, remarks = history_of(run, records, comparison, results_dir, source)
        text = page.render(
            comparison, records, plan=plan, baseline=baseline, run_folder=run.path, remarks=remarks, again=again
        )
    if png is not None:  # before anything is written: it is what may be refused
        written += page.save_pictures(comparison, records, png, plan=plan)
    if html is not None and text is not None:
        page.write(html, text)
        written.insert(0, html)
    return written


def history_of(
    run: RunFolder,
    records: list[Record],
    comparison: Comparison,
    results_dir: Path | None,
    source: str | None,
    *,
    fetch: bool = True,
) -> tuple[Baseline | None, list[str]]:
    """The baseline as it was when the run ended; null with the reason when it cannot be read any more.

    Without ``fetch`` one that lies on a server is only named. Raises ``ValueError`` when a ``source`` that was named
    cannot be read.
    """
    if not records or (comparison.mode == "off" and source is None) or isinstance(run, PairsFolder):
        return None, []
    planned = run.plan.get("baseline") if run.has_plan else None
    if not fetch and source is None and str(planned).startswith("wandb:"):
        return None, [f"no history here: it is in {planned} (--baseline {planned} fetches it)"]
    folder = results_dir or (run.path.parent.parent if run.path.parent.name == "runs" else Path("results"))
    try:
        found = read_baseline(
            source or planned, hardware=hardware_key(records), suite=records[0]["suite"], results_dir=folder
        )
    except ValueError as error:
        if source is not None:
            raise
        return None, [f"no history: {error}"]
    # a run that was accepted since would be its own history
    before = [session for session in found.sessions if session.session != records[0]["session"]]
    return Baseline(found.source, before), []
