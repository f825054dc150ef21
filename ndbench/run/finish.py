"""The end of a run: compare what was measured, write it, last of all the verdict that CI looks for, and show it."""

from __future__ import annotations

import os

from rich.console import Console
from rich.text import Text

from ndbench.compare.exits import unwritten
from ndbench.compare.result import Comparison
from ndbench.gate.confirm import confirm_suspects
from ndbench.gate.stored import compare_run
from ndbench.report import junit
from ndbench.report.annotations import annotate
from ndbench.report.console import print_comparison
from ndbench.report.markdown import append_step_summary, render
from ndbench.report.tracker import track
from ndbench.results.sessions import Baseline
from ndbench.results.store import RunFolder, write_json, write_text
from ndbench.run.plan import Plan


def finish(
    plan: Plan, folder: RunFolder, baseline: Baseline | None, console: Console, *, stopped: str | None = None
) -> int:
    """Decide, report, and return the exit code. ``stopped`` says why the plan was not run to its end."""
    comparison = compare_run(folder, baseline, plan.gate)
    if stopped is None:
        fresh = confirm_suspects(plan, folder, baseline, comparison, lambda line: console.print(line, markup=False))
        if fresh.metrics:
            comparison = compare_run(folder, baseline, plan.gate, confirmed=fresh.metrics)
        comparison.notes.extend(fresh.notes)
    if stopped is not None:
        comparison.notes.append(stopped)
    try:
        summary = _write(plan, folder, comparison, baseline)
    except OSError as error:  # a full disk: the exit code that is printed is the one that is returned
        _show(plan, folder, unwritten(comparison, error), baseline, console)
        raise
    _show(plan, folder, comparison, baseline, console)
    done, warning = track(folder, comparison, next(iter(plan.cells.values())).config.tracker)
    if warning or done:
        console.print(Text(warning or done or "", style="yellow" if warning else ""), soft_wrap=True)
    if warning is not None:
        comparison.notes.append(warning)
        try:
            summary = _write(plan, folder, comparison, baseline)
        except OSError as error:  # a disk the tracker has filled; everything but the warning is written already
            console.print(Text(f"the warning is not in the summary: {error}", style="yellow"), soft_wrap=True)
    step_summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if step_summary:
        append_step_summary(step_summary, summary)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        annotate(comparison)
    return comparison.exit_code


def _show(plan: Plan, folder: RunFolder, comparison: Comparison, baseline: Baseline | None, console: Console) -> None:
    print_comparison(
        comparison,
        plan=plan.to_dict(),
        run_folder=folder.path,
        records=folder.records(),
        baseline=baseline,
        console=console,
    )


def _write(plan: Plan, folder: RunFolder, comparison: Comparison, baseline: Baseline | None) -> str:
    """The summary, and after it the verdict. Done before anything is printed or sent: neither then loses it."""
    summary = render(
        comparison, plan=plan.to_dict(), run_folder=folder.path, records=folder.records(), baseline=baseline
    )
    write_text(folder.summary_path, summary)
    write_text(folder.path / "junit.xml", junit.render(comparison))
    write_json(folder.verdict_path, comparison.to_json())
    return summary
