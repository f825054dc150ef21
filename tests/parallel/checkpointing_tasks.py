"""What ranks run for the tests of recomputation: one more step of the engine, its kernels counted as they run."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from ndbench.engines.bundled import BundledEngine
from ndbench.parallel.mesh import build_mesh
from tests.parity.cases import Case, batch

aten = torch.ops.aten
KERNELS = {
    "attention": [aten._scaled_dot_product_flash_attention_for_cpu.default],
    "matmul": [aten.mm.default, aten.mm.out],
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Runs of each of ``KERNELS`` on the CPU.

    Below every dispatch mode and outside of what torch.compile traces: an output that is kept runs no kernel, and one
    that is computed again runs one more, whoever computes it.
    """
    runs: Counter[str] = Counter()

    def counting(name: str, kernel: Any) -> Any:
        def run(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            runs[name] += 1
            return kernel.call_boxed(keys, *args, **kwargs)

        return run

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is what is wanted
        for name, ops in KERNELS.items():
            for op in ops:
                kernel = torch.library.get_kernel(op, "CPU")
                library.impl(op.name(), counting(name, kernel), "CPU", with_keyset=True, allow_override=True)
    try:
        yield runs
    finally:
        library._destroy()


def kernels(case: Case, backend: str | None = None) -> dict[str, Any]:
    """Runs of each kernel in the second step, blocks compiled by ``backend``, and in how many graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mesh = build_mesh(case.parallelism, "cpu")
    engine = BundledEngine()
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        engine.build(case.model, case.training, mesh, torch.device("cpu"))
    data = batch(case, 0, mesh.batch_rank, mesh.batch_size)
    engine.step(data)
    with counted() as runs:
        engine.step(data)
    engine.close()
    return dict(runs) | {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}
