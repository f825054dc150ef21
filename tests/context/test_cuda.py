"""Context parallelism over NCCL, one rank a GPU; the blocks' CUDA kernels alone are tested in ``test_kernels.py``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.context.cases import NAMES, Case, attention_errors
from tests.context.test_equality import MASKS

RANKS = 2
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")


def _rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", RANKS)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS, device_id=device)
    lines = []
    for method in ("ring", "ulysses"):
        for dtype, tolerance in TOLERANCE.items():
            for name, mask in MASKS.items():
                errors = attention_errors(Case(method, dtype=dtype, device="cuda", head_dim=20, **mask))
                totals = torch.tensor([errors[key] for key in NAMES], dtype=torch.float64, device=device)
                dist.all_reduce(totals)
                worst = (totals[:, 0] / totals[:, 1]).sqrt().max().item()
                lines.append(f"{method} {dtype} {name}: {worst:.1e} {'ok' if worst < tolerance else 'WRONG'}")
    if rank == 0:
        Path(folder, "result").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(240)
def test_ring_and_ulysses_equal_one_process_on_gpus() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(folder,), nprocs=RANKS)
        result = Path(folder, "result").read_text()
    assert "WRONG" not in result, result
    assert len(result.splitlines()) == 2 * len(TOLERANCE) * len(MASKS)
