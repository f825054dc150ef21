"""What a step is fed: sequences that are a pure function of (configuration, global sequence index).

Every rank computes its own part of the global batch, so the data is the same under every layout and nothing is sent.
Ranks of one tp x cp group ask for the same batch rank and get the same samples; different batch ranks get different
ones. This module knows nothing of engines or of context parallelism: it hands out whole sequences.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ndbench.config import ADDED_LATER, Config
from ndbench.training.corpus import Corpus, Tokens, read_corpus, split
from ndbench.training.sources import CorpusSource, MarkovSource, PaddedSource, Source, sha

if TYPE_CHECKING:
    import torch

    from ndbench.engines.protocol import Batch

IGNORED = -100
"""Label of a position that bears no loss, as in torch's cross-entropy."""
BYTE_VOCABULARY = 256
NAMES = ("markov", "source", "text", "dataset")
DOCUMENTS = ("stream", "packed", "padded")
VALIDATION_FROM = 2**40
"""Markov sequences from this index on are for validation: training never comes that far."""


class Dataset:
    """The batches of a configuration. ``tokens_per_step`` counts each token of the global batch once."""

    def __init__(self, config: Config, source: Source) -> None:
        self.config, self.source = config, source
        self.global_batch_size = config.training.global_batch_size
        self.sequence_length = config.training.sequence_length
        self.tokens_per_step = self.global_batch_size * self.sequence_length

    @property
    def sequences(self) -> int | None:
        """Sequences of one pass over the data; None where it never ends."""
        return self.source.count(self.sequence_length + 1)

    def valid_length(self, index: int) -> int:
        """How many labels of sequence ``index`` may bear loss: uniform with mean ``valid_fraction`` x length."""
        fraction = self.config.data.valid_fraction
        if fraction >= 1:
            return self.sequence_length
        low, high = max(0.0, 2 * fraction - 1), min(1.0, 2 * fraction)
        raw = int(np.random.Philox(key=[self.config.data.seed, 4], counter=[0, 0, index, 0]).random_raw(1)[0])
        return round((low + (high - low) * (raw / 2.0**64)) * self.sequence_length)

    def valid_tokens(self, step: int) -> int:
        """Loss-bearing tokens of the global batch of ``step``."""
        first = step * self.global_batch_size
        if self.source.documents(first, self.sequence_length + 1) is None:
            return sum(self.valid_length(first + i) for i in range(self.global_batch_size))
        return int((self._rows(first, self.global_batch_size)[1] != IGNORED).sum())

    def arrays(self, step: int, batch_rank: int, batch_size: int) -> tuple[Tokens, Tokens]:
        """Input ids and labels, each [global_batch_size / batch_size, sequence_length], of one batch rank."""
        inputs, labels, _, _ = self._rows(*self._share(step * self.global_batch_size, batch_rank, batch_size))
        return inputs, labels

    def batch(self, step: int, batch_rank: int, batch_size: int, device: torch.device) -> Batch:
        """The batch of one optimizer step for ``batch_rank`` of ``batch_size``, on ``device``."""
        return self.batch_from(step * self.global_batch_size, batch_rank, batch_size, device)

    def batch_from(
        self, first: int, batch_rank: int, batch_size: int, device: torch.device, end: int | None = None
    ) -> Batch:
        """The global batch that begins at global sequence ``first``; no sequence from ``end`` on bears loss."""
        import torch

        from ndbench.engines.protocol import Batch

        own, count = self._share(first, batch_rank, batch_size)
        inputs, labels, positions, documents = self._rows(own, count)
        if end is not None:
            labels[max(end - own, 0) :] = IGNORED
        return Batch(
            input_ids=torch.from_numpy(inputs).to(device),
            labels=torch.from_numpy(labels).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            document_ids=None if documents is None else torch.from_numpy(documents).to(device),
        )

    def _share(self, first: int, batch_rank: int, batch_size: int) -> tuple[int, int]:
        count, rest = divmod(self.global_batch_size, batch_size)
        if rest:
            raise ValueError(f"global_batch_size {self.global_batch_size} is not divisible by {batch_size} batch ranks")
        return first + batch_rank * count, count

    def _rows(self, first: int, count: int) -> tuple[Tokens, Tokens, Tokens, Tokens | None]:
        """Input ids, labels, positions and documents of sequences ``first`` to ``first + count``."""
        inputs = np.empty((count, self.sequence_length), dtype=np.int64)
        labels, positions, documents = (np.empty_like(inputs) for _ in range(3))
        positions[:] = np.arange(self.sequence_length)
        for i in range(count):
            tokens = self.source.sequence(first + i, self.sequence_length + 1)
            inputs[i], labels[i] = tokens[:-1], tokens[1:]
            ids = self.source.documents(first + i, self.sequence_length + 1)
            if ids is not None:
                labels[i, (ids[1:] != ids[:-1]) | (ids[1:] < 0)] = IGNORED
            if ids is not None and self.source.packed:
                documents[i] = ids[:-1]
                begins = np.flatnonzero(np.diff(ids[:-1], prepend=-1))
                positions[i] -= np.repeat(begins, np.diff(begins, append=self.sequence_length))
            # Prompts are what training masks, so the loss-bearing tokens are the last ones.
            labels[i, : self.sequence_length - self.valid_length(first + i)] = IGNORED
        return inputs, labels, positions, documents if self.source.packed else None

    @cached_property
    def identity(self) -> str:
        """16 hex digits: what sequence each index stands for, whatever the batch size."""
        shape = f"{self.sequence_length} {self.config.data.valid_fraction} {self.config.data.seed}"
        return sha([shape.encode(), self.source.digest().encode()])

    @property
    def content_hash(self) -> str:
        """16 hex digits over the definition, the source and the first global batch."""
        defined = asdict(self.config.data)
        later = ADDED_LATER["data"]
        named = {key: value for key, value in defined.items() if key not in later or value != later[key]}
        definition = json.dumps(named | {"files": []}, sort_keys=True)
        inputs, labels = self.arrays(0, 0, 1)
        return sha([definition.encode(), self.source.digest().encode(), inputs.tobytes(), labels.tobytes()])


