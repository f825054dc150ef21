"""The root mesh, its views, and the label of every process group."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.mesh import rank_grid_text
from tests.parallel.rank_tasks import mesh_facts, wrong_world
from tests.parity.cases import all_layouts, layout
from tests.parity.pool import pool


def test_views_have_the_sizes_of_the_axes_they_join() -> None:
    for each in all_layouts():
        for facts in pool(each.world_size).run(mesh_facts, each):
            assert facts["batch"] == facts["batch_size"] == each.batch_size
            assert facts["loss"] == each.batch_size * each.cp_size
            assert facts["fsdp"] == each.fsdp_size
            expected = (each.dp_replicate_size, each.fsdp_size) if each.dp_replicate_size > 1 else (each.fsdp_size,)
            assert facts["fsdp_mesh"] == expected


def test_ranks_of_a_tp_and_cp_group_share_their_batch_rank() -> None:
    facts = pool(8).run(mesh_facts, layout(2, 1, 2, 2))
    assert [each["batch_rank"] for each in facts] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_every_group_in_use_has_the_name_of_its_axis() -> None:
    labels = pool(8).run(mesh_facts, layout(2, 2, 1, 2))[0]["labels"]
    assert labels == {"world", "dp_replicate", "dp_shard", "tp", "batch"}
    labels = pool(8).run(mesh_facts, layout(2, 2, 2, 1))[0]["labels"]
    assert labels == {"dp_replicate", "dp_shard", "cp", "batch", "fsdp", "loss"}
    assert pool(8).run(mesh_facts, layout(1, 8))[0]["labels"] == {"dp_shard"}


def test_a_mesh_is_made_once() -> None:
    assert all(facts["cached"] for facts in pool(4).run(mesh_facts, layout(1, 2, 1, 2)))


def test_a_world_of_another_size_is_refused() -> None:
    assert "hsdp2x4 needs 8 ranks, the process group has 2" in pool(2).run(wrong_world)[0]


@pytest.mark.parametrize("parallelism", [ParallelismConfig(2, 2, 1, 2), ParallelismConfig(1, 2, 2, 2)])
def test_the_documentation_draws_the_grid_as_it_is(parallelism: ParallelismConfig) -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    assert textwrap.indent(rank_grid_text(parallelism), "    ") in page
