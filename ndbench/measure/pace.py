"""Is this machine as fast as others of its kind? The yardstick, run here now, against those stored with results."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from ndbench.measure.doctor import Finding
from ndbench.measure.fingerprint import usable_cpus
from ndbench.run.preload_path import own_path

SLOW_GPU = 0.05
"""A GPU whose median is this much slower than its kind is not one to gate on: the gate resolves 1 to 3 %."""
SLOW_CPU = 0.30
"""Shared cores differ by a quarter from launch to launch anyway."""
ROUNDS = 5
PARTS = ("matmul_seconds", "copy_seconds", "all_reduce_seconds")
START_SECONDS = 120.0

Yardstick = Mapping[str, float | None]


def measure_pace(device_type: str, ranks: int, timeout: float = START_SECONDS) -> list[dict[str, float | None]]:
    """The yardstick of each rank, [ranks], on ``ranks`` fresh processes: medians over ``ROUNDS``.

    Raises ``RuntimeError`` when a rank fails or the whole takes longer than ``timeout`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["ndbench.run.preload_path", "torch", "torch.distributed", "ndbench.measure.yardstick"]
    )
    folder = tempfile.mkdtemp(prefix="ndbench-pace-")
    with own_path():  # of Python's helpers, which the first of these starts
        results: Any = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(device_type, rank, ranks, folder, results), daemon=True)
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            with own_path():  # of the first, which starts the server
                process.start()
        join_all(processes, timeout)
        failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        if failed:
            raise RuntimeError(f"the yardstick failed on rank {failed[0]} of {ranks}, or took over {timeout:.0f} s")
        found = dict(results.get() for _ in processes)
        return [found[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def join_all(processes: Iterable[Any], timeout: float) -> None:
    """Wait for the end of all of them, for ``timeout`` seconds together."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _rank(device_type: str, rank: int, ranks: int, folder: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from ndbench.measure.yardstick import run_yardstick

    torch.set_num_threads(max(1, usable_cpus() // ranks))
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device_type == "cpu" else "nccl",
        store=dist.FileStore(  # type: ignore[attr-defined]
            f"{folder}/store", ranks
        ),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=None if device_type == "cpu" else device,
    )
    rounds = [run_yardstick(device) for _ in range(ROUNDS)]
    results.put((rank, {part: median(values) for part in PARTS if (values := _known(rounds, part))}))
    dist.barrier()
    dist.destroy_process_group()


def _known(yardsticks: Iterable[Yardstick], part: str) -> list[float]:
    return [value for yardstick in yardsticks if (value := yardstick.get(part)) is not None]


def stored_yardsticks(records: Iterable[Mapping[str, Any]], hardware: Mapping[str, Any]) -> list[Yardstick]:
    """The yardsticks of records taken on ``hardware`` (a fingerprint's part), before and after."""
    return [
        yardstick
        for record in records
        if record.get("yardstick") and (record.get("fingerprint") or {}).get("hardware") == hardware
        for yardstick in (record["yardstick"]["before"], record["yardstick"]["after"])
        if yardstick
    ]


def judge_pace(here: Sequence[Yardstick], stored: Sequence[Yardstick], device_type: str) -> list[Finding]:
    """This machine's yardstick ([ranks]; each part's slowest rank counts) against the median of the stored ones."""
    slowest = {part: max(values) for part in PARTS if (values := _known(here, part))}
    said = ", ".join(f"{part.removesuffix('_seconds')} {value * 1e3:.2f} ms" for part, value in slowest.items())
    if not stored:
        return [Finding("ok", "yardstick", f"{said}; none is stored for this hardware yet, the first run stores one")]
    limit = SLOW_CPU if device_type == "cpu" else SLOW_GPU
    found = []
    changes = []
    for part, value in slowest.items():
        kind = _known(stored, part)
        if not kind:
            continue
        change = value / median(kind) - 1
        name = part.removesuffix("_seconds")
        changes.append(f"{name} {change:+.0%}")
        if change > limit:
            rank = max(range(len(here)), key=lambda rank: here[rank].get(part) or 0.0)
            where = f"GPU {rank}" if device_type != "cpu" else "this host"
            text = f"{where}: {name} {change:.0%} slow ({value * 1e3:.2f} ms here, {median(kind) * 1e3:.2f} ms stored)"
            found.append(
                Finding("warn" if device_type == "cpu" else "fail", "yardstick", f"{text}: not a node to gate on")
            )
    return found or [
        Finding("ok", "yardstick", f"as fast as its kind: {', '.join(changes)} against {len(stored)} stored")
    ]


def ranks_to_try(devices: int, records: Iterable[Mapping[str, Any]]) -> int:
    """Ranks for the yardstick: the visible GPUs, else as many CPU ranks as most stored records have (default 8)."""
    if devices:
        return devices
    counts = [
        int(record["fingerprint"]["hardware"]["ranks"])
        for record in records
        if (record.get("fingerprint") or {}).get("hardware", {}).get("device") == "cpu"
    ]
    return max(set(counts), key=counts.count) if counts else min(8, max(2, 4 * (os.cpu_count() or 1)))


def results_records(results_dir: str | Path) -> list[dict[str, Any]]:
    """Every readable record under ``results_dir``: baselines and runs."""
    from ndbench.results.frame import read_records

    folder = Path(results_dir)
    found: list[dict[str, Any]] = []
    for part in (folder / "baselines", folder):
        if part.is_dir():
            found += read_records(part, strict=False)
    return found
