"""Every planted mistake moves some number by at least 100 times the tolerance of the parity tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.faults import faults
from tests.parity.cases import Case, case, layout, llama, training
from tests.parity.compare import TOLERANCE, errors

TP = layout(1, 1, 1, 2)
TP_WHOLE = replace(TP, sequence_parallel=False)
FSDP_TP = layout(1, 2, 1, 2)
CP = layout(1, 1, 2)
WINDOW = llama(model_type="mistral", sliding_window=10)
FALLING: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 1, "steps": 4}

PLANTED: dict[str, Case] = {
    "row_wise_sum_missing": case(TP_WHOLE),
    "reduce_scatter_without_sum": case(TP),
    "input_gradient_not_summed_over_tp": case(TP_WHOLE),
    "norm_weights_not_summed_over_tp": case(FSDP_TP),
    "replicated_gradients_counted_twice": case(FSDP_TP),
    "norm_of_local_shards": case(layout(1, 2)),
    "gradients_not_clipped": case(layout(1, 2)),
    "gradients_not_clipped_by_value": case(FSDP_TP, training=training(max_grad_value=1e-3)),
    "rate_moves_once_per_micro_step": case(layout(2), training=training(micro_batch_size=2, **FALLING)),
    "rate_moves_once_per_rank": case(FSDP_TP, training=training(**FALLING)),
    "mean_of_means": case(layout(2), silent=1),
    "gradients_doubled": case(FSDP_TP),
    "replicas_not_reduced": case(layout(2, 2)),
    "replicas_not_summed": case(layout(2)),
    "replicas_averaged": case(layout(2)),
    "only_the_last_micro_batch_counts": case(TP, training=training(micro_batch_size=4)),
    "mean_over_micro_batches": case(layout(2), training=training(micro_batch_size=2)),
    "labels_not_permuted": case(CP),
    "rope_positions_not_permuted": case(CP),
    "tokens_not_permuted": case(CP),
    "attention_within_the_shard_only": case(CP),
    "window_ignored": case(layout(1, 2), WINDOW),
    "documents_ignored": case(layout(1, 2), documents=True),
    "same_data_on_every_batch_rank": case(layout(2)),
    "vocabulary_shards_off_by_one": case(TP),
    "target_logit_not_summed_over_tp": case(TP),
    "loss_counted_by_every_tp_rank": case(TP),
    "weights_start_differently_per_rank": case(TP),
    "rope_frequencies_lost": case(layout(2)),
    "tied_embeddings_come_apart": case(TP, llama(tie_word_embeddings=True)),
    "parameters_rounded_to_bf16": case(layout(2)),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_far_outside_the_tolerance(fault: str) -> None:
    found = errors(PLANTED[fault], getattr(faults, fault))
    worst, where = max(found.values())
    assert not worst < 100 * TOLERANCE, f"{fault} moves nothing by more than {worst:g} ({where})"


def test_every_fault_of_the_list_is_planted() -> None:
    listed = {name for name in vars(faults) if hasattr(getattr(faults, name), "__wrapped__")}
    assert listed == set(PLANTED)
