"""``ndbench generate``: text from a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ndbench.arguments import UsageError
from ndbench.matrix.sources import close_to

KEYS: dict[str, type[int] | type[float]] = {"max_tokens": int, "temperature": float, "top_k": int, "seed": int}


def main(args: argparse.Namespace) -> int:
    checkpoint, prompt, values = _read(args.words)
    from ndbench.training.generate import Sampling, generate

    generate(checkpoint, prompt, Sampling(**values), say=lambda text: print(text, end="", flush=True))
    print()
    return 0


def _read(words: list[str]) -> tuple[Path, str, dict[str, Any]]:
    places: list[str] = []
    prompt = "\n"
    known = ["prompt", *KEYS]
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key == "prompt":
            prompt = text
        elif equals and key in KEYS:
            values[key] = _number(key, text)
        elif equals and key.isidentifier() and not Path(word).expanduser().exists():
            raise UsageError(f"generate: no key '{key}'{close_to(key, known)}; keys: {', '.join(known)}")
        else:
            places.append(word)
    if len(places) != 1:
        raise UsageError(f"generate: one CHECKPOINT is needed, there are {len(places)}; keys: {', '.join(known)}")
    return Path(places[0]).expanduser(), prompt, values


def _number(key: str, text: str) -> float:
    try:
        value = KEYS[key](text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise UsageError(f"generate: {key}={text} is not a number of at least 0")
    return value
