"""Closed forms against transformers' models and PyTorch's FLOP counter; conventions against published numbers."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndbench.config import Cell, Config, HardwareConfig, ModelConfig, TrainingConfig
from ndbench.measure.flops import attention_pairs, memory_estimate, memory_parts, mfu, parameter_count, step_flops
from ndbench.measure.shape import FAMILIES, shape_of
from ndbench.parallel.config import ParallelismConfig

SMALL = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LLAMA_3_8B = ModelConfig(
    name="llama3_8b",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
H100 = HardwareConfig(name="h100", device="cuda", peak_flops={"bf16": 989.5e12})


def small(model_type: str, tied: bool = False, window: int | None = None, **hf: Any) -> ModelConfig:
    sizes = dict(SMALL)
    if model_type in ("phi3", "gpt_neox", "granite", "olmo2", "qwen2"):
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]  # these have no head_dim of their own
    if model_type == "gpt_neox":
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return ModelConfig(model_type=model_type, tie_word_embeddings=tied, sliding_window=window, hf=hf, **sizes)


def built(model: ModelConfig, device: str = "meta") -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = {
        key: value
        for key, value in vars(model).items()
        if key in SMALL or key in ("tie_word_embeddings", "sliding_window", "max_position_embeddings")
    }
    if model.model_type in ("phi3", "granite", "olmo2", "qwen2", "gpt_neox"):
        keys.pop("head_dim")
    if model.model_type in ("llama", "granite", "olmo2", "gpt_neox"):
        keys.pop("sliding_window")
    config = CONFIG_MAPPING[model.model_type](**keys, **model.hf, pad_token_id=None)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_parameter_count_is_transformers_own(family: str, tied: bool) -> None:
    model = small(family, tied)
    assert parameter_count(model) == sum(parameter.numel() for parameter in built(model).parameters())


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "gemma3_text", "granite"])
def test_biases_are_counted_where_the_config_asks_for_them(family: str) -> None:
    model = small(family, attention_bias=True, **({"mlp_bias": True} if family in ("llama", "granite") else {}))
    assert parameter_count(model) == sum(parameter.numel() for parameter in built(model).parameters())


def test_llama_3_8b_has_8_03_billion_parameters() -> None:
    assert parameter_count(LLAMA_3_8B) == 8_030_261_248


def counted_by_torch(model: ModelConfig, batch: int, sequence: int) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    module = built(model, "cpu")
    ids = torch.randint(0, 259, (batch, sequence))
    with FlopCounterMode(display=False) as counter:
        module(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).mean().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2", "phi3", "olmo2", "gemma3_text", "gpt_neox"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """Eager attention multiplies the whole matrix: the palm convention. Rotary embeddings add a tiny one."""
    model = small(family, window=4096 if family == "gemma3_text" else None)
    training = TrainingConfig(global_batch_size=2, sequence_length=64)
    rotary = 2 * 2 * (16 // 2) * 64 * 8  # at most: 2 FLOPs x sequences x frequencies x positions, few calls
    assert step_flops(model, training, "palm") == pytest.approx(counted_by_torch(model, 2, 64), abs=rotary)


def test_llama_3_8b_costs_51_5_gflop_a_token_at_8k() -> None:
    training = TrainingConfig(global_batch_size=1, sequence_length=8192)
    causal = step_flops(LLAMA_3_8B, training, "causal")
    assert causal is not None
    assert causal / 8192 == pytest.approx(51.5e9, rel=1e-3)


def test_mfu_of_published_throughput_is_the_published_mfu() -> None:
    """Llama-3-8B, 8k, 10,000 tokens/s on an H100: 52.0 % counting half the attention matrix, 58.6 % counting all."""
    training = TrainingConfig(global_batch_size=1, sequence_length=8192)
    for convention, published in (("causal", 0.520), ("palm", 0.586)):
        flops = step_flops(LLAMA_3_8B, training, convention)
        assert flops is not None
        value, reason = mfu(flops * 10_000 / 8192, H100, "bf16")
        assert reason is None
        assert value == pytest.approx(published, abs=1e-3)


def test_flops_do_not_depend_on_how_the_batch_is_cut() -> None:
    whole = TrainingConfig(global_batch_size=16, sequence_length=128)
    cut = TrainingConfig(global_batch_size=16, sequence_length=128, micro_batch_size=1, activation_checkpointing="full")
    assert step_flops(LLAMA_3_8B, whole) == step_flops(LLAMA_3_8B, cut)


def test_a_sliding_window_bounds_the_attention() -> None:
    assert attention_pairs(8192, None, "causal") == 8192**2 / 2
    assert attention_pairs(8192, 1024, "palm") == 8192 * 1024
    assert attention_pairs(8192, 1024, "causal") == sum(min(i + 0.5, 1024) for i in range(8192))
    assert attention_pairs(512, 1024, "causal") == attention_pairs(512, None, "causal")


def test_a_window_counts_only_in_the_layers_that_have_one() -> None:
    windows = {
        family: shape.windows
        for family in ("mistral", "qwen3", "llama", "gemma3_text")
        if (shape := shape_of(small(family, window=32)))
    }
    assert windows["mistral"] == (32, 32, 32)
    assert windows["qwen3"] == (None, None, None)  # use_sliding_window is off
    assert windows["llama"] == (None, None, None)
    shape = shape_of(small("qwen3", window=32, use_sliding_window=True, max_window_layers=2))
    assert shape is not None
    assert shape.windows == (None, None, 32)
    shape = shape_of(small("qwen3", window=32, layer_types=["sliding_attention", "full_attention", "full_attention"]))
    assert shape is not None
    assert shape.windows == (32, None, None)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_alternating_windows_are_transformers_own(family: str) -> None:
    model = small(family, window=32)
    model.num_hidden_layers = 8
    shape = shape_of(model)
    assert shape is not None
    types = built(model).config.layer_types
    assert [window is not None for window in shape.windows] == [kind == "sliding_attention" for kind in types]


def test_an_unknown_convention_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="megatron"):
        step_flops(LLAMA_3_8B, TrainingConfig(), "megatron")


def test_an_unknown_model_has_no_closed_form() -> None:
    for model in (ModelConfig(target="my.module:build"), ModelConfig(model_type="mamba", vocab_size=8)):
        assert parameter_count(model) is None
        assert step_flops(model, TrainingConfig()) is None


def test_a_local_folder_gives_its_own_shape_but_for_what_is_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    assert parameter_count(ModelConfig(path=str(tmp_path))) == parameter_count(small("llama"))
    narrow = replace(small("llama"), hidden_size=24)
    assert parameter_count(ModelConfig(path=str(tmp_path), hidden_size=24)) == parameter_count(narrow)
    with pytest.raises(ValueError, match=r"no readable config.json"):
        parameter_count(ModelConfig(path=str(tmp_path / "none")))


def test_mfu_without_a_peak_is_null_and_names_the_file_to_add() -> None:
    value, reason = mfu(1e12, HardwareConfig(name="cuda", device="cuda"), "bf16")
    assert value is None
    assert reason is not None
    assert "peak_flops.bf16" in reason
    assert "hardware/<name>.yaml" in reason
    value, reason = mfu(1e12, H100, "fp8")
    assert value is None
    value, reason = mfu(1e12, HardwareConfig(), "fp32")
    assert value is None
    assert reason


def cell(layout: dict[str, int], model: ModelConfig = LLAMA_3_8B, **training: Any) -> Cell:
    options: dict[str, Any] = {"global_batch_size": 2, "sequence_length": 8192, "precision": "bf16", **training}
    parallelism = ParallelismConfig(**{f"{axis}_size": size for axis, size in layout.items()})
    config = Config(
        model=model,
        hardware=HardwareConfig(name="h200", device="cuda"),
        parallelism=parallelism,
        training=TrainingConfig(**options),
        world_size=parallelism.world_size,
    )
    return Cell(name="c", suite="s", config=config)


def test_states_are_sharded_over_fsdp_and_tp_and_replicated_over_dp_replicate() -> None:
    def states(**layout: int) -> int:
        parts = memory_parts(cell(layout))
        assert parts is not None
        return parts["parameters"] + parts["gradients"] + parts["optimizer"]

    whole = states()
    assert whole == 16 * 8_030_261_248
    assert states(dp_replicate=2) == whole
    assert states(dp_shard=2) == whole // 2
    assert states(dp_shard=2, cp=2) == whole // 4
    assert states(tp=4) == whole // 4


def test_memory_falls_as_techniques_promise() -> None:
    def estimate(layout: dict[str, int], **training: Any) -> int:
        value = memory_estimate(cell(layout, **training))
        assert value is not None
        return value

    plain = estimate({"dp_shard": 2})
    assert estimate({"dp_shard": 2}, activation_checkpointing="selective") < plain
    assert estimate({"dp_shard": 2}, activation_checkpointing="full") < estimate(
        {"dp_shard": 2}, activation_checkpointing="selective"
    )
    assert estimate({"dp_shard": 2}, loss_chunk_size=1024) < plain
    assert estimate({"dp_shard": 2}, optimizer="sgd") < plain
    assert estimate({"dp_shard": 2, "tp": 2}, global_batch_size=2) < plain
    assert estimate({"dp_replicate": 2}) > plain


def test_attention_kept_is_its_output_and_log_sum_exp_more_than_full_recomputation() -> None:
    """32 layers, 32 heads of 128: two bytes an element of the output, four a query and head; split by tp and cp."""

    def activations(mode: str, layout: dict[str, int]) -> int:
        parts = memory_parts(cell(layout, activation_checkpointing=mode))
        assert parts is not None
        return parts["activations"]

    for layout, tokens in (({}, 16384), ({"tp": 2}, 16384 // 2), ({"cp": 2}, 16384 // 2)):
        more = activations("attention", layout) - activations("full", layout)
        assert more == tokens * 32 * 32 * (128 * 2 + 4)
        assert activations("attention", layout) < activations("selective", layout) / 4


def test_offloaded_activations_are_those_of_two_layers() -> None:
    """Of 32; and as each layer needs as much as the one before, all gradients come beside them."""
    for mode, layer in (("full", 4096 * 2), ("attention", 4096 * 2 + 32 * (128 * 2 + 4))):
        plain, there = (
            memory_parts(cell({"cp": 2}, activation_checkpointing=mode, activation_offload=offload))
            for offload in (False, True)
        )
        assert plain is not None
        assert there is not None
        assert plain["activations"] - there["activations"] == 30 * 16384 // 2 * layer
        assert there["not_at_once"] == -min(there["gradients"], there["logits"])
        assert {key for key in plain if plain[key] != there[key]} <= {"activations", "not_at_once"}


def test_the_estimate_comes_near_measured_peaks() -> None:
    """Two H200s, bf16, AdamW, 8k tokens a GPU, blocks compiled: 8B FSDP 2 86.5 GiB, 66.7 with full recomputation; a 1B
    shape FSDP 2 23.4 compiled and 34.1 eager, DDP 2 41.0 compiled. (Allocated, so without the context.)"""
    llama_1b = copy.copy(LLAMA_3_8B)
    llama_1b.hidden_size, llama_1b.intermediate_size, llama_1b.num_hidden_layers = 2048, 8192, 16

    def gib(layout: dict[str, int], model: ModelConfig, **training: Any) -> float:
        parts = memory_parts(cell(layout, model, **training))
        assert parts is not None
        return (sum(parts.values()) - parts["context"]) / 2**30

    full = gib({"dp_shard": 2}, LLAMA_3_8B, compile=True, activation_checkpointing="full")
    assert gib({"dp_shard": 2}, LLAMA_3_8B, compile=True) == pytest.approx(86.5, rel=0.25)
    assert full == pytest.approx(66.7, rel=0.25)
    assert gib({"dp_shard": 2}, llama_1b, compile=True) == pytest.approx(23.4, rel=0.25)
    assert gib({"dp_shard": 2}, llama_1b) == pytest.approx(34.1, rel=0.25)
    assert gib({"dp_replicate": 2}, llama_1b, compile=True) == pytest.approx(41.0, rel=0.25)
