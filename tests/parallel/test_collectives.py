"""Shards of the sequence are gathered and partial sums scattered, forward and backward, without needless copies."""

from __future__ import annotations

import pytest

from tests.parallel.rank_tasks import sequence_exchange
from tests.parity.pool import pool


@pytest.mark.parametrize("batch", [1, 2])
def test_a_gather_and_a_scatter_are_each_others_adjoint(batch: int) -> None:
    for found in pool(2).run(sequence_exchange, batch):
        assert found["gathered"]
        assert found["scattered"]


def test_one_sequence_is_exchanged_without_a_copy() -> None:
    assert [found["copies"] for found in pool(2).run(sequence_exchange, 1)] == [[], []]


def test_of_several_sequences_the_parts_are_joined() -> None:
    """What the test above must be able to see: two gathers, two scatters."""
    assert [found["copies"] for found in pool(2).run(sequence_exchange, 2)] == [["aten::cat"] * 4] * 2
