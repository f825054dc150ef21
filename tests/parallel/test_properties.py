"""Whatever degrees, heads, lengths and document boundaries: the engine is one process, or refuses with the numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from ndbench.config import Cell, Config
from ndbench.engines.bundled import BundledEngine
from ndbench.engines.bundled_refusals import plan_refusals
from tests.parity.cases import Case, all_layouts, layout, llama, training
from tests.parity.compare import errors
from tests.parity.pool import pool
from tests.parity.rank_tasks import rank_and_sum

TOLERANCE = 1e-4
"""Ten times that of the parity tests: odd shapes have small gradients, whose rounding is relatively larger."""
SECONDS = 20.0
"""Limit of one example on the ranks: what hangs fails."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.sampled_from([2, 4, 4, 8]))
    sizes = draw(st.sampled_from([each.sizes for each in all_layouts() if each.world_size == world]))
    parallelism = layout(
        *sizes.values(),
        cp_method=draw(st.sampled_from(["ring", "ulysses"])),
        sequence_parallel=draw(st.booleans()),
        loss_parallel=draw(st.booleans()),
    )
    # Most shapes fit, so that numbers are compared; the rest is drawn freely, to be refused.
    length = draw(st.one_of(*[st.integers(1, 4).map(lambda n: n * 16)] * 3, st.integers(5, 64)))
    kv_heads = draw(st.sampled_from([8, 8, 4, 4, 2, 1, 3]))
    cuts = st.lists(st.integers(1, length - 3), max_size=4, unique=True).map(lambda row: tuple(sorted(row)))
    per_rank = draw(st.integers(1, 2))
    odd_batch = draw(st.sampled_from([0, 0, 0, 1]))
    batch = per_rank * parallelism.batch_size + odd_batch
    return Case(
        model=llama(
            model_type=draw(st.sampled_from(["llama", "qwen3"])),
            vocab_size=draw(st.integers(17, 150)),
            hidden_size=draw(st.sampled_from([24, 32, 44])),
            intermediate_size=draw(st.sampled_from([16, 40, 48, 50])),
            num_hidden_layers=1,
            num_attention_heads=kv_heads * draw(st.sampled_from([1, 1, 2, 3])),
            num_key_value_heads=kv_heads,
            head_dim=draw(st.sampled_from([4, 6, 8])),
            tie_word_embeddings=draw(st.booleans()),
        ),
        parallelism=parallelism,
        training=training(
            global_batch_size=batch,
            sequence_length=length,
            micro_batch_size=draw(st.sampled_from([None, 1])),
            loss_chunk_size=draw(st.sampled_from([None, 5])),
        ),
        steps=1,
        silent=draw(st.integers(0, batch - 1)),
        documents=draw(st.booleans()),
        boundaries=tuple(draw(st.lists(cuts, min_size=1, max_size=3))),
    )


def refusals(case: Case) -> list[str]:
    """What the parent process says before any rank starts."""
    config = Config(
        model=case.model, parallelism=case.parallelism, training=case.training, world_size=case.parallelism.world_size
    )
    refused = BundledEngine().refuse(Cell("cell", "suite", config))
    return [refused] if refused else plan_refusals(case.model, case.parallelism)


@pytest.fixture(scope="module")
def _started() -> None:
    """Starting ranks is no part of an example's time."""
    for world in (2, 4, 8):
        pool(world).run(rank_and_sum, 0)


@pytest.mark.usefixtures("_started")
@pytest.mark.timeout(240)
@settings(
    max_examples=25, deadline=None, phases=(Phase.reuse, Phase.generate), suppress_health_check=[HealthCheck.too_slow]
)
@given(cases())
def test_the_engine_is_one_process_or_refuses_with_the_numbers(case: Case) -> None:
    reasons = refusals(case)
    if reasons:
        event("refused")
        model, steps = case.model, case.training
        numbers = [*case.parallelism.sizes.values(), steps.sequence_length, steps.global_batch_size, model.hidden_size]
        assert all(any(str(number) in reason for number in numbers) for reason in reasons), reasons
        return
    event("compared")
    found: dict[str, Any] = errors(case, timeout=SECONDS)
    assert {kind: error for kind, error in found.items() if not error[0] <= TOLERANCE} == {}
