"""How far a layout is from one process: relative errors, and the claim that they are small.

Of a step's loss and norm the error is relative to the value; of a tensor it is the Euclidean norm of the difference
over that of the whole tensor, on each rank's part, the worst rank counting.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from tests.parity import ranks, reference
from tests.parity.cases import Case
from tests.parity.pool import pool
from tests.parity.ranks import Piece

TOLERANCE = 1e-5


def errors(case: Case, plant: Any = nullcontext, timeout: float = 120.0) -> dict[str, tuple[float, str]]:
    """Worst relative error of ``case`` against one process, by kind, with where it is."""
    return errors_of(case, pool(case.parallelism.world_size).run(ranks.train, case, plant, timeout=timeout))


def errors_of(case: Case, results: list[dict[str, Any]], device: str = "cpu") -> dict[str, tuple[float, str]]:
    """The same for what ranks on ``device`` found already."""
    expected = reference.train(case, device)
    worst = {}
    for kind in ("loss", "norm"):
        each = [
            (abs(have - want) / abs(want), f"step {step} rank {rank}")
            for rank, result in enumerate(results)
            for step, (have, want) in enumerate(zip(result[kind], expected[kind], strict=True))
        ]
        worst[kind] = max(each, key=_nan_last)
    counts = [
        (abs(h - w) / w, f"rank {r}")
        for r, each in enumerate(results)
        for h, w in zip(each["tokens"], expected["tokens"], strict=True)
    ]
    worst["tokens"] = max(counts, key=_nan_last)
    if case.tensors:
        for kind in ("gradients", "weights"):
            worst[kind] = _worst_tensor([result[kind] for result in results], expected[kind])
    return worst


def assert_parity(case: Case, tolerance: float = TOLERANCE) -> None:
    assert_small(case, errors(case), tolerance)


def assert_small(case: Case, found: dict[str, tuple[float, str]], tolerance: float = TOLERANCE) -> None:
    wrong = {kind: error for kind, error in found.items() if not error[0] <= tolerance}
    assert not wrong, f"{case.parallelism.layout} differs from one process by more than {tolerance:g}: {wrong}"


def _worst_tensor(by_rank: list[dict[str, Piece]], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    for rank, mine in enumerate(by_rank):
        if set(mine) != set(expected):
            return float("inf"), f"rank {rank} has other parameters: {sorted(set(mine) ^ set(expected))}"
    found = []
    for name, want in expected.items():
        covered = torch.zeros(want.shape, dtype=torch.bool)
        size = want.double().norm().item()
        for rank, mine in enumerate(by_rank):
            rows, columns, have = mine[name]
            where = (slice(rows.start, rows.stop), *([slice(columns.start, columns.stop)] if columns else []))
            covered[where] = True
            found.append(((have.double() - want[where].double()).norm().item() / size, f"{name} rank {rank}"))
        if not covered.all():
            return float("inf"), f"no rank holds some part of {name}"
    return max(found, key=_nan_last)


def _nan_last(error: tuple[float, str]) -> float:
    return float("inf") if error[0] != error[0] else error[0]
