"""The process that talks to wandb: started apart by ``report.tracker``, so that it can hang or crash alone.

Reads one JSON job from standard input and writes one JSON answer to standard output. What has been sent is noted in
``<run>/wandb/pushed.json``, so that sending again sends only what is new.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from ndbench.compare.result import Comparison, from_json
from ndbench.report.wandb_runs import (
    STEP,
    TrackedRun,
    artifact_name,
    baseline_run,
    comparison_run,
    repeat_run,
    where_tags,
    without_secrets,
)
from ndbench.report.wandb_training import training_run
from ndbench.results.sessions import Session, read_baseline
from ndbench.results.store import RunFolder, dumps, read_json, write_json

PROTOCOL_OUT = 3
"""The file descriptor the answer goes to; whatever wandb prints goes elsewhere."""


class _Sender:
    """Sends tracked runs of one folder, each at most once with the same content."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.folder, self.job = folder, job
        folder.mkdir(parents=True, exist_ok=True)
        self.online = job["mode"] == "online"
        self.where = f"{job['entity'] or ''}/{job['project']}"
        self.state_path = folder / "wandb" / "pushed.json"
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        self.state: dict[str, Any] = read_json(self.state_path) if self.state_path.is_file() else {}
        self.sent, self.unchanged = 0, 0

    def send(self, run: TrackedRun, artifact: tuple[str, str, list[str]] | None = None, folder: Path | None = None,
             extra: dict[str, Any] | None = None) -> None:  # fmt: skip
        """``artifact`` is (name, type, aliases) of ``folder``; ``extra`` is logged beside the table."""
        import wandb

        key = f"{self.where}/{run.id}"
        known = self.state.get(key, {})
        kept = known.get("folder") and (self.folder / known["folder"]).is_dir()
        if known.get("digest") == run.digest and (known["online"] or (kept and not self.online)):
            self.unchanged += 1
            return
        settings = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True, disable_code=True
        )
        with wandb.init(
            project=self.job["project"],
            entity=self.job["entity"],
            id=run.id,
            name=run.name,
            group=run.group,
            job_type=run.job_type,
            tags=list(run.tags),
            notes=run.notes,
            config=run.config,
            dir=str(self.folder),
            mode=self.job["mode"],
            resume="allow" if self.online else None,
            reinit="finish_previous",
            settings=settings,
        ) as live:
            # a run that was begun before has its first rows already: wandb counts them
            begun = live.step if self.online and live.resumed else 0
            summary: Any = live.summary
            same = begun and summary.get("ndbench.digest") == run.digest
            live.define_metric(STEP)
            live.define_metric("train/*", step_metric=STEP)
            for index, row in enumerate(run.history[begun:], start=begun):
                live.log(row, step=index)
            if not same:
                self._tables(live, run, extra)
                live.summary.update({**run.summary, "ndbench.digest": run.digest})
                if artifact is not None and folder is not None:
                    name, kind, aliases = artifact
                    made = wandb.Artifact(artifact_name(name), type=kind, metadata=run.summary)
                    _add_files(made, folder, self.job.get("comparison"), self.job["hide"])
                    live.log_artifact(made, aliases=aliases)
            at = Path(live.dir).parent
        if kept:  # an older copy that was never synchronised; this one replaces it
            shutil.rmtree(self.folder / known["folder"], ignore_errors=True)
        place = None if self.online else str(at.relative_to(self.folder))
        self.state[key] = {"digest": run.digest, "online": self.online, "folder": place}
        write_json(self.state_path, self.state)
        self.sent += 1

    @staticmethod
    def _tables(live: Any, run: TrackedRun, extra: dict[str, Any] | None) -> None:
        import wandb

        logged: dict[str, Any] = dict(extra or {})
        if run.table is not None:
            columns, rows = run.table
            logged["cells"] = wandb.Table(columns=list(columns), data=list(rows), allow_mixed_types=True)
        if logged:
            live.log(logged)