def build_dataset(config: Config) -> Dataset:
    """The dataset of a cell's configuration; raises ``ValueError`` when data and model do not fit each other."""
    vocab_size = _check(config)
    if config.data.name == "markov":
        return Dataset(config, MarkovSource(vocab_size, config.data.seed))
    return Dataset(config, _source(config, read_corpus(config.data, vocab_size)))


def build_split(config: Config, prepared: Path | None = None) -> tuple[Dataset, Dataset | None]:
    """(training, validation) of a configuration; the latter is None where ``evaluation.fraction`` is 0.

    ``prepared`` is a folder that :func:`prepare` wrote. Raises ``ValueError`` as :func:`build_dataset` does.
    """
    vocab_size, fraction = _check(config), config.evaluation.fraction
    if config.data.name == "markov":
        endless = [MarkovSource(vocab_size, config.data.seed, first) for first in (0, VALIDATION_FROM)]
        return Dataset(config, endless[0]), Dataset(config, endless[1]) if fraction else None
    if prepared is not None:
        parts = [Corpus.load(prepared / "train")]
        parts += [Corpus.load(prepared / "validation")] if fraction else []
    else:
        parts = _parts(config, read_corpus(config.data, vocab_size))
    datasets = [Dataset(config, _source(config, part)) for part in parts]
    return datasets[0], datasets[1] if fraction else None


def prepare(config: Config, folder: Path) -> Corpus | None:
    """Read and split the text once, for all ranks; the whole of it, or None where there is no text to read.

    Raises ``ValueError`` as :func:`build_split` does, and where a part is too short for a single sequence.
    """
    vocab_size = _check(config)
    if config.data.name == "markov":
        return None
    corpus = read_corpus(config.data, vocab_size)
    for name, part in zip(("train", "validation"), _parts(config, corpus), strict=False):
        try:
            _source(config, part).count(config.training.sequence_length + 1)
        except ValueError as error:
            raise ValueError(f"{name} part (evaluation.fraction {config.evaluation.fraction:g}): {error}") from error
        part.save(folder / name)
    return corpus


def _parts(config: Config, corpus: Corpus) -> list[Corpus]:
    fraction = config.evaluation.fraction
    return list(split(corpus, fraction, config.data.seed)) if fraction else [corpus]


def _source(config: Config, corpus: Corpus) -> Source:
    if config.data.documents == "padded":
        return PaddedSource(corpus, config.data.seed)
    return CorpusSource(corpus, config.data.seed, packed=config.data.documents == "packed")


def _check(config: Config) -> int:
    """What can be said before anything is read; returns the vocabulary's size."""
    data, vocab_size = config.data, config.model.vocab_size
    if vocab_size is None:
        raise ValueError("model.vocab_size is not set, so no tokens can be drawn for the model")
    if not 0 < data.valid_fraction <= 1:
        raise ValueError(f"data.valid_fraction is {data.valid_fraction}, it must be above 0 and at most 1")
    if data.name not in NAMES:
        raise ValueError(f"data.name '{data.name}' is not known; known: {', '.join(NAMES)}")
    if data.documents not in DOCUMENTS:
        raise ValueError(f"data.documents '{data.documents}' is not known; known: {', '.join(DOCUMENTS)}")
    if data.name != "markov" and data.tokenizer is None and vocab_size < BYTE_VOCABULARY:
        raise ValueError(f"byte-level data needs model.vocab_size >= {BYTE_VOCABULARY}, it is {vocab_size}")
    if data.documents == "packed" and config.model.target is not None:
        raise ValueError(f"data.documents=packed needs a transformers model, not model.target={config.model.target}")
    if data.documents != "stream" and data.name == "markov":
        raise ValueError(f"data.documents={data.documents} needs documents, data=markov has none")
    return vocab_size
