"""From what the ranks hold to whole tensors."""

from __future__ import annotations

import torch

from tests.state.ranks import Held


def assemble(ranks: list[Held]) -> dict[str, torch.Tensor | None]:
    """Whole tensors; asserts that the ranks' pieces leave no element out and agree where they overlap."""
    whole: dict[str, torch.Tensor | None] = {}
    filled: dict[str, torch.Tensor] = {}
    for held in ranks:
        for name, piece in held.items():
            if piece is None:
                whole[name] = None
                continue
            offset, shape, values = piece
            if not offset:
                offset = (0,) * len(shape)
            offset += (0,) * (len(shape) - len(offset))
            target = whole.setdefault(name, torch.zeros(shape, dtype=values.dtype))
            done = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            assert target is not None, name
            place = tuple(slice(a, a + size) for a, size in zip(offset, values.shape, strict=True))
            assert torch.equal(target[place][done[place]], values[done[place]]), f"ranks disagree about {name}"
            target[place], done[place] = values, True
    assert all(bool(done.all()) for done in filled.values())
    return whole


def assert_same(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> None:
    """Bitwise."""
    assert one.keys() == other.keys()
    for name, mine in one.items():
        theirs = other[name]
        if mine is None or theirs is None:
            assert mine is theirs, name
        else:
            assert mine.dtype == theirs.dtype, name
            assert torch.equal(mine, theirs), name
