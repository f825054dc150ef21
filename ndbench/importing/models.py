"""A model by its Hugging Face id or folder: one that comes with ndbench, or a local ``config.json``.

Asks no network. A hub id whose shape is not shipped is looked for in the local Hugging Face cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_LLAMA_3 = r"(meta-)?llama-3(\.\d)?"
_VARIANT = r"(-(base|instruct|hf))*"

SHIPPED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (_LLAMA_3 + r"-8b" + _VARIANT, {"model": "llama_8b"}, "Llama 3's 8B shape; its long-context scaling of RoPE aside"),
    (_LLAMA_3 + r"-70b" + _VARIANT, {"model": "llama_70b"}, "Llama 3's 70B shape; its scaling of RoPE aside"),
    (
        r"llama-3\.2-1b" + _VARIANT,
        {"model": "llama_1b", "model.tie_word_embeddings": True},
        "Llama 3.2 1B's shape, output matrix tied as in the original; its scaling of RoPE aside",
    ),
    (r"qwen3-8b" + _VARIANT, {"model": "qwen3_8b"}, "Qwen3 8B's shape"),
    (r"mistral-7b(-instruct)?-v0\.1", {"model": "mistral_7b"}, "Mistral 7B v0.1's shape"),
    (
        r"mistral-7b(-instruct)?-v0\.2",
        {"model": "mistral_7b", "model.sliding_window": None},
        "Mistral 7B's shape; v0.2 has no sliding window",
    ),
    (
        r"mistral-7b(-instruct)?-v0\.3",
        {"model": "mistral_7b", "model.sliding_window": None, "model.vocab_size": 32768},
        "Mistral 7B's shape; v0.3 has no sliding window and 32768 tokens",
    ),
)
"""(pattern of the name after the owner, overrides, why)."""


def find_model(name: str, beside: Path) -> tuple[dict[str, Any], str] | None:
    """(overrides, why) for a folder (also relative to ``beside``, the imported file's) or a hub id, else None."""
    for folder in (Path(name).expanduser(), beside / name):
        if (folder / "config.json").is_file():
            return {"model": "custom", "model.path": str(folder)}, "a local folder"
    for pattern, overrides, why in SHIPPED:
        if re.fullmatch(pattern, name.rpartition("/")[2].lower()):
            return overrides, why
    cached = _cached(name)
    if cached is not None:
        return {"model": "custom", "model.path": str(cached)}, "in the local Hugging Face cache"
    return None


def _cached(name: str) -> Path | None:
    """The newest snapshot in the local cache that has a ``config.json``."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = list(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def how_to_name(name: str) -> str:
    """What to do about a model that is not found."""
    return (
        f"{name} is no model that comes with ndbench, no folder and not in the local Hugging Face cache: "
        "add model=FOLDER, a folder with its config.json (hf download "
        f"{name} config.json --local-dir FOLDER)"
    )
