"""The ring's schedule: the tiles of all steps cover what the mask shows, once, and little else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndbench.parallel import masks
from ndbench.parallel.context import sequence_chunks
from ndbench.parallel.ring import tiles


@settings(max_examples=60, deadline=None)
@given(
    cp_size=st.sampled_from([2, 3, 4, 8]),
    half=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 60)),
    documents=st.booleans(),
    masked_rows=st.integers(1, 6),
)
def test_tiles_show_each_visible_pair_exactly_once(
    cp_size: int, half: int, window: int | None, documents: bool, masked_rows: int
) -> None:
    length = 2 * half
    device = torch.device("cpu")
    for rank in range(cp_size):
        mine = masks.positions(sequence_chunks(cp_size * length, cp_size, rank, "ring"), device)
        for source in range(cp_size):
            theirs = masks.positions(sequence_chunks(cp_size * length, cp_size, source, "ring"), device)
            expected = masks.visible(mine, theirs, window)[0, 0]
            shown = torch.zeros(length, length, dtype=torch.int64)
            rows = torch.zeros(length, dtype=torch.int64)
            for tile in tiles(cp_size, rank, source, length, window, documents, masked_rows):
                q, k = mine[tile.queries], theirs[tile.keys]
                assert len(q)
                assert len(k)
                if tile.mask == "none":
                    block = torch.ones(len(q), len(k), dtype=torch.bool)
                elif tile.mask == "causal":
                    block = torch.ones(len(q), len(k), dtype=torch.bool).tril()
                else:
                    block = masks.visible(q, k, window)[0, 0]
                shown[tile.queries, tile.keys] += block
                rows[tile.queries] += 1
                if tile.mask == "positions":
                    assert len(q) <= masked_rows
            assert torch.equal(shown, expected.to(torch.int64))
            # The first step writes where later ones merge, so no row may be missing there, and none be there twice.
            assert rows.max() <= 1
            assert rank != source or rows.min() == 1


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_every_rank_computes_half_a_block_in_every_step_of_a_causal_ring(cp_size: int) -> None:
    for rank in range(cp_size):
        for source in range(cp_size):
            (tile,) = tiles(cp_size, rank, source, 16)
            area = (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            assert area == (256 if rank == source else 128)
            assert tile.mask == ("causal" if rank == source else "none")


def test_a_narrow_window_leaves_out_the_blocks_it_hides() -> None:
    computed = [source for source in range(8) if tiles(8, 3, source, 64, window=8)]
    assert computed == [2, 3, 4]


def test_a_window_costs_its_own_width() -> None:
    length, window = 4096, 64
    computed = [tile for source in range(4) for tile in tiles(4, 1, source, length, window, masked_rows=256)]
    pairs = sum((t.queries.stop - t.queries.start) * (t.keys.stop - t.keys.start) for t in computed)
    assert pairs <= length * (256 + window)


def test_documents_never_change_which_tiles_are_computed() -> None:
    for source in range(4):
        plain, packed = tiles(4, 1, source, 16), tiles(4, 1, source, 16, documents=True)
        rows = {row for tile in plain for row in range(tile.queries.start, tile.queries.stop)}
        assert rows == {row for tile in packed for row in range(tile.queries.start, tile.queries.stop)}
