"""Text from a trained model in one process: the quickest proof that training worked.

The whole window is computed again for each token: simple, right for every model, and fast enough to look at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ndbench.config import Config, config_from_dict
from ndbench.engines.bundled import BundledEngine
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.mesh import build_mesh
from ndbench.parallel.state import Checkpoints
from ndbench.parallel.state_index import read_index, whole_checkpoints
from ndbench.training.corpus import END_OF_DOCUMENT, load_tokenizer
from ndbench.training.data import BYTE_VOCABULARY


@dataclass(frozen=True)
class Sampling:
    max_tokens: int = 200
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int = 50
    """Draw from so many of the likeliest tokens; 0 from all."""
    seed: int = 0


class Codec:
    """Between text and tokens: a tokenizer's, or bytes."""

    def __init__(self, config: Config) -> None:
        self._tokenizer: Any = None if config.data.tokenizer is None else load_tokenizer(config.data.tokenizer)
        self.end: int | None = None if config.data.documents == "stream" else END_OF_DOCUMENT
        self.size: int | None = BYTE_VOCABULARY
        """Tokens that can be decoded; None: all."""
        if self._tokenizer is not None:
            self.end, self.size = self._tokenizer.eos_token_id, None

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return bytes(tokens).decode("utf-8", "replace")
        return str(self._tokenizer.decode(tokens))


def find_checkpoint(path: Path) -> Path:
    """``path`` itself, or the newest whole checkpoint in it. Raises ``ValueError`` when there is none."""
    found = whole_checkpoints(path) if path.is_dir() else []
    if found:
        return found[-1][1]
    read_index(path)
    return path


def generate(
    path: Path, prompt: str, sampling: Sampling, say: Callable[[str], None] = lambda _: None
) -> tuple[str, str]:
    """(prompt, what the model of a checkpoint adds to it). Raises ``ValueError`` for a folder that holds none.

    ``say`` is given the prompt when the model is there, then what is added as it comes.
    Makes a process group of one for its time, so there must be none yet.
    """
    path = find_checkpoint(path)
    config = config_from_dict(read_index(path).rest["progress"]["config"])
    codec = Codec(config)
    tokens = codec.encode(prompt)
    if not tokens:
        raise ValueError("prompt is empty: there is nothing to go on from")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = _load(path, config, device)
        say(prompt)
        drawn = sample(model, tokens, config.training.sequence_length, sampling, codec.size, codec.end)
        text = spell(drawn, codec, say)
    finally:
        dist.destroy_process_group()
    return prompt, text


def spell(tokens: Iterable[int], codec: Codec, say: Callable[[str], None]) -> str:
    """The text of ``tokens``, given to ``say`` as they come; a letter that is half there waits for its other bytes."""
    known: list[int] = []
    text, said = "", 0
    for token in tokens:
        known.append(token)
        text = codec.decode(known)
        whole = len(text.rstrip(HALF))
        if whole > said:
            say(text[said:whole])
            said = whole
    if text[said:]:
        say(text[said:])
    return text


HALF = "\ufffd"
"""What a decoder writes for bytes that are no letter, or not yet."""


def sample(
    model: nn.Module, tokens: list[int], window: int, sampling: Sampling, size: int | None, end: int | None
) -> Iterator[int]:
    """Tokens that follow ``tokens``, until ``end`` (not given out) or the limit; the last ``window`` are looked at.

    Only tokens below ``size`` are drawn.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    known = list(tokens)
    for _ in range(sampling.max_tokens):
        seen = torch.tensor([known[-window:]], device=device)
        with torch.no_grad():
            out = model(input_ids=seen, position_ids=torch.arange(seen.shape[1], device=device)[None])
        logits = (out if isinstance(out, torch.Tensor) else out.logits)[0, -1, :size].float().cpu()
        token = _draw(logits, sampling, generator)
        if token == end:
            return
        known.append(token)
        yield token


def _draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial(logits.softmax(dim=0), 1, generator=generator))


def _load(path: Path, config: Config, device: torch.device) -> nn.Module:
    plain = dataclasses.replace(
        config.training,
        precision="fp32",
        compile=False,
        cuda_graphs=False,
        activation_checkpointing="none",
        loss_chunk_size=None,
        micro_batch_size=None,
        optimizer="sgd",
    )
    mesh = build_mesh(ParallelismConfig(), device.type)
    engine = BundledEngine()
    engine.build(config.model, plain, mesh, device)
    model = engine.stepper.model
    Checkpoints(path.parent, mesh).load(path, model, None, [])
    return model.eval()
