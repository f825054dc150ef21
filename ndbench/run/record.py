"""From what the ranks reported to the record of a repeat. Pure: no process, no file, no torch."""

from __future__ import annotations

import statistics
from typing import Any

from ndbench.config import Cell
from ndbench.measure import flops as flop_counts
from ndbench.measure.timing import slowest, steady_from, throughput
from ndbench.measure.validity import why_invalid
from ndbench.parallel.mesh import rank_grid
from ndbench.report.tracker import known_secrets
from ndbench.report.wandb_runs import without_secrets
from ndbench.results.schema import Record, metric, new_record, nonfinite_steps
from ndbench.run.launch import LaunchResult
from ndbench.run.task import RankReport


def build_record(
    *,
    cell: Cell,
    result: LaunchResult,
    run: str,
    repeat: int,
    seed: int,
    start: str,
    end: str,
    cell_version: str,
    code: dict[str, Any],
    fingerprint: dict[str, Any],
    throttled: float | None = None,
    alone: bool = True,
) -> Record:
    """The record of one repeat. An ``ok`` launch whose numbers cannot be trusted becomes ``invalid``, with why.

    ``throttled`` is the share of the launch during which a device was slowed down. A launch that is not ``alone``
    takes turns with another: whether its own steps are steady is then not asked.
    """
    outcome, reason = result.outcome, result.reason
    measured: dict[str, Any] = {}
    whole = [report for report in result.reports if report.seconds and report.loss]
    silent = sum(report.silent for report in result.reports)
    if whole and whole[0].rank == 0 and len(whole) + silent == cell.world_size:
        measured = _measured(cell, whole, throttled, alone)
        if outcome == "ok":
            contradiction = _contradiction(whole, measured) or _unfit(cell, measured)
            if contradiction is not None:
                outcome, reason = "invalid", contradiction
    config = cell.parallelism
    # records are committed and sent: a key in a command line, an error or a log stays out of them
    hide = known_secrets()
    return new_record(
        run=run,
        suite=cell.suite,
        cell=without_secrets(cell.to_dict(), hide),
        cell_id=cell.cell_id,
        cell_version=cell_version,
        repeat=repeat,
        seed=seed,
        start=start,
        end=end,
        outcome=outcome,
        reason=without_secrets(reason, hide),
        log_tail=without_secrets(result.log_tail, hide),
        code=code,
        fingerprint=fingerprint,
        world={
            "size": cell.world_size,
            "degrees": config.sizes,
            "layout": cell.layout,
            "rank_grid": rank_grid(config),
        },
        **measured | {"engine": without_secrets(measured.get("engine"), hide)},
    )


ONE_VALUE = "it must be the global batch's, averaged over the ranks (all_reduce), or a script's rank 0 prints alone"


def _contradiction(reports: list[RankReport], measured: dict[str, Any]) -> str | None:
    """Why these numbers cannot be trusted, or None."""
    first = reports[0]
    nonfinite = measured["steps"]["nonfinite"]
    if nonfinite:
        series = "loss" if first.loss[nonfinite[0]] is None else "gradient norm"
        return f"{series} is not finite at step {nonfinite[0]} ({len(nonfinite)} of {len(first.loss)} steps)"
    for report in reports[1:]:
        for name in ("loss", "grad_norm"):
            mine, theirs = getattr(first, name), getattr(report, name)
            if mine != theirs and mine is not None and theirs is not None:
                step = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
                values = f"{mine[step]!r} and {theirs[step]!r}"
                return f"ranks 0 and {report.rank} disagree about {name} at step {step}: {values}; {ONE_VALUE}"
    for report in reports:
        for step, (counted, expected) in enumerate(zip(report.tokens or [], report.valid_tokens, strict=False)):
            if counted is not None and counted != expected:
                return f"the engine counted {counted} tokens at step {step}, the data has {expected}"
    return None


def _unfit(cell: Cell, measured: dict[str, Any]) -> str | None:
    """Why numbers that agree with each other are still no measurement of the cell, or None."""
    steps, metrics = measured["steps"], measured["metrics"]
    return why_invalid(
        cell.config.hardware.device,
        steady=steps["steady"],
        drift=metrics["step_drift"]["value"],
        timed_steps=len(steps["seconds"]) - steps["first_timed"],
        throttled=metrics["throttled_share"]["value"],
    )


def _measured(cell: Cell, reports: list[RankReport], throttled: float | None, alone: bool) -> dict[str, Any]:
    first = reports[0]
    seconds = slowest([report.seconds for report in reports])
    steady = steady_from(seconds, cell.config.measure.warmup)
    structures = [report.structure for report in reports if report.structure is not None]
    structure = None
    if structures:
        peaks = [item["tracked_peak_bytes"] for item in structures if item["tracked_peak_bytes"] is not None]
        structure = {**structures[0], "tracked_peak_bytes": max(peaks) if peaks else None}
    memory = {
        key: [None if report.memory is None else report.memory.get(source) for report in reports]
        for key, source in (
            ("allocated", "allocated"),
            ("reserved", "reserved"),
            ("device", "device_used"),
            ("rss", "rss"),
        )
    }
    steps = {
        "seconds": seconds,
        "loss": first.loss,
        "grad_norm": first.grad_norm,
        "nonfinite": nonfinite_steps(first.loss, first.grad_norm),
        "first_timed": steady.first,
        "steady": steady.steady if alone else None,
        "rank_medians": [statistics.median(report.seconds[steady.first :]) for report in reports],
    }
    yardstick = None
    if first.yardstick_before is not None:
        before = [report.yardstick_before for report in reports]
        after = [report.yardstick_after for report in reports]
        yardstick = {"before": _slowest_yardstick(before), "after": _slowest_yardstick(after)}
    return {
        "steps": steps,
        "tokens": {"per_step": first.tokens_per_step, "valid": first.valid_tokens},
        "data_hash": first.data_hash,
        "memory": {
            key: values if any(value is not None for value in values) else None for key, values in memory.items()
        },
        "structure": structure,
        "yardstick": yardstick,
        "compile_cache": first.compile_cache,
        "engine": first.engine,
        "metrics": _metrics(cell, reports, seconds[steady.first :], memory, structure)
        | {
            "step_drift": metric(steady.drift, "1", "none"),
            "throttled_share": metric(
                throttled, "1", "lower", None if throttled is not None else "nothing here counts it"
            ),
        },
    }


