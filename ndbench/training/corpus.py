"""Text to one stream of tokens with the places where documents begin, and its split into training and validation.

Reads files, the installed transformers' own source, or a Hugging Face dataset; bytes are tokens where no tokenizer is
given. It knows nothing of sequences, batches or models.
"""

from __future__ import annotations

import codecs
import glob
import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ndbench.config import DataConfig

Tokens = npt.NDArray[np.int64]
NEWLINE, END_OF_DOCUMENT = 10, 0
"""The byte after a document: a newline in a ``stream``, else one that no text holds."""


SNIFFED = 8192
"""Bytes by which a file of a folder is told to be text."""


@dataclass(frozen=True)
class Corpus:
    """``tokens`` is [tokens] int64; ``starts`` the index of each document's first token, rising from 0."""

    tokens: Tokens
    starts: Tokens
    cut: bool = False
    """There was more text than ``data.max_bytes``."""

    def save(self, folder: Path) -> None:
        """Write it where other processes map it into memory instead of reading text again."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "tokens.npy", self.tokens)
        np.save(folder / "starts.npy", self.starts)

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        return cls(np.load(folder / "tokens.npy", mmap_mode="r"), np.load(folder / "starts.npy"))


def read_corpus(config: DataConfig, vocab_size: int) -> Corpus:
    """The text that ``config`` names. Raises ``ValueError``, one line, for what cannot be read or does not fit."""
    documents, cut = _limited(_documents(config), config.max_bytes)
    if not documents:
        raise ValueError(f"data={config.name} has no text")
    pieces = _bytes(documents, config) if config.tokenizer is None else _tokenized(documents, config.tokenizer)
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    tokens = np.concatenate(pieces)
    if len(tokens) and int(tokens.max()) >= vocab_size:
        most = int(tokens.max())
        raise ValueError(
            f"data has token {most}, model.vocab_size is {vocab_size}: set model.vocab_size={most + 1} or more"
        )
    return Corpus(tokens, np.cumsum(lengths) - lengths, cut)


def split(corpus: Corpus, fraction: float, seed: int) -> tuple[Corpus, Corpus]:
    """(training, validation): whole documents drawn by the seed until they hold ``fraction`` of the tokens.

    Where documents are too few or too long for that, the end of the text is held out.
    """
    total, count = len(corpus.tokens), len(corpus.starts)
    wanted = int(fraction * total)
    lengths = np.diff(corpus.starts, append=total)
    order = np.argsort(np.random.Philox(key=[seed, 5]).random_raw(count), kind="stable")
    held = np.zeros(count, dtype=bool)
    taken = 0
    for document in order:
        if taken + lengths[document] <= wanted:
            held[document] = True
            taken += int(lengths[document])
    if 2 * taken < wanted:
        border = total - wanted
        inside = corpus.starts[corpus.starts < border]
        after = corpus.starts[corpus.starts > border] - border
        end = Corpus(corpus.tokens[border:], np.concatenate([np.zeros(1, dtype=np.int64), after]))
        return Corpus(corpus.tokens[:border], inside, corpus.cut), end
    return _only(corpus, lengths, ~held), _only(corpus, lengths, held)


def _only(corpus: Corpus, lengths: Tokens, chosen: npt.NDArray[np.bool_]) -> Corpus:
    kept = lengths[chosen]
    return Corpus(corpus.tokens[np.repeat(chosen, lengths)], np.cumsum(kept) - kept, corpus.cut)


def source_files(root: Path) -> Iterator[Path]:
    """Python files below ``root`` in sorted order, lazily: a few megabytes need only the first folders."""
    entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
            yield from source_files(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield Path(entry.path)


def text_files(names: Iterable[str]) -> Iterator[Path]:
    """The files that are named; of a folder its text files, sorted, in all folders below; of a pattern what matches.

    Raises ``ValueError`` for a folder or a pattern without any.
    """
    for name in names:
        path = Path(name).expanduser()
        pattern = not path.exists() and glob.has_magic(name)
        found = sorted(glob.glob(str(path), recursive=True)) if pattern else [path]  # noqa: PTH207  may be absolute
        places = [Path(place) for place in found]
        count = 0
        for place in places:
            for file in _texts_below(place) if place.is_dir() else [place]:
                count += 1
                yield file
        if not count:
            said = "matches no file" if pattern else "is a folder without text files"
            raise ValueError(f"data.files: {name} {said}")


def _texts_below(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"data.files: {folder} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _texts_below(Path(entry.path))
        elif entry.is_file() and _is_text(Path(entry.path)):
            yield Path(entry.path)


def _is_text(path: Path) -> bool:
    """By its first bytes: UTF-8 without a zero."""
    try:
        with path.open("rb") as stream:
            start = stream.read(SNIFFED)
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise ValueError(f"data file {path} cannot be read: {error.strerror}") from error
    return b"\0" not in start


def _documents(config: DataConfig) -> Iterator[bytes]:
    if config.name == "dataset":
        yield from _rows(config)
        return
    files: Iterable[Path]
    if config.name == "source":
        spec = importlib.util.find_spec("transformers")
        assert spec is not None, "transformers is a dependency"
        assert spec.origin is not None, "transformers is a regular package"
        files = source_files(Path(spec.origin).parent)
    else:
        if not config.files:
            raise ValueError("data=text needs data.files=[a.txt,FOLDER,'logs/*.txt']")
        files = text_files(config.files)
    for file in files:
        try:
            yield file.read_bytes()
        except OSError as error:
            raise ValueError(f"data file {file} cannot be read: {error.strerror}") from error


def _limited(documents: Iterator[bytes], limit: int) -> tuple[list[bytes], bool]:
    """Documents up to ``limit`` bytes, one between two counted; whether there was more."""
    found: list[bytes] = []
    size = 0
    for document in documents:
        if size >= limit:
            return found, True
        found.append(document[: limit - size])
        size += len(document) + 1
    return found, size - 1 > limit


def _bytes(documents: list[bytes], config: DataConfig) -> list[Tokens]:
    """A stream has a newline between documents; documents that are kept apart end with a byte of their own."""
    end = bytes([NEWLINE if config.documents == "stream" else END_OF_DOCUMENT])
    ended = [document + end for document in documents]
    if config.documents == "stream":
        ended[-1] = documents[-1]
    return [np.frombuffer(document, dtype=np.uint8).astype(np.int64) for document in ended]


def _tokenized(documents: list[bytes], name: str) -> list[Tokens]:
    tokenizer = load_tokenizer(name)
    texts = [document.decode("utf-8", "replace") for document in documents]
    end = tokenizer.eos_token_id
    pieces = []
    for ids in tokenizer(texts)["input_ids"]:
        ended = end is None or (len(ids) and ids[-1] == end)
        pieces.append(np.array(ids if ended else [*ids, end], dtype=np.int64))
    return pieces


def load_tokenizer(name: str) -> Any:
    """A tokenizer from a local folder or, where there is none of that name, the hub. ``ValueError`` when neither."""
    from transformers import AutoTokenizer

    local = Path(name).expanduser().exists()
    _quiet_hub()
    try:
        return AutoTokenizer.from_pretrained(str(Path(name).expanduser()) if local else name, local_files_only=local)
    except (OSError, ValueError) as error:
        place = "folder" if local else "folder, and the hub gave none"
        raise ValueError(f"data.tokenizer {name} is no tokenizer {place}: {_line(error)}") from error


_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def _rows(config: DataConfig) -> Iterator[bytes]:
    if config.dataset is None:
        raise ValueError("data=dataset needs data.dataset=FOLDER, a file or the id of a Hugging Face dataset")
    try:
        import datasets
    except ImportError as error:
        raise ValueError("data=dataset needs the package datasets: pip install 'ndbench[data]'") from error
    path = Path(config.dataset).expanduser()
    _quiet_hub()
    try:
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(path))
            rows = found[config.split] if isinstance(found, dict) else found
        elif path.is_file():
            builder = _BUILDERS.get(path.suffix, "text")
            rows = datasets.load_dataset(builder, data_files=str(path), split=config.split)
        else:
            name = str(path) if path.is_dir() else config.dataset
            rows = datasets.load_dataset(name, config.subset, split=config.split)
    except Exception as error:  # a hub, a disk and a dozen file formats: whatever it raises, the user must change it
        raise ValueError(f"data.dataset {config.dataset} cannot be loaded: {_line(error)}") from error
    if config.column not in rows.column_names:
        known = ", ".join(rows.column_names)
        raise ValueError(f"data.dataset {config.dataset} has no column '{config.column}', it has: {known}")
    for row in rows:
        yield str(row[config.column] or "").encode()


def _quiet_hub() -> None:
    """A hub that cannot be reached is told once, by us, not with every try."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
