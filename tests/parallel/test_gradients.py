"""The norm counts every element of the global gradient once, whatever mixture of meshes it lives on."""

from __future__ import annotations

import pytest

from tests.parallel.rank_tasks import norms
from tests.parity.pool import pool


def test_each_element_counts_once() -> None:
    """4 x 6 sharded over both axes, 2 x 6 over tp, 6 replicated, 6 in a plain tensor: 48 ones."""
    results = pool(4).run(norms)
    assert [each["norm"] for each in results] == pytest.approx([48**0.5] * 4, rel=1e-6)


def test_other_scalars_are_summed_in_the_same_reduction() -> None:
    assert [each["also"] for each in pool(4).run(norms)] == [6.0] * 4


def test_clipping_scales_every_kind_of_gradient() -> None:
    assert [each["largest"] for each in pool(4).run(norms, 1.0)] == pytest.approx([48**-0.5] * 4, rel=1e-5)
    assert [each["largest"] for each in pool(4).run(norms, 100.0)] == [1.0] * 4
