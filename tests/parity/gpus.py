"""Ranks of their own, one a GPU over NCCL, for the tests that need several: started once, given many cases."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def on_ranks(
    task: Callable[[Any, str], Any], cases: list[Any], world_size: int, device: str = "cuda", timeout: float = 300.0
) -> list[Any]:
    """``[task(case, device) by rank for case in cases]``: each case in all ranks at once, one after the other.

    After ``timeout`` seconds the ranks are killed and the cases that they did not finish are missing at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, task, cases, world_size, device)
        ranks: Any = torch.multiprocessing.spawn(_rank, args=arguments, nprocs=world_size, join=False)
        deadline = time.monotonic() + timeout
        while not ranks.join(timeout=max(0.1, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                break
        done = min(len(list(Path(folder).glob(f"{rank}.[0-9]*"))) for rank in range(world_size))
        # our own files of plain tensors and numbers, written a moment ago
        return [
            [torch.load(Path(folder, f"{rank}.{index}"), weights_only=False) for rank in range(world_size)]
            for index in range(done)
        ]


def _rank(rank: int, folder: str, task: Callable[[Any, str], Any], cases: list[Any], world_size: int, on: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    device = torch.device(on, rank) if on == "cuda" else torch.device(on)
    options: dict[str, Any] = {}
    if on == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(BACKENDS[on], store=store, rank=rank, world_size=world_size, **options)
    for index, case in enumerate(cases):
        found = task(case, on)
        torch.save(found, f"{folder}/{rank}.part")
        Path(folder, f"{rank}.part").replace(Path(folder, f"{rank}.{index}"))
    dist.barrier()
    dist.destroy_process_group()
