"""The attention function in one process: equal to transformers' own for every family, and clear about its limits."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ndbench.parallel import attention

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral": ("mistral", {"sliding_window": 9, "head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 9}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("phi3", {"sliding_window": 9}),
    "gpt_neox": ("gpt_neox", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def _model(family: str, implementation: str, **changes: Any) -> Any:
    attention.register()
    model_type, extra = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**SHAPE, **extra, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    return model.train()


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_eager_attention(family: str, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (2, 32), generator=generator)
    starts = torch.tensor([[11], [20]])
    documents = torch.arange(32)[None] // starts if packed else None
    position_ids = torch.arange(32).expand(2, 32) - (documents * starts if documents is not None else 0)
    # transformers finds packed documents by itself where positions restart, and masks them.
    expected = _model(family, "eager")(input_ids=ids, position_ids=position_ids, use_cache=False).logits
    model = _model(family, attention.ATTENTION_NAME)
    assert attention.configure(model) == 2
    extra = {"document_ids": documents} if packed else {}
    actual = model(input_ids=ids, position_ids=position_ids, use_cache=False, **extra).logits
    assert ((actual - expected).norm() / expected.norm()).item() < 2e-6


class _Layer(torch.nn.Module):
    is_causal = True


def _layer() -> torch.nn.Module:
    layer = _Layer()
    attention.configure(layer)
    return layer


def _qkv(length: int = 8) -> list[torch.Tensor]:
    return [torch.randn(1, 2, length, 8) for _ in range(3)]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"attention_mask": torch.zeros(1, 1, 8, 8)}, "attention_mask"),
        ({"is_causal": False}, "non_causal"),
        ({"output_attentions": True}, "output_attentions"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "cu_seq_lens_q"),
        ({"a_keyword_of_next_year": 3}, "a_keyword_of_next_year=3"),
    ],
)
def test_a_keyword_that_is_not_implemented_is_refused_by_name(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attention.ndbench_attention(_layer(), *_qkv(), **keywords)


def test_keywords_that_change_nothing_are_accepted() -> None:
    qkv = _qkv()
    plain, _ = attention.ndbench_attention(_layer(), *qkv)
    told, _ = attention.ndbench_attention(
        _layer(), *qkv, s_aux=None, dropout=0.0, position_ids=torch.arange(8)[None], use_cache=False, softcap=None
    )
    assert torch.equal(plain, told)
    assert plain.shape == (1, 8, 2, 8)


def test_a_model_that_was_not_configured_is_refused_rather_than_run_without_context_parallelism() -> None:
    with pytest.raises(ValueError, match="configure"):
        attention.ndbench_attention(_Layer(), *_qkv())


def test_document_ids_of_a_shard_are_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"\[1, 4\].*\[1, 8\]"):
        attention.ndbench_attention(_layer(), *_qkv(), document_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_cross_attention_is_refused_with_the_numbers() -> None:
    q, k, v = _qkv()
    with pytest.raises(ValueError, match="8 queries but 4 keys"):
        attention.ndbench_attention(_layer(), q, k[:, :, :4], v[:, :, :4])


def test_a_sliding_layer_that_does_not_pass_its_window_is_refused() -> None:
    model = _model("gemma3", attention.ATTENTION_NAME)
    attention.configure(model)
    sliding = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="sliding window"):
        attention.ndbench_attention(sliding, *_qkv())


def test_patterns_that_are_not_implemented_are_refused_when_configured() -> None:
    model = _model("gemma3", attention.ATTENTION_NAME)
    model.config.layer_types = ["sliding_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="chunked_attention"):
        attention.configure(model)
    encoder = _Layer()
    encoder.is_causal = False
    with pytest.raises(ValueError, match="not causal"):
        attention.configure(encoder)
    with pytest.raises(ValueError, match="Linear has no attention layer"):
        attention.configure(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="rings"):
        attention.configure(_Layer(), None, "rings")


@pytest.mark.parametrize(
    ("family", "changes", "cp_size", "words"),
    [
        ("llama", {"attention_dropout": 0.1}, 1, "attention_dropout is 0.1"),
        ("gemma2", {}, 4, "attn_logit_softcapping is 50.0.*cp 4"),
        ("gemma3", {"use_bidirectional_attention": True}, 1, "use_bidirectional_attention"),
    ],
)
def test_a_configuration_is_refused_before_anything_is_built(
    family: str, changes: dict[str, Any], cp_size: int, words: str
) -> None:
    model_type, extra = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**SHAPE, **extra, **changes})
    (reason,) = attention.refuse_attention(config, cp_size)
    assert re.search(words, reason)
    assert attention.refuse_attention(AutoConfig.for_model("llama", **SHAPE), cp_size) == []


def test_a_configured_model_can_be_copied() -> None:
    model = _model("llama", attention.ATTENTION_NAME)
    attention.configure(model)
    twin = copy.deepcopy(model)
    ids = torch.randint(3, 97, (1, 16))
    assert torch.equal(twin(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits)
