"""Records made up for tests: whole, plausible, and changed in one respect at a time."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from ndbench.config import Cell, Config, ModelConfig, TrainingConfig
from ndbench.parallel.config import ParallelismConfig
from ndbench.results.schema import Record, metric, new_record

MIB = 2**20


def a_cell(name: str = "fsdp8", steps: int = 12, device: str = "cpu", **training: Any) -> Cell:
    config = Config(
        model=ModelConfig(name="llama_tiny", vocab_size=256, hidden_size=64, num_hidden_layers=2),
        parallelism=ParallelismConfig(dp_shard_size=8),
        training=TrainingConfig(steps=steps, **training),
        world_size=8,
    )
    # the name stands for a different layout: give each its own identity
    config.model.kwargs = {"layout": name}
    config.hardware.device = device
    return Cell(name=name, suite="hsdp_tp", config=config)


def a_record(
    name: str = "fsdp8",
    *,
    run: str = "20261130-061500-ab12cd",
    repeat: int = 0,
    seconds: float | list[float] = 0.1,
    loss: list[float | None] | None = None,
    grad_norm: list[float | None] | None = None,
    peak: int = 100 * MIB,
    device: str = "cpu",
    torch: str = "2.13.0",
    hardware: dict[str, Any] | None = None,
    commit: str | None = "a" * 40,
    dirty: bool = False,
    cell: Cell | None = None,
    first_timed: int = 2,
    collectives: list[dict[str, Any]] | None = None,
    start: str = "2026-11-30T06:15:00+00:00",
    **changed: Any,
) -> Record:
    """One ``ok`` repeat of 12 steps; ``changed`` replaces top-level fields."""
    cell = cell or a_cell(name, device=device)
    steps = cell.config.training.steps
    times = seconds if isinstance(seconds, list) else [seconds] * steps
    losses = loss if loss is not None else [5.5 - 0.1 * step for step in range(steps)]
    norms = grad_norm if grad_norm is not None else [2.0 + 0.05 * step for step in range(steps)]
    median = sorted(times[first_timed:])[len(times[first_timed:]) // 2] if times[first_timed:] else math.nan
    cuda = device == "cuda"
    fields: dict[str, Any] = {
        "run": run,
        "suite": cell.suite,
        "cell": cell.to_dict(),
        "cell_id": cell.cell_id,
        "cell_version": "v1",
        "repeat": repeat,
        "seed": 0,
        "start": start,
        "end": start,
        "outcome": "ok",
        "code": {"commit": commit, "dirty": dirty},
        "fingerprint": {
            "hardware": hardware or {"device": "H200" if cuda else "cpu", "model": "Zen 4", "ranks": 8},
            "software": {"torch": torch, "transformers": "5.24.0", "python": "3.11.9", "ndbench": "0.1.0"},
            "informational": {"host": "somewhere"},
        },
        "world": {"size": 8, "degrees": {"dp_shard": 8}, "layout": name, "rank_grid": [[[list(range(8))]]]},
        "steps": {
            "seconds": times,
            "loss": losses,
            "grad_norm": norms,
            "nonfinite": sorted({i for s in (losses, norms) for i, v in enumerate(s) if v is None}),
            "first_timed": first_timed,
            "steady": True,
            "rank_medians": [median] * 8,
        },
        "tokens": {"per_step": 2048, "valid": [2048] * len(losses)},
        "data_hash": "d1",
        "memory": {
            "allocated": [peak] * 8 if cuda else None,
            "reserved": [peak * 2] * 8 if cuda else None,
            "device": None,
            "rss": [500 * MIB] * 8,
        },
        "structure": {
            "collectives": collectives
            if collectives is not None
            else [
                {"op": "all_gather", "axis": "fsdp", "count": 6, "bytes": 6000, "where": ["model.layers.0"]},
                {"op": "reduce_scatter", "axis": "fsdp", "count": 3, "bytes": 3000, "where": ["model.layers.0"]},
            ],
            "flops": 1e9,
            "tracked_peak_bytes": peak,
            "graph_breaks": 0,
            "recompiles": 0,
        },
        "yardstick": {"before": {"matmul_seconds": 0.01}, "after": {"matmul_seconds": 0.01}},
        "metrics": {
            "tokens_per_second": metric(2048 / median, "tokens/s", "higher"),
            "step_seconds": metric(median, "s", "lower"),
            "peak_allocated_bytes": metric(peak, "bytes", "lower"),
            "loss_last": metric(losses[-1] if losses else None, "nats", "lower"),
        },
    }
    return new_record(**(fields | changed))


def repeats(name: str = "fsdp8", count: int = 3, **fields: Any) -> list[Record]:
    return [a_record(name, repeat=repeat, **fields) for repeat in range(count)]


def not_ok(outcome: str, name: str = "fsdp8", reason: str = "it broke", **fields: Any) -> Record:
    return a_record(
        name, outcome=outcome, reason=reason, steps=None, tokens=None, memory=None, structure=None, metrics={}, **fields
    )


def noisy(
    name: str,
    rng: random.Random,
    *,
    session: float = 0.0,
    between: float = 0.0,
    within: float = 0.0,
    slower: float = 1.0,
    count: int = 3,
    base: float = 0.1,
    **fields: Any,
) -> list[Record]:
    """Repeats whose log step times have these standard deviations; ``session`` is one draw of the caller's."""
    made = []
    for repeat in range(count):
        process = rng.gauss(0, between)
        times = [base * slower * math.exp(session + process + rng.gauss(0, within)) for _ in range(12)]
        made.append(a_record(name, repeat=repeat, seconds=times, **fields))
    return made


def plan_of(records: list[Record]) -> list[dict[str, Any]]:
    return list({r["cell"]["name"]: r["cell"] | {"cell_id": r["cell_id"]} for r in records}.values())


def changed_training(record: Record, **training: Any) -> Record:
    """The record of a cell with other training options (hence another identity)."""
    from ndbench.config import cell_from_dict, cell_id

    cell = cell_from_dict(record["cell"])
    new = dataclasses.replace(cell.config, training=dataclasses.replace(cell.config.training, **training))
    described = dataclasses.replace(cell, config=new).to_dict()
    return record | {"cell": described, "cell_id": cell_id(described)}
