"""A fixed amount of work that tells a slow machine from slow code: a matmul, a copy, an all-reduce.

Run before and after a repeat. It knows nothing of the cell; its sizes are part of the record's meaning and change
only together with the schema.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from ndbench.measure._torch_private import cuda_event
from ndbench.measure.flops import MATMUL_SIDE

CPU_SIZES = {"matmul": MATMUL_SIDE["cpu"], "copy": 2**20, "all_reduce": 2**16, "rounds": 9}
"""Matrix side (float32), bytes copied, bytes reduced, rounds of each."""
GLOO_RANK_ROUNDS = 16
"""All-reduce rounds times ranks on CPU: among 8 ranks that share 2 cores one all-reduce takes 20 to 25 ms."""
CUDA_SIZES = {"matmul": MATMUL_SIDE["cuda"], "copy": 2**30, "all_reduce": 2**26, "rounds": 9}
"""Matrix side (bfloat16), bytes copied, bytes reduced, rounds of each."""


def run_yardstick(device: torch.device | str, group: dist.ProcessGroup | None = None) -> dict[str, float | None]:
    """Median seconds of a matmul, a device copy and an all-reduce on this rank.

    ``group`` is the process group to reduce over (default: the default group; without one, ``all_reduce_seconds`` is
    None). Every rank of the group must call this.
    """
    device = torch.device(device)
    sizes = CUDA_SIZES if device.type == "cuda" else CPU_SIZES
    timed = _on_cuda if device.type == "cuda" else _on_cpu
    rounds = sizes["rounds"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    all_reduce_seconds = None
    if dist.is_available() and dist.is_initialized():
        message = torch.zeros(sizes["all_reduce"] // 4, device=device)
        if device.type != "cuda":
            rounds = max(1, GLOO_RANK_ROUNDS // dist.get_world_size(group) - 1)
        # First, because its untimed round also brings the ranks together.
        all_reduce_seconds = timed(lambda: dist.all_reduce(message, group=group), rounds)

    # Not zeros: a GPU multiplies zeros with less power and a higher clock. No generator, so no seed is disturbed.
    side = sizes["matmul"]
    a = torch.arange(side * side, device=device, dtype=torch.float32).mul_(0.618).frac_().view(side, side).to(dtype)
    out = torch.empty_like(a)
    matmul_seconds = timed(lambda: torch.mm(a, a, out=out), sizes["rounds"])

    source = torch.zeros(sizes["copy"], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = timed(lambda: target.copy_(source), sizes["rounds"])

    return {"matmul_seconds": matmul_seconds, "copy_seconds": copy_seconds, "all_reduce_seconds": all_reduce_seconds}


def _on_cpu(work: Callable[[], object], rounds: int) -> float:
    work()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _on_cuda(work: Callable[[], object], rounds: int) -> float:
    work()
    marks = []
    for _ in range(rounds + 1):
        marks.append(cuda_event())
        work()
    marks[-1].synchronize()
    return median(float(a.elapsed_time(b)) for a, b in pairwise(marks)) / 1e3
