"""``ndbench doctor``: print what was found on this machine, worst marked, with an exit code for scripts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ndbench.config import HardwareConfig
from ndbench.matrix.sources import shipped
from ndbench.measure.devices import visible_devices
from ndbench.measure.doctor import Finding, examine
from ndbench.measure.fingerprint import fingerprint
from ndbench.measure.pace import judge_pace, measure_pace, ranks_to_try, results_records, stored_yardsticks

MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}
EXIT_UNFIT = 3


def main(
    results_dir: str | Path = "results",
    hardware_files: Mapping[str, Mapping[str, Any]] | None = None,
    as_json: bool = False,
    yardstick: bool = True,
) -> int:
    """Examine this machine and print the findings; 0, or 3 when one of them is ``fail``.

    ``hardware_files``: the hardware group's YAML files by name (default: those shipped).
    """
    findings = examine(results_dir, shipped_hardware() if hardware_files is None else hardware_files)
    if yardstick and not any(finding.level == "fail" for finding in findings):
        findings += pace(results_dir)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        show(findings)
    return EXIT_UNFIT if any(finding.level == "fail" for finding in findings) else 0


def pace(results_dir: str | Path) -> list[Finding]:
    """Run the yardstick here and judge it by the stored ones of this hardware."""
    devices = visible_devices()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unreadable record is another verb's business
        records = results_records(results_dir)
    ranks = ranks_to_try(len(devices), records)
    device_type = "cuda" if devices else "cpu"
    hardware = fingerprint(HardwareConfig(device=device_type, device_count=ranks))["hardware"]
    try:
        here = measure_pace(device_type, ranks)
    except RuntimeError as error:
        return [Finding("fail", "yardstick", str(error))]
    return judge_pace(here, stored_yardsticks(records, hardware), device_type)


def show(findings: list[Finding]) -> None:
    """One line a finding, then the sum."""
    from rich.table import Table

    from ndbench.report.output import make_console

    console = make_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = MARKS[finding.level]
        table.add_row(f"[{style}]{mark}[/]", finding.subject, finding.text.replace("[", r"\["))
    console.print(table)
    failed, warned = (sum(finding.level == level for finding in findings) for level in ("fail", "warn"))
    if failed:
        console.print(f"\n{failed} to mend before anything is measured here, {warned} to bear in mind.")
    else:
        console.print(f"\nReady to measure{f', {warned} to bear in mind' if warned else ''}.")


def shipped_hardware() -> dict[str, dict[str, Any]]:
    """The hardware files that come with ndbench."""
    import yaml

    files = sorted((shipped("conf") / "hardware").glob("*.yaml"))
    return {path.stem: yaml.safe_load(path.read_text()) or {} for path in files}