def _slowest_yardstick(values: list[dict[str, float | None] | None]) -> dict[str, float] | None:
    """Each part's slowest rank; null when the ranks did not come that far."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    parts = {key: [time for value in present if (time := value[key]) is not None] for key in present[0]}
    return {key: max(times) for key, times in parts.items() if times}


def _metrics(
    cell: Cell,
    reports: list[RankReport],
    timed: list[float],
    memory: dict[str, list[int | None]],
    structure: dict[str, Any] | None,
) -> dict[str, dict[str, Any]]:
    first = reports[0]
    config = cell.config
    step_seconds = statistics.median(timed)
    tokens_per_second = None if first.tokens_per_step is None else throughput(first.tokens_per_step, timed)
    per_device = None if tokens_per_second is None else tokens_per_second / cell.world_size
    no_tokens = None if tokens_per_second is not None else "the script does not print 'tokens' at every step"
    peaks = [value for value in memory["allocated"] if value is not None]
    reserved = [value for value in memory["reserved"] if value is not None]
    tracked = None if structure is None else structure["tracked_peak_bytes"]
    peak: float | None = max(peaks) if peaks else tracked
    no_peak = None if peak is not None else "tracked in the structure step of a cell's first repeat only"
    metrics = {
        "tokens_per_second": metric(tokens_per_second, "tokens/s", "higher", no_tokens),
        "tokens_per_second_per_device": metric(per_device, "tokens/s", "higher", no_tokens),
        "step_seconds": metric(step_seconds, "s", "lower"),
        "peak_allocated_bytes": metric(peak, "B", "lower", no_peak),
        "peak_reserved_bytes": metric(
            max(reserved) if reserved else None, "B", "lower", None if reserved else "CPU memory has no reserve"
        ),
        "rss_bytes": metric(max((value for value in memory["rss"] if value is not None), default=None), "B", "lower"),
        "loss_last": metric(first.loss[-1], "nats/token", "none"),
        "grad_norm_last": metric(
            first.grad_norm[-1] if first.grad_norm else None,
            "1",
            "none",
            None if first.grad_norm else "the engine reports no gradient norm",
        ),
        "compile_seconds": metric(
            first.compile_seconds, "s", "lower", None if first.compile_seconds is not None else "nothing was compiled"
        ),
        "time_to_first_step_seconds": metric(first.time_to_first_step, "s", "lower"),
    }
    metrics.update(_profile_metrics(reports))
    if config.measure.checkpoint:
        metrics |= _checkpoint_metrics(first.checkpoint or {})
    for convention in ("causal", "palm"):
        metrics[f"mfu_{convention}"] = _mfu(cell, convention, step_seconds, config.training.precision)
    if config.training.precision == "fp8":
        # Beside the share of the FP8 peak: attention and the head are not FP8, and bf16 cells are divided by this one.
        metrics["mfu_causal_bf16_peak"] = _mfu(cell, "causal", step_seconds, "bf16")
    return metrics


def _profile_metrics(reports: list[RankReport]) -> dict[str, dict[str, Any]]:
    """The parts of a profiled step, each the mean over ranks, so that they add up to ``profile_step_seconds``."""
    parts = [report.profile["breakdown"] for report in reports if report.profile is not None]
    if len(parts) < len(reports):
        return {}
    return {
        f"profile_{name}_seconds": metric(statistics.fmean(part[name] for part in parts), "s", "none")
        for name in parts[0]
    }


def _checkpoint_metrics(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    units = {"save_seconds": "s", "stall_seconds": "s", "load_seconds": "s", "reshard_seconds": "s", "bytes": "B"}
    metrics = {}
    for name, unit in units.items():
        value = figures.get(name)
        why = figures.get("reason", "there is no other layout of this many ranks") if value is None else None
        metrics[f"checkpoint_{name}"] = metric(value, unit, "lower", why)
    return metrics


def _mfu(cell: Cell, convention: str, step_seconds: float, precision: str) -> dict[str, Any]:
    if cell.config.engine.name == "command":
        return metric(None, "1", "higher", "the script's model is its own, so its FLOPs are not known")
    flops = flop_counts.step_flops(cell.config.model, cell.config.training, convention)
    if flops is None:
        return metric(None, "1", "higher", "the model's shape is not known, so its FLOPs are not")
    per_device = flops / step_seconds / cell.world_size
    value, reason = flop_counts.mfu(per_device, cell.config.hardware, precision)
    return metric(value, "1", "higher", reason)
