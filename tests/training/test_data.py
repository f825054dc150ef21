"""Data: known entropy, the same tokens everywhere, each sample in exactly one batch rank."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from ndbench.config import Config, DataConfig
from ndbench.training.corpus import text_files
from ndbench.training.data import IGNORED, build_dataset
from ndbench.training.sources import MarkovSource


def config(name: str = "markov", **data: object) -> Config:
    made = Config()
    made.model.vocab_size = 259
    made.data = DataConfig(name=name, **data)  # type: ignore[arg-type]
    return made


def test_markov_tokens_are_the_same_on_every_machine_and_version() -> None:
    assert MarkovSource(259, seed=0).sequence(7, 8).tolist() == PINNED


PINNED = [135, 193, 98, 42, 156, 181, 184, 258]


def test_markov_has_the_entropy_it_names() -> None:
    source = MarkovSource(17, seed=0)
    tokens = source.sequence(3, 200_000)
    pairs, firsts = Counter(itertools.pairwise(tokens)), Counter(tokens[:-1])
    entropy = -sum(n / len(tokens) * np.log(n / firsts[a]) for (a, _), n in pairs.items())
    assert entropy == pytest.approx(source.ENTROPY_NATS, abs=4 * 0.575 / len(tokens) ** 0.5)  # four standard errors


@pytest.mark.parametrize("name", ["markov", "source"])
def test_batch_ranks_partition_the_global_batch_whatever_their_number(name: str) -> None:
    dataset = build_dataset(config(name))
    whole, _ = dataset.arrays(2, 0, 1)
    for ranks in (2, 4, 16):
        parts = [dataset.arrays(2, rank, ranks)[0] for rank in range(ranks)]
        assert np.array_equal(np.concatenate(parts), whole)
    assert len({row.tobytes() for row in whole}) == len(whole), "no sample twice in a batch"


def test_labels_are_the_next_tokens_and_a_step_continues_where_the_last_one_ended() -> None:
    dataset = build_dataset(config())
    inputs, labels = dataset.arrays(0, 0, 1)
    assert np.array_equal(inputs[:, 1:], labels[:, :-1])
    later, _ = dataset.arrays(1, 0, 1)
    assert not {row.tobytes() for row in later} & {row.tobytes() for row in inputs}


def test_valid_tokens_counts_the_labels_that_bear_loss_and_differs_between_ranks() -> None:
    dataset = build_dataset(config(valid_fraction=0.5))
    _, labels = dataset.arrays(4, 0, 1)
    assert (labels != IGNORED).sum() == dataset.valid_tokens(4)
    assert len({(row != IGNORED).sum() for row in labels}) > 1
    mean = np.mean([dataset.valid_length(i) for i in range(4000)]) / dataset.sequence_length
    assert mean == pytest.approx(0.5, abs=0.02)


def test_the_hash_names_the_content_not_the_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one text " * 400)
    (tmp_path / "b.txt").write_text("one text " * 400)
    (tmp_path / "c.txt").write_text("one toxt " * 400)
    hashes = [build_dataset(config("text", files=[str(tmp_path / f"{letter}.txt")])).content_hash for letter in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
    assert build_dataset(config(seed=1)).content_hash != build_dataset(config(seed=2)).content_hash


def test_an_epoch_of_a_corpus_reads_every_window_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 5)
    made = config("text", files=[str(tmp_path / "a.txt")])
    made.training.sequence_length = 10
    source = build_dataset(made).source
    windows = (256 * 5 - 1) // 10
    starts = [source.sequence(i, 11).tobytes() for i in range(windows)]
    assert len(set(starts)) == windows
    assert [source.sequence(i + windows, 11).tobytes() for i in range(windows)] != starts


def test_a_batch_is_on_the_device_with_positions_of_a_whole_sequence() -> None:
    batch = build_dataset(config()).batch(0, 1, 4, torch.device("cpu"))
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (4, 128)
    assert batch.position_ids[3].tolist() == list(range(128))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": ["/nowhere/x.txt"], "name": "text"}, r"/nowhere/x\.txt cannot be read"),
        ({"name": "text"}, r"data\.files"),
        ({"name": "tensor"}, "markov, source, text, dataset"),
        ({"valid_fraction": 0.0}, "above 0"),
    ],
)
def test_bad_data_is_refused_with_a_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_dataset(config(**change))


def test_a_vocabulary_too_small_for_bytes_is_refused_with_both_numbers() -> None:
    made = config("source")
    made.model.vocab_size = 100
    with pytest.raises(ValueError, match=r"256.*100"):
        build_dataset(made)


def test_files_are_named_one_by_one_by_folder_or_by_pattern(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"b", "a/z.py": b"z", "a/y.md": "né".encode(), "a/pic.png": b"x\0y", "a/old.txt": b"\xe9t\xe9",
        ".git/c": b"c", "a/__pycache__/d": b"d",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)

    def found(*names: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in text_files([str(tmp_path / name) for name in names])]

    assert found("") == ["a/y.md", "a/z.py", "b.txt"]
    assert found("b.txt", "a") == ["b.txt", "a/y.md", "a/z.py"]
    assert found("*/*.py", "b.*") == ["a/z.py", "b.txt"]
    assert found("**/*.py") == ["a/z.py"]
    (tmp_path / "[x].txt").write_bytes(b"x")
    assert found("[x].txt") == ["[x].txt"]
    for name, said in (("none/*", "matches no file"), ("a/__pycache__", ""), (".git", "")):
        if said:
            with pytest.raises(ValueError, match=said):
                found(name)
        else:
            assert len(found(name)) == 1, "a folder that is named itself is read"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is a folder without text files"):
        found("empty")
