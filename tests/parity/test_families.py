"""Other families of transformers are one process too, each by its own plan, on FSDP x TP, FSDP x CP and TP x CP."""

from __future__ import annotations

from typing import Any

import pytest

from ndbench.config import ModelConfig
from tests.parity.cases import case, layout, llama
from tests.parity.compare import TOLERANCE, assert_parity

LAYOUTS = [layout(1, 2, 1, 2), layout(1, 2, 2, 1), layout(1, 1, 2, 2)]

FAMILIES: dict[str, ModelConfig] = {
    "qwen2": llama(model_type="qwen2"),
    "qwen3": llama(model_type="qwen3", head_dim=16),
    "mistral": llama(model_type="mistral"),
    "mistral_window": llama(model_type="mistral", sliding_window=10),
    "gemma": llama(model_type="gemma", head_dim=8, tie_word_embeddings=True),
    "gemma3": llama(
        model_type="gemma3_text",
        head_dim=8,
        sliding_window=10,
        tie_word_embeddings=True,
        hf={"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    ),
    "phi3": llama(model_type="phi3"),
    "gpt_neox": llama(model_type="gpt_neox", num_key_value_heads=None),
    "olmo2": llama(model_type="olmo2"),
    "granite": llama(
        model_type="granite",
        hf={
            "logits_scaling": 4.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
        },
    ),
}
LOOSER = {"gemma": 3e-5, "gemma3": 3e-5, "granite": 3e-5}
"""Families that multiply their embeddings lose a digit in float32 whatever the layout."""


@pytest.mark.parametrize("parallelism", LAYOUTS, ids=lambda each: each.layout)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_one_process(family: str, parallelism: Any) -> None:
    assert_parity(case(parallelism, FAMILIES[family]), LOOSER.get(family, TOLERANCE))
