"""An embedding whose rows are exchanged trains as one that is gathered, in every layout that FSDP has a part in."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ndbench.parallel import embedding
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.initialize import local_slice
from ndbench.parallel.mesh import build_mesh
from ndbench.parallel.traffic import difference, exchanges_rows, step_traffic
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
    assert exchanges_rows(model, at, step)
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
    def exchanges(at: ParallelismConfig, tokens: int, micro_steps: int = 1) -> bool:
        return at.exchanges_rows(1000, micro_steps, tokens)

    assert exchanges(layout(1, 2), 499)
    assert not exchanges(layout(1, 2), 500)
    assert exchanges(layout(1, 2), 374, micro_steps=2), "the table would be gathered twice, too, but reduced once"
    assert not exchanges(layout(1, 2), 375, micro_steps=2)
    assert exchanges(layout(8, 2), 60), "15 ranks want each gradient, or all replicas want the table's"
    assert not exchanges(layout(8, 2), 125)
    assert not exchanges(layout(1, 2, 1, 2), 1), "tp has the table by rows already"
    assert not exchanges(layout(1, 2, cpu_offload=True), 1)
    assert not exchanges(layout(8), 1), "nothing is sharded"


def lose_other_replicas() -> Any:
    """The planted fault: gradients are gathered, but those of other FSDP groups left out."""
    own = embedding._own_rows

    def mine(tokens: torch.Tensor, weight: torch.Tensor) -> Any:
        index, here = own(tokens, weight)
        if len(tokens) > 128:
            here[128:] = False
        return index, here

    return patch.object(embedding, "_own_rows", mine)


def test_lost_gradients_of_a_replica_are_seen() -> None:
    found = errors(large(layout(2, 2)), lose_other_replicas)
    assert found["gradients"][0] > 0.1
    assert "embed_tokens" in found["gradients"][1]


WIDTH = 16


def table_of(
    at: ParallelismConfig, rows: int, tokens: int, dtype: torch.dtype | None = None, padding: int | None = None
) -> tuple[embedding.EmbeddingByRows, torch.Tensor]:
    """An embedding by rows on this rank, and the whole table that it is a part of."""
    whole = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        module = torch.nn.Embedding(rows, WIDTH, padding_idx=padding)
    embedding.exchange_rows(module, build_mesh(at, "cpu"), tokens, dtype)
    module.to_empty(device="cpu")
    own, _ = local_slice(module.weight)
    local_tensor(module.weight).data.copy_(whole[own.start : own.stop])
    assert isinstance(module, embedding.EmbeddingByRows)
    return module, whole


def beside_plain(at: ParallelismConfig, rows: int, dtype: torch.dtype | None, padding: int | None) -> Any:
    """Of this rank: hidden states as those of nn.Embedding?; the worst difference of its gradients; a checksum."""
    count, tokens = 9, at.dp_replicate_size * at.fsdp_size
    module, whole = table_of(at, rows, count, dtype, padding)
    generator = torch.Generator().manual_seed(3)
    everyones = torch.randint(0, rows, (tokens, 1, count), generator=generator)
    everyones[:, :, ::3] = padding or 0
    gradients = torch.randn(tokens, 1, count, WIDTH, generator=generator).to(dtype or torch.float32)
    rank = dist.get_rank()
    out = module(everyones[rank])
    out.backward(gradients[rank])
    plain = torch.nn.Embedding(rows, WIDTH, padding_idx=padding, _weight=whole.clone())
    plain(everyones.flatten()).backward(gradients.flatten(0, 2).float())
    own, _ = local_slice(module.weight)
    assert plain.weight.grad is not None
    mine = local_tensor(module.weight.grad)
    worst = (mine - plain.weight.grad[own.start : own.stop]).abs().max().item() if len(own) else 0.0
    return torch.equal(out, whole.to(out.dtype)[everyones[rank]]), worst, (own.start, mine.double().sum().item())


@pytest.mark.parametrize("padding", [None, 4], ids=["", "padding"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("at", "rows"), [(layout(1, 4), 6), (layout(2, 2), 11), (layout(1, 2, 2), 4099)], ids=str)
def test_it_is_torchs_embedding(
    at: ParallelismConfig, rows: int, dtype: torch.dtype | None, padding: int | None
) -> None:
    """Of 6 rows the last of 4 ranks has none. Gradients that came in bfloat16 are added up in float32."""
    results = pool(4).run(beside_plain, at, rows, dtype, padding)
    assert all(equal for equal, *_ in results)
    assert max(worst for _, worst, _ in results) < 1e-5
    sums: dict[int, set[float]] = {}
    for *_, (start, total) in results:
        sums.setdefault(start, set()).add(total)
    assert all(len(each) == 1 for each in sums.values()), "replicas differ"


def test_without_gradients_ranks_may_have_different_numbers_of_tokens() -> None:
    for rank, (found, wanted) in enumerate(pool(2).run(uneven)):
        assert found.shape == (1, 3 + rank, WIDTH)
        torch.testing.assert_close(found, wanted)


def uneven() -> tuple[torch.Tensor, torch.Tensor]:
    module, whole = table_of(layout(1, 2), 11, 4)
    tokens = torch.tensor([[10, 0, 7, 5][: 3 + dist.get_rank()]])
    with torch.no_grad():
        return module(tokens), whole[tokens]


def test_without_gradients_a_replica_may_be_alone() -> None:
    found = pool(4).run(first_replica)
    assert found == [True, True, None, None]


def first_replica() -> bool | None:
    module, whole = table_of(layout(2, 2), 11, 4)
    tokens = torch.tensor([10, 0, 7])
    with torch.no_grad():
        return torch.equal(module(tokens), whole[tokens]) if dist.get_rank() < 2 else None


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([3, 11, 0, 1], "a token is outside of the vocabulary of 11: 0 to 11"),
        ([3, -100, 0, 1], "a token is outside of the vocabulary of 11: -100 to 3"),
        ([3, 1], "was made for 4 tokens a micro-batch, got 2 ([2])"),
    ],
)
def test_what_cannot_be_looked_up_is_refused_before_anything_is_sent(tokens: list[int], said: str) -> None:
    for found in pool(2).run(refused, tokens):
        assert said in found


def refused(tokens: list[int]) -> str:
    module, _ = table_of(layout(1, 2), 11, 4)
    with pytest.raises((IndexError, ValueError)) as error:
        module(torch.tensor(tokens))
    return str(error.value)
