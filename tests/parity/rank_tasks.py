"""What the ranks of the pool's own tests run."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist


def rank_and_sum(offset: int) -> tuple[int, int]:
    total = torch.tensor(offset + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def divide_on_rank_one() -> float:
    return 1 / (1 - dist.get_rank())


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)
