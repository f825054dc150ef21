"""Layout names stand for degrees, in both directions; factorisations are all of them."""

from __future__ import annotations

import pytest

from ndbench.matrix.layouts import parse_layout
from ndbench.matrix.suite import factorisations
from ndbench.parallel.config import ParallelismConfig


@pytest.mark.parametrize("world_size", [1, 2, 4, 6, 8, 16])
def test_every_layout_is_found_again_from_its_name(world_size: int) -> None:
    for degrees in factorisations(world_size, ["dp_replicate", "dp_shard", "cp", "tp"]):
        layout = ParallelismConfig(**{f"{axis}_size": size for axis, size in degrees.items()}).layout
        assert parse_layout(layout) == degrees


@pytest.mark.parametrize("name", ["", None, 8, "tp", "tp0", "fsdp", "hsdp8", "tp2_fsdp4", "_tp4", "ddp2-tp2", "ddp2_"])
def test_anything_else_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="layout"):
        parse_layout(name)


def test_all_factorisations_are_there_once() -> None:
    found = list(factorisations(8, ["dp_replicate", "dp_shard", "tp"]))
    products = {(d["dp_replicate"], d["dp_shard"], d["tp"]) for d in found}
    assert products == {(a, b, c) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) for c in (1, 2, 4, 8) if a * b * c == 8}
    assert len(found) == len(products) == 10
    assert all(d["cp"] == 1 for d in found)
