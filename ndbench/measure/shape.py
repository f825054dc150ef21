"""The shape of a dense decoder by transformers' model type: which weights a layer has. Pure: no torch, no transformers.

A family is one row of a table. A family that is not in the table has no closed form, and says so by None.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndbench.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """What sets a model type apart from Llama."""

    qkv_bias: bool | None = False
    """Biases of q, k and v; None means "as ``attention_bias`` says"."""
    output_bias: bool | None = False
    """Bias of the attention's output projection."""
    mlp_bias: bool | None = False
    gated: bool = True
    """Three MLP matrices (gate, up, down), else two."""
    norms: int = 2
    """Norms of a layer, of the hidden size."""
    norm_bias: bool = False
    qk_norm: str | None = None
    """``head``: norms of q and k over one head; ``all``: over all heads."""
    windows: str = "none"
    """Layers with a sliding window when ``layer_types`` does not say: ``none``, ``all``, ``late`` (from
    ``max_window_layers`` on, if ``use_sliding_window``), or ``every N``: all but each N-th."""
    default_layers_with_window: int = 28


FAMILIES = {
    "llama": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
    "granite": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
    "mistral": Family(windows="all"),
    "qwen2": Family(qkv_bias=True, windows="late"),
    "qwen3": Family(qkv_bias=None, output_bias=None, qk_norm="head", windows="late"),
    "phi3": Family(windows="all"),
    "olmo2": Family(qkv_bias=None, output_bias=None, qk_norm="all"),
    "gemma2": Family(qkv_bias=None, output_bias=None, norms=4, windows="every 2"),
    "gemma3_text": Family(qkv_bias=None, output_bias=None, norms=4, qk_norm="head", windows="every 6"),
    "gpt_neox": Family(qkv_bias=True, output_bias=True, mlp_bias=True, gated=False, norm_bias=True),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense decoder, all known."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    family: Family
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None where a layer sees every token before."""

    @property
    def attention_matrices(self) -> int:
        """Weights of one layer's q, k, v and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_matrices(self) -> int:
        """Weights of one layer's MLP."""
        return self.hidden * self.intermediate * (3 if self.family.gated else 2)

    @property
    def layer_matrices(self) -> int:
        return self.attention_matrices + self.mlp_matrices

    @property
    def layer_vectors(self) -> int:
        """Biases and norms of one layer."""
        norm = self.hidden * (2 if self.family.norm_bias else 1)
        qk_norm = {
            None: 0,
            "head": 2 * self.head_dim,
            "all": (self.heads + self.kv_heads) * self.head_dim,
        }[self.family.qk_norm]
        biases = self.qkv_bias * (self.heads + 2 * self.kv_heads) * self.head_dim + self.output_bias * self.hidden
        biases += self.mlp_bias * (self.intermediate * (2 if self.family.gated else 1) + self.hidden)
        return self.family.norms * norm + qk_norm + biases

    @property
    def embedding(self) -> int:
        """Weights of the token embedding, and of an untied ``lm_head``."""
        return self.vocab * self.hidden


def shape_of(model: ModelConfig) -> Shape | None:
    """The shape of ``model``, or None when it is not a dense decoder of a family we know (a ``target``, say).

    Raises ``ValueError`` when a local Hugging Face folder has no readable ``config.json``.
    """
    if model.target is not None:
        return None
    values = _from_fields(model)
    if model.path is not None:  # what config.json says, but for what the user has set
        written = _from_folder(model.path)
        values = {**written, **{name: value for name, value in values.items() if name in written}}
    family = FAMILIES.get(str(values.get("model_type")))
    sizes = [values.get(key) for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")]
    if family is None or any(size is None for size in [*sizes, values.get("intermediate_size")]):
        return None
    vocab, hidden, layers, heads = (int(size) for size in sizes if size is not None)

    def bias(fixed: bool | None, key: str) -> bool:
        return bool(values.get(key, False)) if fixed is None else fixed

    return Shape(
        vocab=vocab,
        hidden=hidden,
        intermediate=int(values["intermediate_size"]),
        layers=layers,
        heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or hidden // heads),
        tied=bool(values.get("tie_word_embeddings", False)),
        family=family,
        qkv_bias=bias(family.qkv_bias, "attention_bias"),
        output_bias=bias(family.output_bias, "attention_bias"),
        mlp_bias=bias(family.mlp_bias, "mlp_bias"),
        windows=_windows(family, layers, values),
    )


def _from_fields(model: ModelConfig) -> dict[str, Any]:
    fields = {name: value for name, value in vars(model).items() if name not in ("hf", "kwargs") and value is not None}
    return {**fields, **model.hf}


def _from_folder(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json"
    try:
        values = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"model.path '{path}' has no readable config.json: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object")
    return values


def _windows(family: Family, layers: int, values: dict[str, Any]) -> tuple[int | None, ...]:
    window = values.get("sliding_window")
    if window is None:
        return (None,) * layers
    types = values.get("layer_types")
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])
    if family.windows == "all":
        return (window,) * layers
    if family.windows == "late" and values.get("use_sliding_window", False):
        first = int(values.get("max_window_layers", family.default_layers_with_window))
        return tuple(window if layer >= first else None for layer in range(layers))
    if family.windows.startswith("every "):
        period = int(values.get("sliding_window_pattern", family.windows.removeprefix("every ")))
        return tuple(window if (layer + 1) % period else None for layer in range(layers))
    return (None,) * layers
