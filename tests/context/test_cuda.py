"""Context parallelism over NCCL, one rank a GPU. One GPU is enough for ``test_kernels.py`` and ``test_alone.py``."""

from __future__ import annotations

import dataclasses
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
KERNELS = [("flash", 64, False), ("flash", 128, True)]
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9:
    KERNELS += [("cudnn", 64, False), ("cudnn", 64, True), ("cudnn", 128, True)]

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
    for kernel, head_dim, fused in KERNELS:
        case = Case("ring", length=1024, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")
        errors = attention_errors(dataclasses.replace(case, kernel=kernel, fused=fused))
        worst = max((error / norm) ** 0.5 for error, norm in errors.values())
        lines.append(f"ring {kernel} {head_dim} {fused}: {worst:.1e} {'ok' if worst < 1e-2 else 'WRONG'}")
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
    assert len(result.splitlines()) == 2 * len(TOLERANCE) * len(MASKS) + len(KERNELS)
