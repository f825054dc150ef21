"""What a tensor-parallel plan does not allow is refused by name, before any process starts."""

from __future__ import annotations

import pytest

from ndbench.config import ModelConfig
from ndbench.engines.bundled_refusals import plan_refusals
from ndbench.parallel.config import ParallelismConfig
from tests.parity.cases import llama

TP2 = ParallelismConfig(tp_size=2)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "gpt_neox", "olmo2", "granite"]
)
def test_known_families_are_accepted(family: str) -> None:
    assert plan_refusals(llama(model_type=family), TP2) == []


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_style_that_is_not_known_is_named(family: str) -> None:
    refused = "; ".join(plan_refusals(llama(model_type=family), TP2))
    assert "'packed_colwise' of 'model.layers.*.mlp.experts.gate_up_proj'" in refused
    assert "'moe_tp_experts'" in refused
    assert plan_refusals(llama(model_type=family), ParallelismConfig(dp_shard_size=2)) == []


def test_a_model_without_a_plan_says_so() -> None:
    model = ModelConfig(model_type="gpt2", vocab_size=131, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    assert plan_refusals(model, TP2) == ["GPT2LMHeadModel has no tensor-parallel plan"]


def test_a_module_with_parameters_beside_column_wise_ones_is_named() -> None:
    """Qwen 3 norms queries and keys between its column-wise and row-wise projections; this plan forgets that."""
    plan = {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    refused = plan_refusals(llama(model_type="qwen3", tp_plan=plan), TP2)
    assert len(refused) == 2
    assert refused[0].startswith("model.layers.*.self_attn.q_norm (Qwen3RMSNorm) has parameters but no plan")


def test_a_pattern_that_matches_nothing_is_named() -> None:
    refused = plan_refusals(llama(tp_plan={"model.layer.*.q_proj": "colwise"}), TP2)
    assert refused == ["tp_plan pattern 'model.layer.*.q_proj' matches no module of LlamaForCausalLM"]


def test_features_that_do_not_divide_are_named_with_the_numbers() -> None:
    refused = plan_refusals(llama(intermediate_size=97), TP2)
    assert "model.layers.*.mlp.gate_proj has 97 output features, not a multiple of tp 2" in refused


def test_an_unknown_model_type_is_named() -> None:
    assert plan_refusals(llama(model_type="lama"), TP2) == ["model.model_type 'lama' is not known to transformers"]
