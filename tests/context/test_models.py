"""One step of whole models under context parallelism equals one process: RoPE, labels and masks follow the tokens."""

from __future__ import annotations

import pytest

from tests.context.models import ModelCase, messages, model_errors
from tests.parity.pool import pool

TOLERANCE = 1e-5
"""Relative, in float32: loss, gradient norm, and ||actual - expected|| / ||expected|| of every parameter's gradient."""
LAYERS = 2
PACKED = ((11, 5, 48), (30, 34))
MODELS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 9, "head_dim": 8}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def _worst(case: ModelCase, cp_size: int) -> float:
    return max(value for errors in pool(cp_size).run(model_errors, case) for value in errors.values())


@pytest.mark.parametrize("documents", [None, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_a_step_equals_that_of_one_process(
    cp_size: int, method: str, model: str, documents: tuple[tuple[int, ...], ...] | None
) -> None:
    model_type, extra = MODELS[model]
    assert _worst(ModelCase(method, model_type, extra, documents), cp_size) < TOLERANCE


@pytest.mark.parametrize("mode", ["full", "selective", "attention"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_recomputing_activations_changes_nothing(method: str, mode: str) -> None:
    assert _worst(ModelCase(method, documents=PACKED, checkpointing=mode), 4) < TOLERANCE


@pytest.mark.parametrize(
    ("method", "mode", "expected"),
    [
        ("ring", "none", {"send": LAYERS * (3 + 5)}),
        ("ring", "full", {"send": LAYERS * (3 + 5 + 3)}),
        ("ring", "selective", {"send": LAYERS * (3 + 5 + 3)}),
        ("ring", "attention", {"send": LAYERS * (3 + 5 + 1)}),
        ("ulysses", "none", {"all_to_all": LAYERS * (2 + 2)}),
        ("ulysses", "full", {"all_to_all": LAYERS * (2 + 2 + 2)}),
        ("ulysses", "selective", {"all_to_all": LAYERS * (2 + 2)}),
        ("ulysses", "attention", {"all_to_all": LAYERS * (2 + 2 + 2)}),
    ],
)
def test_recomputation_sends_the_forward_messages_again_unless_they_are_kept(
    method: str, mode: str, expected: dict[str, int]
) -> None:
    assert pool(4).run(messages, ModelCase(method, checkpointing=mode)) == [expected] * 4


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_compiled_blocks_change_nothing(method: str) -> None:
    assert _worst(ModelCase(method, documents=PACKED, compiled=True), 2) < TOLERANCE


def test_softcapped_scores_work_under_ulysses() -> None:
    extra = {"head_dim": 8, "sliding_window": 9}
    assert _worst(ModelCase("ulysses", "gemma2", extra), 4) < TOLERANCE


def test_softcapped_scores_are_refused_under_the_ring() -> None:
    with pytest.raises(RuntimeError, match=r"ValueError: .*softcapping is 50.0.*cp_method=ring"):
        pool(2).run(model_errors, ModelCase("ring", "gemma2", {"head_dim": 8}))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("fault", ["rope_positions_not_permuted", "labels_not_permuted"])
def test_tokens_whose_positions_or_labels_stay_behind_are_seen(fault: str, method: str) -> None:
    worst = _worst(ModelCase(method, fault=fault), 4)
    if method == "ulysses":
        # Contiguous chunks: slicing in order is the right thing there.
        assert worst < TOLERANCE
    else:
        assert worst > 100 * TOLERANCE
