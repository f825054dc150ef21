"""An embedding whose rows are exchanged trains as one that is gathered, in every layout that FSDP has a part in."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ndbench.parallel import embedding
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.traffic import difference, step_traffic
from tests.parallel import traffic_tasks
from tests.parity.cases import Case, case, layout, llama, training
from tests.parity.compare import assert_parity, errors
from tests.parity.pool import pool

LARGE = llama(vocab_size=4099, num_hidden_layers=1)
"""More rows than a batch has tokens, and a prime number of them."""
LAYOUTS = [layout(1, 2), layout(1, 1, 2), layout(2, 2), layout(1, 2, 2), layout(2, 1, 2), layout(1, 8), layout(2, 2, 2)]


def by_name(at: ParallelismConfig) -> str:
    return at.layout


def large(at: ParallelismConfig, **changes: Any) -> Case:
    return case(at, LARGE, training=training(**changes))


@pytest.mark.parametrize("at", LAYOUTS, ids=by_name)
def test_rows_are_exchanged_and_the_numbers_kept(at: ParallelismConfig) -> None:
    here = large(at)
    model, step = traffic_tasks.shapes(here)
    form = step_traffic(model, at, step)
    ranks = pool(at.world_size).run(traffic_tasks.recorded, here)
    assert difference(ranks[0]["totals"], form) == {}
    assert at.exchanges_rows(model.vocab_size, step.global_batch_size // at.batch_size * step.sequence_length)
    assert_parity(here)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 1},
        {"activation_checkpointing": "full", "loss_chunk_size": 7},
        {"optimizer": "adamw", "learning_rate": 1e-3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_so_they_are_with_other_techniques(changes: dict[str, Any]) -> None:
    assert_parity(large(layout(2, 2), **changes))


def test_a_table_of_fewer_rows_than_tokens_is_gathered() -> None:
    assert layout(1, 2).exchanges_rows(vocab_size=1000, tokens=499)
    assert not layout(1, 2).exchanges_rows(vocab_size=1000, tokens=500)
    assert not layout(1, 2, 1, 2).exchanges_rows(vocab_size=1000, tokens=1), "tp has the table by rows already"
    assert not layout(1, 2, cpu_offload=True).exchanges_rows(vocab_size=1000, tokens=1)
    assert not layout(8, 2).exchanges_rows(vocab_size=1000, tokens=100), "gradients go to all replicas"
    assert not layout(8).exchanges_rows(vocab_size=1000, tokens=1), "nothing is sharded"


def lose_other_replicas() -> Any:
    """The planted fault: gradients are gathered, but those of other FSDP groups left out."""
    own = embedding._own

    def mine(tokens: torch.Tensor, weight: torch.Tensor) -> Any:
        index, here = own(tokens, weight)
        if len(tokens) > 128:
            here[128:] = False
        return index, here

    return patch.object(embedding, "_own", mine)


def test_lost_gradients_of_a_replica_are_seen() -> None:
    found = errors(large(layout(2, 2)), lose_other_replicas)
    assert found["gradients"][0] > 0.1
    assert "embed_tokens" in found["gradients"][1]


def test_without_gradients_ranks_may_have_different_numbers_of_tokens() -> None:
    for rank, (found, wanted) in enumerate(pool(2).run(uneven)):
        assert found.shape == (1, 3 + rank, 8)
        torch.testing.assert_close(found, wanted)


def uneven() -> tuple[torch.Tensor, torch.Tensor]:
    from ndbench.parallel._torch_private import local_tensor
    from ndbench.parallel.initialize import local_slice
    from ndbench.parallel.mesh import build_mesh

    table = torch.arange(11 * 8.0).view(11, 8)
    with torch.device("meta"):
        module = torch.nn.Embedding(11, 8)
    embedding.exchange_rows(module, build_mesh(layout(1, 2), "cpu"), None)
    module.to_empty(device="cpu")
    rows, _ = local_slice(module.weight)
    local_tensor(module.weight).data.copy_(table[rows.start : rows.stop])
    tokens = torch.tensor([[10, 0, 7, 5][: 3 + dist.get_rank()]])
    with torch.no_grad():
        return module(tokens), table[tokens]
