"""Whatever the lengths, heads, windows and document boundaries: equal to one process, or refused with the numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ndbench.parallel.context import METHODS, refuse_context
from tests.context.cases import Case
from tests.context.test_equality import TOLERANCE, relative_errors


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, Case]:
    cp_size = draw(st.sampled_from([2, 4]))
    # Two of three lengths divide by 2 · cp; the others are there to be refused.
    length = draw(st.one_of(*[st.integers(1, 12).map(lambda n: n * 2 * cp_size)] * 2, st.integers(1, 96)))
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 4))
    batch = draw(st.integers(1, 3))
    documents = None
    if draw(st.booleans()):
        cuts = st.lists(st.integers(1, max(length - 1, 1)), max_size=5, unique=True)
        edges = [[0, *sorted(cut for cut in draw(cuts) if cut < length), length] for _ in range(batch)]
        documents = tuple(tuple(b - a for a, b in itertools.pairwise(row)) for row in edges)
    return cp_size, Case(
        method=draw(st.sampled_from(METHODS)),
        heads=heads,
        kv_heads=kv_heads,
        length=length,
        head_dim=draw(st.sampled_from([4, 8, 20])),
        batch=batch,
        window=draw(st.one_of(st.none(), st.integers(2, length + 2))),
        documents=documents,
    )


@settings(max_examples=25, deadline=20_000, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
@pytest.mark.timeout(120)
def test_either_equal_to_one_process_or_refused_with_the_numbers(problem: tuple[int, Case]) -> None:
    cp_size, case = problem
    reasons = refuse_context(
        cp_size=cp_size,
        method=case.method,
        sequence_length=case.length,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
    )
    if reasons:
        assert all(str(case.length) in reason or str(case.heads) in reason for reason in reasons)
        # What the rule refuses does fail, with a message of ours and on every rank: the rule is not overcautious.
        with pytest.raises(RuntimeError, match=r"ValueError: (sequence_length|ulysses splits)"):
            relative_errors(case, cp_size)
        return
    errors = relative_errors(case, cp_size)
    if case.documents and max(max(lengths) for lengths in case.documents) == 1:
        # Documents of one token: the scores have no influence, and their gradients are rounding.
        assert max(errors.pop(name) for name in ("dq", "dk")) < 1e-4
    assert max(errors.values()) < 2 * TOLERANCE[torch.float32], errors
