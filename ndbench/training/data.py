"""What a step is fed: sequences that are a pure function of (configuration, global sequence index).

Every rank computes its own part of the global batch, so the data is the same under every layout and nothing is sent.
Ranks of one tp x cp group ask for the same batch rank and get the same samples; different batch ranks get different
ones. This module knows nothing of engines or of context parallelism: it hands out whole sequences.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ndbench.config import Config, DataConfig

if TYPE_CHECKING:
    import torch

    from ndbench.engines.protocol import Batch

Tokens = npt.NDArray[np.int64]
IGNORED = -100
"""Label of a position that bears no loss, as in torch's cross-entropy."""
BYTE_VOCABULARY = 256


class Source(Protocol):
    """An endless supply of token sequences."""

    def sequence(self, index: int, length: int) -> Tokens:
        """Tokens [length] of global sequence ``index``."""

    def digest(self) -> str:
        """Hash of everything the tokens depend on."""


class MarkovSource:
    """A Markov chain of known entropy, identical on every machine and with every library version.

    State x moves to (x + offset_j) mod vocabulary with probability (1/2, 1/4, 1/8, 1/8); a token is a seeded
    permutation of the state. The entropy rate is 1.75 bits = 1.213 nats a token, the floor of the loss. Only the raw
    output of counter-based Philox is used, which numpy guarantees to be stable; its distributions are not.
    """

    ENTROPY_NATS = 1.75 * float(np.log(2.0))
    _CHOICE = np.array([0, 0, 0, 0, 1, 1, 2, 3])

    def __init__(self, vocab_size: int, seed: int) -> None:
        if vocab_size < 5:
            raise ValueError(f"data=markov needs a vocabulary of at least 5 tokens, model.vocab_size is {vocab_size}")
        self.vocab_size, self.seed = vocab_size, seed
        keys = np.random.Philox(key=[seed, 0]).random_raw(vocab_size)
        self._token_of_state = np.argsort(keys, kind="stable").astype(np.int64)
        raw = np.random.Philox(key=[seed, 1]).random_raw(64)
        offsets = dict.fromkeys(int(value % (vocab_size - 1)) + 1 for value in raw)
        offsets.update(dict.fromkeys(range(1, 5)))
        self._offsets = np.array(list(offsets)[:4], dtype=np.int64)

    def sequence(self, index: int, length: int) -> Tokens:
        raw = np.random.Philox(key=[self.seed, 2], counter=[0, 0, index, 0]).random_raw(length)
        steps = self._offsets[self._CHOICE[raw >> 61]]
        steps[0] = int(raw[0] % self.vocab_size)
        states = np.cumsum(steps) % self.vocab_size
        tokens: Tokens = self._token_of_state[states]
        return tokens

    def digest(self) -> str:
        return _sha([f"markov {self.vocab_size} {self.seed}".encode()])


class CorpusSource:
    """Windows of one long token stream, in an order reshuffled every epoch by the seed."""

    def __init__(self, tokens: Tokens, seed: int) -> None:
        self.tokens, self.seed = tokens, seed

    def sequence(self, index: int, length: int) -> Tokens:
        windows = (len(self.tokens) - 1) // (length - 1)
        if windows < 1:
            raise ValueError(f"the corpus has {len(self.tokens)} tokens, fewer than one sequence of {length}")
        epoch, position = divmod(index, windows)
        start = _shuffled(position, windows, self.seed, epoch) * (length - 1)
        return self.tokens[start : start + length]

    def digest(self) -> str:
        return _sha([str(self.seed).encode(), self.tokens.tobytes()])


def _shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """Element ``position`` of a permutation of range(count): an affine map whose multiplier is prime to count."""
    raw = np.random.Philox(key=[seed, 3], counter=[0, 0, epoch, 0]).random_raw(2)
    multiplier = int(raw[0]) % count | 1
    while np.gcd(multiplier, count) != 1:
        multiplier += 2
    return (position * multiplier + int(raw[1])) % count


def source_files(root: Path) -> Iterator[Path]:
    """Python files below ``root`` in sorted order, lazily: a few megabytes need only the first folders."""
    entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
            yield from source_files(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield Path(entry.path)


def read_bytes(files: Iterator[Path], limit: int) -> bytes:
    """Contents of ``files``, a newline between two, cut at ``limit`` bytes; ValueError names an unreadable file."""
    parts: list[bytes] = []
    size = 0
    for file in files:
        try:
            part = file.read_bytes()
        except OSError as error:
            raise ValueError(f"data file {file} cannot be read: {error.strerror}") from error
        parts.append(part)
        size += len(part) + 1
        if size >= limit:
            break
    return b"\n".join(parts)[:limit]


def _corpus(config: DataConfig, vocab_size: int) -> Tokens:
    if config.name == "source":
        spec = importlib.util.find_spec("transformers")
        assert spec is not None, "transformers is a dependency"
        assert spec.origin is not None, "transformers is a regular package"
        text = read_bytes(source_files(Path(spec.origin).parent), config.max_bytes)
    else:
        if not config.files:
            raise ValueError("data=text needs data.files=[a.txt,b.txt]")
        text = read_bytes(iter([Path(name) for name in config.files]), config.max_bytes)
    if config.tokenizer is None:
        tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, local_files_only=True)
        tokens = np.array(tokenizer(text.decode("utf-8", "replace"))["input_ids"], dtype=np.int64)
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise ValueError(f"data has token {int(tokens.max())}, model.vocab_size is {vocab_size}")
    return tokens


