"""The loss on held-out data: a sum over tokens over their number, the same for every layout and batch size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ndbench.training.data import Dataset
from ndbench.training.loss import IGNORED
from ndbench.training.step import Step


def evaluate(
    step: Step, dataset: Dataset, batches: int, device: torch.device, beat: Callable[[], None] = lambda: None
) -> tuple[float, int]:
    """(mean loss, number of valid tokens) over the first ``batches`` global batches, each sequence at most once.

    Collective. Where the data ends earlier, the last batch is filled up with sequences that bear no loss, so that all
    ranks take part in every forward. ``beat`` is called after each batch.
    """
    there = dataset.sequences
    wanted = batches * dataset.global_batch_size
    end = wanted if there is None else min(wanted, there)
    mesh = step.mesh
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    training = step.model.training
    step.model.eval()
    if device.type == "cuda":
        # Its kernels may be new here, and none is loaded while a rank may wait for another (see copy_engine.py).
        torch.cuda.synchronize(device)
    try:
        with torch.no_grad():
            for first in range(0, end, dataset.global_batch_size):
                batch = dataset.batch_from(first, mesh.batch_rank, mesh.batch_size, device, end)
                for labels, inputs in step.micro_batches(batch):
                    totals[0] += step.loss_sum(labels=labels, **inputs)
                    totals[1] += (labels != IGNORED).sum()
                beat()
    finally:
        step.model.train(training)
        for module in step.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward does it, and a checkpoint must not see gathered parameters
    if mesh.loss.size() > 1:
        dist.all_reduce(totals, group=mesh.loss.get_group())
    loss, tokens = totals.tolist()
    return (loss / tokens if tokens else float("nan")), int(tokens)
