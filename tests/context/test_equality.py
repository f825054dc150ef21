"""Attention over 2, 4 and 8 ranks equals attention in one process: outputs and all gradients, with every kind of mask.

The number compared is ||actual - expected|| / ||expected|| over all ranks, expected in float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ndbench.parallel.context import METHODS, ring_bytes, ulysses_bytes
from tests.context.cases import NAMES, Case, attention_errors, sent, two_models_of_two_groups
from tests.parity.pool import pool

TOLERANCE = {torch.float64: 2e-15, torch.float32: 2e-6, torch.bfloat16: 6e-3}
PACKED = ((11, 5, 48), (30, 34))
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 13},
    "documents": {"documents": PACKED},
    "window and documents": {"window": 13, "documents": PACKED},
}


def relative_errors(case: Case, cp_size: int) -> dict[str, float]:
    """Relative error of the output and of each gradient, over all ranks; the absolute error where all must be zero."""
    shards = pool(cp_size).run(attention_errors, case, timeout=60)
    totals = {name: [sum(shard[name][i] for shard in shards) for i in (0, 1)] for name in NAMES}
    return {name: (error / (norm if norm > 1e-20 else 1.0)) ** 0.5 for name, (error, norm) in totals.items()}


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_outputs_and_gradients_equal_those_of_one_process(cp_size: int, method: str, mask: str, kv_heads: int) -> None:
    errors = relative_errors(Case(method, kv_heads=kv_heads, **MASKS[mask]), cp_size)
    assert max(errors.values()) < TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_precision_is_that_of_the_dtype(method: str, mask: str, dtype: torch.dtype) -> None:
    errors = relative_errors(Case(method, dtype=dtype, **MASKS[mask]), 4)
    assert max(errors.values()) < TOLERANCE[dtype], errors


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("mask", ["window", "documents", "window and documents"])
def test_tiles_of_any_height_give_the_same(mask: str, rows: int) -> None:
    errors = relative_errors(Case("ring", masked_rows=rows, **MASKS[mask]), 4)
    assert max(errors.values()) < TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("method", METHODS)
def test_four_thousand_tokens_agree_with_no_context_parallelism(method: str) -> None:
    case = Case(method, heads=4, kv_heads=2, length=4096, batch=1, explicit_reference=False)
    errors = relative_errors(case, 4)
    assert max(errors.values()) < TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("window", [1, 2, 63, 64, 1000])
@pytest.mark.parametrize("method", METHODS)
def test_windows_at_their_limits(method: str, window: int) -> None:
    errors = relative_errors(Case(method, window=window), 4)
    if window == 1:
        # Each token sees itself alone, so the scores have no influence; what is left is rounding.
        assert max(errors.pop(name) for name in ("dq", "dk")) < 1e-4
    assert max(errors.values()) < TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("method", METHODS)
def test_documents_of_one_token_each(method: str) -> None:
    errors = relative_errors(Case(method, length=16, batch=1, documents=((1,) * 16,)), 4)
    assert max(errors.pop(name) for name in ("dq", "dk")) < 1e-4
    assert max(errors.values()) < TOLERANCE[torch.float32], errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_bytes_on_the_wire_equal_the_formula(cp_size: int, dtype: torch.dtype) -> None:
    case = Case("ring", dtype=dtype)
    shape: dict[str, int] = {
        "cp_size": cp_size,
        "batch": case.batch,
        "kv_heads": case.kv_heads,
        "local_length": case.length // cp_size,
        "head_dim": case.head_dim,
        "element_size": dtype.itemsize,
    }
    messages = {"forward": cp_size - 1, "backward": 2 * cp_size - 3}
    for measured in pool(cp_size).run(sent, case):
        formula = ring_bytes(**shape)
        assert measured == {phase: {"send": (count, formula[phase])} for phase, count in messages.items()}
    for measured in pool(cp_size).run(sent, dataclasses.replace(case, window=9)):
        masked = ring_bytes(**shape, masked=True)
        assert {phase: row["send"][1] for phase, row in measured.items()} == masked
    for measured in pool(cp_size).run(sent, dataclasses.replace(case, method="ulysses")):
        formula = ulysses_bytes(heads=case.heads, **shape)
        assert measured == {phase: {"all_to_all": (2, formula[phase])} for phase in messages}


@pytest.mark.parametrize("method", METHODS)
def test_models_with_different_groups_live_in_one_process(method: str) -> None:
    assert all(pool(2).run(two_models_of_two_groups, method))