def _add_files(artifact: Any, folder: Path, comparison: Any, hide: list[str]) -> None:
    """The JSON of a run (or of a baseline), without the secrets that a command line or a log may have brought in."""
    if (folder / "plan.json").is_file() or (folder / "records").is_dir():
        paths = [folder / "plan.json", *sorted((folder / "records").glob("*.json"))]
    else:
        paths = sorted(path for path in folder.glob("*/*.json") if not path.parent.name.startswith("."))
    values = {path.relative_to(folder).as_posix(): read_json(path) for path in paths if path.is_file()}
    if comparison is not None:
        values["verdict.json"] = comparison
    for name, value in values.items():
        with artifact.new_file(name, mode="w") as stream:
            stream.write(dumps(without_secrets(value, hide), name))


def push(job: dict[str, Any]) -> dict[str, Any]:
    """Send a run folder or a baseline folder; the answer counts what was sent."""
    folder = Path(job["folder"])
    sender = _Sender(Path(job["home"]), job)
    if job.get("training"):
        sender.send(training_run(folder, [*job["tags"], *where_tags()], job["hide"]))
    elif job.get("baseline"):
        _push_baseline(sender, folder, job)
    else:
        _push_run(sender, folder, job)
    return {"sent": sender.sent, "unchanged": sender.unchanged, "online": sender.online, "folder": str(folder)}


def _push_run(sender: _Sender, folder: Path, job: dict[str, Any]) -> None:
    records = RunFolder(folder).records()
    comparison = from_json(job["comparison"])
    verdicts = {cell.name: cell.verdict for cell in comparison.cells}
    tags = [*job["tags"], *where_tags()]
    for record in records:
        sender.send(repeat_run(record, verdicts.get(record["cell"]["name"]), tags, job["hide"]))
    hardware = str(((records[0]["cell"].get("hardware") or {}).get("name") if records else None) or "unknown")
    # a run's artifact is only replaced by itself
    artifact = (f"result-{comparison.suite}-{hardware}", "result", ["latest", comparison.run])
    run = comparison_run(comparison, records, tags, job["hide"])
    sender.send(run, artifact, folder, _plots(comparison, records, folder))


def _plots(comparison: Comparison, records: list[Any], folder: Path) -> dict[str, Any]:
    """The page's overview figures; none where Plotly is not installed, the numbers are in the table all the same."""
    import wandb

    try:
        import plotly.graph_objects as go
    except ImportError:
        return {}
    from ndbench.report.html import overview_figures

    plan = RunFolder(folder).plan if RunFolder(folder).has_plan else None
    return {
        f"plots/{name}": wandb.Plotly(go.Figure(data=figure["data"], layout=figure["layout"]))
        for name, figure in overview_figures(comparison, records, plan).items()
    }


def _push_baseline(sender: _Sender, folder: Path, job: dict[str, Any]) -> None:
    """Every session is a run (with its reason as notes); the latest holds the folder as an artifact."""
    baseline = read_baseline(folder)
    hardware, suite = folder.resolve().parent.name, folder.resolve().name
    tags = [*job["tags"], *where_tags()]
    for session in baseline.sessions:
        last: Session | None = session if session is baseline.sessions[-1] else None
        run = baseline_run(hardware, suite, session, tags, job["hide"])
        if last is None:
            sender.send(run)
        else:
            day = "v" + session.accepted[:10].replace("-", "")
            sender.send(run, (f"baseline-{suite}-{hardware}", "baseline", ["latest", "accepted", day]), folder)


def fetch(reference: str, into: Path) -> None:
    """Download the artifact ``ENTITY/PROJECT/NAME:ALIAS`` into a folder."""
    import wandb

    wandb.Api(timeout=30).artifact(reference).download(root=str(into))


def main() -> int:
    """Answer one job. The answer has ``error`` (one line) when it could not be done."""
    job = json.load(sys.stdin)
    try:
        if job.get("fetch"):
            fetch(job["fetch"], Path(job["into"]))
            answer: dict[str, Any] = {}
        else:
            answer = push(job)
    except Exception as error:  # whatever wandb raises: the answer is the only thing that leaves this process
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]}
    os.write(PROTOCOL_OUT, json.dumps(answer).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
