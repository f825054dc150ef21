"""Bugs planted in context parallelism: each moves outputs or gradients by at least 100 times the parity tolerance."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.context.cases import Case
from tests.context.test_equality import PACKED, TOLERANCE, relative_errors

RING, ULYSSES = Case("ring"), Case("ulysses")
BOTH = {"window": 13, "documents": PACKED}
FAULTS = {
    "wrong_permutation": RING,
    "last_lse_dropped": RING,
    "last_block_dropped": RING,
    "blocks_averaged": RING,
    "kv_gradients_one_hop_short": RING,
    "scaling_ignored": RING,
    "window_ignored": Case("ring", window=13),
    "window_off_by_one": Case("ring", window=13),
    "documents_ignored": Case("ring", documents=PACKED),
    "infinite_masks": Case("ring", documents=PACKED),
    "chunks_joined_in_reverse": ULYSSES,
    "no_exchange_in_backward": ULYSSES,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_bug_is_seen(fault: str) -> None:
    case = FAULTS[fault]
    sound = relative_errors(case, 4)
    broken = relative_errors(dataclasses.replace(case, fault=fault), 4)
    tolerance = TOLERANCE[torch.float32]
    assert max(sound.values()) < tolerance
    seen = max(broken.values())
    assert math.isnan(seen) or seen > 100 * tolerance, broken


@pytest.mark.parametrize("fault", ["wrong_permutation", "window_ignored", "window_off_by_one", "documents_ignored"])
def test_a_planted_bug_is_seen_under_ulysses(fault: str) -> None:
    case = Case("ulysses", fault=fault, **BOTH)  # type: ignore[arg-type]
    assert max(relative_errors(case, 4).values()) > 100 * TOLERANCE[torch.float32]