class Dataset:
    """The batches of a cell. ``tokens_per_step`` counts each token of the global batch once."""

    def __init__(self, config: Config, source: Source) -> None:
        self.config, self.source = config, source
        self.global_batch_size = config.training.global_batch_size
        self.sequence_length = config.training.sequence_length
        self.tokens_per_step = self.global_batch_size * self.sequence_length

    def valid_length(self, index: int) -> int:
        """How many labels of sequence ``index`` bear loss: uniform with mean ``valid_fraction`` x length."""
        fraction = self.config.data.valid_fraction
        if fraction >= 1:
            return self.sequence_length
        low, high = max(0.0, 2 * fraction - 1), min(1.0, 2 * fraction)
        raw = int(np.random.Philox(key=[self.config.data.seed, 4], counter=[0, 0, index, 0]).random_raw(1)[0])
        return round((low + (high - low) * (raw / 2.0**64)) * self.sequence_length)

    def valid_tokens(self, step: int) -> int:
        """Loss-bearing tokens of the global batch of ``step``."""
        first = step * self.global_batch_size
        return sum(self.valid_length(first + i) for i in range(self.global_batch_size))

    def arrays(self, step: int, batch_rank: int, batch_size: int) -> tuple[Tokens, Tokens]:
        """Input ids and labels, each [global_batch_size / batch_size, sequence_length], of one batch rank."""
        count, rest = divmod(self.global_batch_size, batch_size)
        if rest:
            raise ValueError(f"global_batch_size {self.global_batch_size} is not divisible by {batch_size} batch ranks")
        first = step * self.global_batch_size + batch_rank * count
        inputs = np.empty((count, self.sequence_length), dtype=np.int64)
        labels = np.empty_like(inputs)
        for i in range(count):
            tokens = self.source.sequence(first + i, self.sequence_length + 1)
            inputs[i], labels[i] = tokens[:-1], tokens[1:]
            # Prompts are what training masks, so the loss-bearing tokens are the last ones.
            labels[i, : self.sequence_length - self.valid_length(first + i)] = IGNORED
        return inputs, labels

    def batch(self, step: int, batch_rank: int, batch_size: int, device: torch.device) -> Batch:
        """The batch of one optimizer step for ``batch_rank`` of ``batch_size``, on ``device``."""
        import torch

        from ndbench.engines.protocol import Batch

        inputs, labels = self.arrays(step, batch_rank, batch_size)
        positions = torch.arange(self.sequence_length).repeat(len(inputs), 1)
        return Batch(
            input_ids=torch.from_numpy(inputs).to(device),
            labels=torch.from_numpy(labels).to(device),
            position_ids=positions.to(device),
        )

    @property
    def content_hash(self) -> str:
        """16 hex digits over the definition, the source and the first global batch."""
        definition = json.dumps(asdict(self.config.data) | {"files": []}, sort_keys=True)
        inputs, labels = self.arrays(0, 0, 1)
        return _sha([definition.encode(), self.source.digest().encode(), inputs.tobytes(), labels.tobytes()])


def build_dataset(config: Config) -> Dataset:
    """The dataset of a cell's configuration; raises ``ValueError`` when data and model do not fit each other."""
    data, vocab_size = config.data, config.model.vocab_size
    if vocab_size is None:
        raise ValueError("model.vocab_size is not set, so no tokens can be drawn for the model")
    if not 0 < data.valid_fraction <= 1:
        raise ValueError(f"data.valid_fraction is {data.valid_fraction}, it must be above 0 and at most 1")
    source: Source
    if data.name == "markov":
        source = MarkovSource(vocab_size, data.seed)
    elif data.name in ("source", "text"):
        if data.tokenizer is None and vocab_size < BYTE_VOCABULARY:
            raise ValueError(f"byte-level data needs model.vocab_size >= {BYTE_VOCABULARY}, it is {vocab_size}")
        source = CorpusSource(_corpus(data, vocab_size), data.seed)
    else:
        raise ValueError(f"data.name '{data.name}' is not known; known: markov, source, text")
    return Dataset(config, source)


def _sha(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]
