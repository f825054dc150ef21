"""The end of a run: compare what was measured, show it, write it, and last of all the verdict that CI looks for."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from ndbench.compare.result import Comparison
from ndbench.compare.verdict import compare
from ndbench.report import console as report_console
from ndbench.report import markdown as report_markdown
from ndbench.results.sessions import Baseline
from ndbench.results.store import RunFolder, write_json, write_text
from ndbench.run.plan import Plan


def finish(
    plan: Plan, folder: RunFolder, baseline: Baseline | None, console: Console, *, stopped: str | None = None
) -> int:
    """Decide, report, and return the exit code. ``stopped`` says why the plan was not run to its end."""
    records = folder.records()
    comparison: Comparison = compare(
        records,
        baseline,
        [{"name": cell.name, "cell_id": cell.cell_id} for cell in plan.cells.values()],
        plan.gate,
        suite=plan.suite,
        run=plan.run,
        unselected=[{"name": name, "cell_id": key} for name, key in plan.unselected],
        skipped=[{"name": name, "cell_id": key, "reason": reason} for name, key, reason in plan.skipped],
        excluded=[{"name": name, "reason": reason} for name, reason in plan.excluded],
        planned_repeats=plan.repeats,
    )
    if stopped is not None:
        comparison.notes.append(stopped)
    report_console.print_comparison(comparison, plan=plan.to_dict(), run_folder=folder.path, console=console)
    summary = report_markdown.render(comparison, plan=plan.to_dict(), run_folder=folder.path)
    write_text(folder.summary_path, summary)
    step_summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if step_summary:
        report_markdown.append_step_summary(Path(step_summary), summary)
    write_json(folder.verdict_path, comparison.to_json())
    return comparison.exit_code
