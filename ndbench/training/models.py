"""From a model's configuration to the model itself, with its parameters on meta and its buffers real.

Three sources: a transformers model type with its fields, a local Hugging Face folder, or a callable of the user's. No
weights are read and no network is used. It knows nothing of how a model is sharded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ndbench import dotted
from ndbench.config import ModelConfig
from ndbench.parallel._transformers_private import leave_torchao_alone
from ndbench.parallel.attention import ATTENTION_NAME, register

FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "tie_word_embeddings",
    "max_position_embeddings",
    "initializer_range",
)
"""Fields of :class:`ModelConfig` that carry transformers' names."""

SPECIAL_TOKENS: dict[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
"""Unset by default: a model's usual ids need not exist in a small vocabulary, and padding would freeze a row."""


@dataclass
class BuiltModel:
    """A model whose parameters are on meta."""

    model: nn.Module
    blocks: list[str]
    """Names of the transformer blocks, in order."""
    constants: dict[str, float] = field(default_factory=dict)
    """Parameters that the constructor made constant (norm weights): name -> value."""
    transformers: bool = True
    """Attention goes through transformers' registry."""


def build_model(config: ModelConfig) -> BuiltModel:
    """Build the model of ``config``; raises ``ValueError`` naming what is not known or does not import."""
    with _EmptyOnMeta():
        model = _target(config) if config.target is not None else _causal_lm(config)
    constants = _parameters_to_meta(model)
    return BuiltModel(model, _blocks(model, config), constants, transformers=config.target is None)


def transformers_config(config: ModelConfig) -> Any:
    """The transformers configuration of a model that is not a ``target``."""
    leave_torchao_alone()
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    if config.path is not None:
        if not (Path(config.path) / "config.json").is_file():
            raise ValueError(f"model.path {config.path} has no config.json")
        return AutoConfig.from_pretrained(config.path, local_files_only=True, **{**config.hf, **_changed(config)})
    if config.model_type is None or config.model_type not in CONFIG_MAPPING:
        raise ValueError(f"model.model_type '{config.model_type}' is not known to transformers")
    fields = {name: getattr(config, name) for name in FIELDS if getattr(config, name) is not None}
    try:
        made = CONFIG_MAPPING[config.model_type](**{**SPECIAL_TOKENS, **fields, **config.hf})
    except StrictDataclassError as error:
        raise ValueError(f"model type '{config.model_type}': {error.__cause__ or error}") from error
    for name, alias in made.attribute_map.items():
        if name in FIELDS and alias in config.hf:
            raise ValueError(f"model.hf.{alias}: use model.{name}")
    if config.sliding_window is not None and getattr(type(made), "sliding_window", made) is made:
        raise ValueError(f"model.sliding_window={config.sliding_window}: '{config.model_type}' has no sliding window")
    if config.sliding_window is not None and made.sliding_window is None:
        raise ValueError(
            f"model.sliding_window={config.sliding_window}: '{config.model_type}' has a window with "
            "+model.hf.use_sliding_window=true only"
        )
    one_window = getattr(made, "sliding_window", None) is not None and not getattr(made, "layer_types", None)
    if config.sliding_window is None and one_window and "sliding_window" not in config.hf:
        made.sliding_window = None  # no window asked for, where the class would have one by default
    return made


def _changed(config: ModelConfig) -> dict[str, Any]:
    """Fields of a model in a folder that the user has set to something else than its config.json says."""
    assert config.path is not None, "asked for"
    written = json.loads((Path(config.path) / "config.json").read_text())
    fields = {name: getattr(config, name) for name in FIELDS if name in written or name == "sliding_window"}
    changed = {name: value for name, value in fields.items() if value is not None and value != written.get(name)}
    kinds, layers = config.hf.get("layer_types"), config.num_hidden_layers
    if "num_hidden_layers" in changed and kinds is not None and layers is not None:
        if layers > len(kinds):
            raise ValueError(
                f"model.num_hidden_layers {layers}, but layer_types names {len(kinds)}: give model.hf.layer_types too"
            )
        changed["layer_types"] = kinds[:layers]
    return changed


def _causal_lm(config: ModelConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    register()
    made = transformers_config(config)
    made.use_cache = False  # recomputed layers would append their keys to a cache a second time
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            made, attn_implementation=ATTENTION_NAME, dtype=torch.float32
        )
    except KeyError as error:
        raise ValueError(f"model.model_type '{config.model_type}' has no causal language model: {error}") from error
    return model


def _target(config: ModelConfig) -> nn.Module:
    assert config.target is not None
    factory = dotted.load(config.target, "model.target", "callable")
    model = factory(**config.kwargs)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.target '{config.target}' returned a {type(model).__name__}, not an nn.Module")
    return model


class _EmptyOnMeta(TorchFunctionMode):
    """Put uninitialised tensors on meta: weights take no memory, while buffers, which are computed, stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _parameters_to_meta(model: nn.Module) -> dict[str, float]:
    """Move what is left of real parameters to meta, keep ties; returns the constants among them."""
    constants: dict[str, float] = {}
    moved: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                continue
            if id(parameter) not in moved:
                first = float(parameter.detach().flatten()[0])
                if bool((parameter == first).all()):
                    constants[f"{module_name}.{name}" if module_name else name] = first
                moved[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            module.register_parameter(name, moved[id(parameter)])
    return constants


def _blocks(model: nn.Module, config: ModelConfig) -> list[str]:
    if config.blocks is not None:
        try:
            children = model.get_submodule(config.blocks).named_children()
        except AttributeError as error:
            raise ValueError(f"model.blocks '{config.blocks}' is no module of {type(model).__name__}") from error
        return [f"{config.blocks}.{name}" for name, _ in children]
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [name for name, module in model.named_modules() if type(module).__name__ in kinds]
