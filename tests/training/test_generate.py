"""Sampling: what is drawn, what it looks at, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ndbench.config import Config, DataConfig
from ndbench.training.generate import Codec, Sampling, find_checkpoint, sample, spell


class Counting(torch.nn.Module):
    """Knows one thing: after token t comes t + 1, or else t + 2, or else the last of all."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(vocabulary))
        self.seen: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        assert position_ids[0].tolist() == list(range(input_ids.shape[1]))
        logits = self.weight.expand(*input_ids.shape, -1).clone()
        for at, token in enumerate(input_ids[0].tolist()):
            logits[0, at, (token + 1) % 10] = 5.0
            logits[0, at, (token + 2) % 10] = 4.5
            logits[0, at, -1] = 9.0
        return logits


def drawn(model: torch.nn.Module, size: int | None = 12, end: int | None = None, **sampling: float) -> list[int]:
    return list(sample(model, [1, 2, 3], 4, Sampling(**sampling), size, end))  # type: ignore[arg-type]


def test_the_likeliest_token_is_taken_and_only_the_window_is_looked_at() -> None:
    model = Counting(13)
    assert drawn(model, temperature=0, max_tokens=5) == [4, 5, 6, 7, 8]
    assert model.seen[0] == [1, 2, 3]
    assert model.seen[-1] == [4, 5, 6, 7]


def test_a_token_that_cannot_be_decoded_is_never_drawn() -> None:
    assert drawn(Counting(13), size=None, temperature=0, max_tokens=1) == [12]
    assert max(drawn(Counting(13), temperature=3.0, top_k=0, max_tokens=60)) < 12


def test_the_end_of_a_document_ends_the_text_and_is_no_part_of_it() -> None:
    assert drawn(Counting(13), end=6, temperature=0) == [4, 5]


def test_top_k_bounds_what_is_drawn_and_a_seed_repeats_it() -> None:
    some = drawn(Counting(13), top_k=2, temperature=1.0, max_tokens=40, seed=3)
    assert {(b - a) % 10 for a, b in zip([3, *some], some, strict=False)} == {1, 2}
    assert some == drawn(Counting(13), top_k=2, temperature=1.0, max_tokens=40, seed=3)
    assert some != drawn(Counting(13), top_k=2, temperature=1.0, max_tokens=40, seed=4)


def test_bytes_come_back_as_text_even_where_a_character_is_cut() -> None:
    codec = Codec(Config(data=DataConfig(name="source")))
    assert codec.decode(codec.encode("né")) == "né"
    assert codec.decode(codec.encode("né")[:-1]) == "n�"
    assert (codec.size, codec.end) == (256, None)
    assert Codec(Config(data=DataConfig(name="source", documents="packed"))).end == 0


def test_a_folder_without_a_whole_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    for place in (tmp_path, tmp_path / "step-00000003", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=place.name):
            find_checkpoint(place)


def test_text_is_given_out_as_it_comes_and_never_half_a_letter() -> None:
    codec = Codec(Config(data=DataConfig(name="source")))
    given = []
    said: list[str] = []

    def tokens() -> Iterator[int]:
        for token in [*"né🙂".encode(), 0xF0]:
            yield token
            given.append(list(said))

    assert spell(tokens(), codec, said.append) == "né🙂\ufffd"
    assert said == ["n", "é", "🙂", "\ufffd"]
    assert given[0] == given[1] == ["n"], "before the next token is drawn"
    assert given[2] == ["n", "é"]
