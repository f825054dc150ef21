"""The ring adds up the gradients of its queries in float32, also in bf16: rounded once, not once a block."""

from __future__ import annotations

import pytest
import torch

from tests.context import dq_task
from tests.parity.pool import pool


@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_gradient_of_the_queries_is_rounded_once(cp_size: int) -> None:
    for found in pool(cp_size).run(dq_task.gradients, False):
        assert torch.equal(found["ring"], found["float32"])


def test_a_sum_in_bf16_is_seen() -> None:
    results = pool(4).run(dq_task.gradients, True)
    assert sum(int((found["ring"] != found["float32"]).sum()) for found in results) > 1000
