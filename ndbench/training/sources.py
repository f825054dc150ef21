"""Endless supplies of token sequences, each a pure function of its index: a Markov chain, and orders of a corpus.

Nothing is remembered between two calls, so that any rank can draw any sequence and a run can go on from any index.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np

from ndbench.training.corpus import Corpus, Tokens


class Source(Protocol):
    """An endless supply of token sequences."""

    packed: bool
    """Several documents share a sequence, and must not see each other."""

    def sequence(self, index: int, length: int) -> Tokens:
        """Tokens [length] of global sequence ``index``."""

    def documents(self, index: int, length: int) -> Tokens | None:
        """Which document each of these tokens belongs to, -1 for padding; None where a sequence is one document."""

    def count(self, length: int) -> int | None:
        """Sequences of one pass over the data; None where it never ends."""

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
    packed = False

    def __init__(self, vocab_size: int, seed: int, first: int = 0) -> None:
        if vocab_size < 5:
            raise ValueError(f"data=markov needs a vocabulary of at least 5 tokens, model.vocab_size is {vocab_size}")
        self.vocab_size, self.seed, self._first = vocab_size, seed, first
        keys = np.random.Philox(key=[seed, 0]).random_raw(vocab_size)
        self._token_of_state = np.argsort(keys, kind="stable").astype(np.int64)
        raw = np.random.Philox(key=[seed, 1]).random_raw(64)
        offsets = dict.fromkeys(int(value % (vocab_size - 1)) + 1 for value in raw)
        offsets.update(dict.fromkeys(range(1, 5)))
        self._offsets = np.array(list(offsets)[:4], dtype=np.int64)

    def sequence(self, index: int, length: int) -> Tokens:
        raw = np.random.Philox(key=[self.seed, 2], counter=[0, 0, self._first + index, 0]).random_raw(length)
        steps = self._offsets[self._CHOICE[raw >> 61]]
        steps[0] = int(raw[0] % self.vocab_size)
        states = np.cumsum(steps) % self.vocab_size
        tokens: Tokens = self._token_of_state[states]
        return tokens

    def documents(self, index: int, length: int) -> None:  # noqa: ARG002
        return None

    def count(self, length: int) -> None:  # noqa: ARG002
        return None

    def digest(self) -> str:
        return sha([f"markov {self.vocab_size} {self.seed}".encode()])


class CorpusSource:
    """Windows of one long token stream, in an order reshuffled every epoch by the seed."""

    def __init__(self, corpus: Corpus, seed: int, packed: bool = False) -> None:
        self.corpus, self.seed, self.packed = corpus, seed, packed

    def sequence(self, index: int, length: int) -> Tokens:
        start = self._start(index, length)
        return self.corpus.tokens[start : start + length]

    def documents(self, index: int, length: int) -> Tokens | None:
        if not self.packed:
            return None
        start = self._start(index, length)
        found: Tokens = np.searchsorted(self.corpus.starts, np.arange(start, start + length), side="right")
        found -= found[0]
        return found

    def count(self, length: int) -> int:
        windows = (len(self.corpus.tokens) - 1) // (length - 1)
        if windows < 1:
            raise ValueError(f"the corpus has {len(self.corpus.tokens)} tokens, fewer than one sequence of {length}")
        return windows

    def _start(self, index: int, length: int) -> int:
        windows = self.count(length)
        epoch, position = divmod(index, windows)
        return _shuffled(position, windows, self.seed, epoch) * (length - 1)

    def digest(self) -> str:
        kind = [b"packed", self.corpus.starts.tobytes()] if self.packed else []
        return sha([str(self.seed).encode(), self.corpus.tokens.tobytes(), *kind])


class PaddedSource:
    """A document a sequence, long ones in pieces of one sequence each, in an order reshuffled every epoch."""

    packed = False

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus, self.seed = corpus, seed
        self._pieces: dict[int, tuple[Tokens, Tokens]] = {}

    def sequence(self, index: int, length: int) -> Tokens:
        start, used = self._piece(index, length)
        tokens = np.zeros(length, dtype=np.int64)
        tokens[:used] = self.corpus.tokens[start : start + used]
        return tokens

    def documents(self, index: int, length: int) -> Tokens:
        _, used = self._piece(index, length)
        return np.where(np.arange(length) < used, 0, -1)

    def count(self, length: int) -> int:
        return len(self._cut(length)[0])

    def _piece(self, index: int, length: int) -> tuple[int, int]:
        starts, lengths = self._cut(length)
        epoch, position = divmod(index, len(starts))
        chosen = _shuffled(position, len(starts), self.seed, epoch)
        return int(starts[chosen]), int(lengths[chosen])

    def _cut(self, length: int) -> tuple[Tokens, Tokens]:
        """Start and number of tokens of each piece; two pieces of a document share a token, the first one's last."""
        if length not in self._pieces:
            sizes = np.diff(self.corpus.starts, append=len(self.corpus.tokens))
            counts = np.maximum(-(-(sizes - 1) // (length - 1)), 0)
            if not counts.sum():
                raise ValueError(f"no document has two tokens, the least that a sequence can be made of ({len(sizes)})")
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            starts = np.repeat(self.corpus.starts, counts) + within * (length - 1)
            left = np.repeat(self.corpus.starts + sizes, counts) - starts
            self._pieces[length] = starts, np.minimum(left, length)
        return self._pieces[length]

    def digest(self) -> str:
        parts = [b"padded", self.corpus.starts.tobytes(), self.corpus.tokens.tobytes()]
        return sha([str(self.seed).encode(), *parts])


def _shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """Element ``position`` of a permutation of range(count): an affine map whose multiplier is prime to count."""
    raw = np.random.Philox(key=[seed, 3], counter=[0, 0, epoch, 0]).random_raw(2)
    multiplier = int(raw[0]) % count | 1
    while np.gcd(multiplier, count) != 1:
        multiplier += 2
    return (position * multiplier + int(raw[1])) % count


def sha(parts: list[bytes]) -> str:
    """16 hex digits of the parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]
