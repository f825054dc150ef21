"""Documents: kept apart or padded, each label once an epoch; a split that shares nothing; datasets and tokenizers."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ndbench.config import Config, DataConfig
from ndbench.training.corpus import END_OF_DOCUMENT, Corpus, read_corpus, split
from ndbench.training.data import IGNORED, Dataset, build_dataset, build_split, prepare
from ndbench.training.generate import Codec

TEXTS = ["first " * 9, "a", "", "second one " * 3, "the third, a long one " * 6, "44"]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{index}.txt" for index in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def config(files: list[str], documents: str, length: int = 16, **data: object) -> Config:
    made = Config()
    made.model.vocab_size = 256
    made.training.sequence_length, made.training.global_batch_size = length, 4
    made.data = DataConfig(name="text", files=files, documents=documents, **data)  # type: ignore[arg-type]
    return made


def labels_of_an_epoch(dataset: Dataset) -> Counter[tuple[int, int]]:
    """(token, next token) of every label that bears loss."""
    assert dataset.sequences is not None
    inputs, labels, _, _ = dataset._rows(0, dataset.sequences)
    return Counter(zip(inputs[labels != IGNORED].tolist(), labels[labels != IGNORED].tolist(), strict=True))


def test_padded_documents_give_each_of_their_labels_once_an_epoch(files: list[str]) -> None:
    dataset = build_dataset(config(files, "padded"))
    expected: Counter[tuple[int, int]] = Counter()
    for text in TEXTS:
        tokens = [*text.encode(), END_OF_DOCUMENT]
        expected.update(itertools.pairwise(tokens))
    assert labels_of_an_epoch(dataset) == expected


def test_a_padded_sequence_holds_one_document_and_its_padding_bears_no_loss(files: list[str]) -> None:
    dataset = build_dataset(config(files, "padded"))
    assert dataset.sequences is not None
    inputs, labels, positions, documents = dataset._rows(0, dataset.sequences)
    assert documents is None, "causal attention never looks at the padding behind"
    texts = [text.encode() + bytes([END_OF_DOCUMENT]) for text in TEXTS]
    for row, wanted in zip(inputs, labels, strict=True):
        used = int((wanted != IGNORED).sum())
        assert any(bytes(row[:used].tolist()) in text for text in texts)
        assert (wanted[used:] == IGNORED).all()
    assert (positions == np.arange(16)).all()


def test_packed_documents_fill_windows_but_no_label_or_position_crosses_a_border(files: list[str]) -> None:
    dataset = build_dataset(config(files, "packed"))
    assert dataset.sequences is not None
    inputs, labels, positions, documents = dataset._rows(0, dataset.sequences)
    assert documents is not None
    text = b"".join(text.encode() + bytes([END_OF_DOCUMENT]) for text in TEXTS)
    assert dataset.sequences == (len(text) - 1) // 16, "no token is spent on padding"
    ends = inputs == END_OF_DOCUMENT
    assert (labels[ends] == IGNORED).all(), "what follows a document is another one's beginning"
    assert (labels[~ends] != IGNORED).all()
    after = ends[:, :-1]
    assert (positions[:, 1:][after] == 0).all()
    assert (positions[:, 1:][~after] == positions[:, :-1][~after] + 1).all()
    assert ((documents[:, 1:] != documents[:, :-1]) == after).all()
    assert (positions[:, 0] == 0).all(), "a document that goes on in the next window starts anew there"


def test_valid_tokens_counts_what_bears_loss_in_every_mode(files: list[str]) -> None:
    for documents in ("stream", "packed", "padded"):
        dataset = build_dataset(config(files, documents, valid_fraction=0.6))
        for step in (0, 3):
            assert dataset.valid_tokens(step) == int((dataset.arrays(step, 0, 1)[1] != IGNORED).sum())


def corpus(lengths: list[int]) -> Corpus:
    starts = np.cumsum(lengths) - lengths
    return Corpus(np.arange(sum(lengths)), starts.astype(np.int64))


@pytest.mark.parametrize("lengths", [[5] * 200, [40, 3, 1, 90, 7] * 30, [2000], [900, 950, 30]])
@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_a_split_shares_no_token_and_loses_none(lengths: list[int], fraction: float) -> None:
    whole = corpus(lengths)
    train, held = split(whole, fraction, seed=1)
    assert sorted([*train.tokens.tolist(), *held.tokens.tolist()]) == whole.tokens.tolist()
    total = len(whole.tokens)
    assert fraction / 2 * total <= len(held.tokens) <= fraction * total
    for part in (train, held):
        assert part.starts[0] == 0
        # tokens count up within a document: a border inside one would show as a step of more than 1
        jumps = np.flatnonzero(np.diff(part.tokens) != 1) + 1
        assert set(jumps.tolist()) <= set(part.starts.tolist())


def test_whole_documents_are_held_out_where_they_are_many_and_others_for_another_seed() -> None:
    whole = corpus([5] * 200)
    held = split(whole, 0.1, seed=1)[1]
    assert len(held.tokens) == 100
    assert all(int(token) % 5 == 0 for token in held.tokens[held.starts])
    assert not np.array_equal(held.tokens, split(whole, 0.1, seed=2)[1].tokens)
    assert np.array_equal(held.tokens, split(whole, 0.1, seed=1)[1].tokens)


def test_markov_validation_is_never_trained_on() -> None:
    made = Config()
    made.model.vocab_size = 64
    train, held = build_split(made)
    assert held is not None
    assert not np.array_equal(train.arrays(0, 0, 1)[0], held.arrays(0, 0, 1)[0])
    made.evaluation.fraction = 0.0
    assert build_split(made)[1] is None


@pytest.mark.parametrize("documents", ["stream", "packed", "padded"])
def test_text_prepared_once_gives_the_ranks_what_reading_it_gives(
    documents: str, tmp_path: Path, files: list[str]
) -> None:
    made = config(files, documents, length=8)
    made.evaluation.fraction = 0.2
    prepare(made, tmp_path / "data")
    for read, mapped in zip(build_split(made), build_split(made, tmp_path / "data"), strict=True):
        assert read is not None
        assert mapped is not None
        assert read.identity == mapped.identity
        assert np.array_equal(read.arrays(2, 0, 2)[1], mapped.arrays(2, 0, 2)[1])


def test_a_part_too_short_for_a_sequence_is_refused_by_name(tmp_path: Path, files: list[str]) -> None:
    with pytest.raises(ValueError, match=r"validation part \(evaluation\.fraction 0\.05\).*11 tokens.*of 17"):
        prepare(config(files, "stream"), tmp_path)


def test_a_text_beyond_the_limit_is_cut_and_said_so(files: list[str]) -> None:
    whole = sum(len(text) for text in TEXTS) + len(TEXTS) - 1
    for limit, cut in ((whole, False), (whole - 1, True), (20, True), (10**6, False)):
        found = read_corpus(config(files, "stream", max_bytes=limit).data, 256)
        assert (len(found.tokens), found.cut) == (min(limit, whole), cut)


def test_a_tokenizer_folder_ends_each_document_with_its_own_token(tmp_path: Path, files: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[end]", "[unk]", "first", "second", "one", "the", "third", ",", "a", "long", "44"]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[unk]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[end]", unk_token="[unk]").save_pretrained(folder)
    found = read_corpus(config(files, "packed", tokenizer=str(folder)).data, 256)
    assert found.tokens[:11].tolist() == [2] * 9 + [0, 8]
    assert (found.tokens[found.starts[1:] - 1] == 0).all()
    assert len(found.starts) == len(TEXTS)
    codec = Codec(Config(data=config(files, "packed", tokenizer=str(folder)).data))
    assert codec.end == 0
    assert codec.decode(codec.encode("the third one")) == "the third one"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "dataset"}, r"data=dataset needs data\.dataset=FOLDER"),
        ({"name": "dataset", "dataset": "some/set"}, r"needs the package datasets: pip install 'ndbench\[data\]'"),
        ({"name": "markov", "documents": "packed"}, "needs documents, data=markov has none"),
        ({"name": "source", "documents": "folded"}, "stream, packed, padded"),
        ({"name": "source", "tokenizer": "/"}, "/ is no tokenizer folder"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_line(
    change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    made = Config()
    made.model.vocab_size = 256
    made.data = DataConfig(**change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message) as raised:
        build_dataset(made)
    assert "\n" not in str(raised.value)


def test_a_dataset_on_the_disk_is_read_row_by_row(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"body": ["one", "two", "three"]})
    rows.save_to_disk(str(tmp_path / "saved"))
    rows.to_json(str(tmp_path / "rows.jsonl"))
    for place in ("saved", "rows.jsonl"):
        data = DataConfig(name="dataset", dataset=str(tmp_path / place), column="body", documents="packed")
        assert bytes(read_corpus(data, 256).tokens.tolist()) == b"one\0two\0three\0"
    with pytest.raises(ValueError, match="has no column 'text', it has: body"):
        read_corpus(DataConfig(name="dataset", dataset=str(tmp_path / "saved")), 256)
    with pytest.raises(ValueError, match="cannot be loaded"):
        read_corpus(DataConfig(name="dataset", dataset=str(tmp_path / "nowhere")), 256)
