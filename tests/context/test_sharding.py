"""Which tokens a rank holds: sharding is a permutation, done once, and what does not fit is refused with numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ndbench.parallel.context import (
    METHODS,
    kv_replication,
    refuse_context,
    ring_bytes,
    sequence_chunks,
    shard_sequence,
    ulysses_bytes,
    unshard_sequence,
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_unshard_is_the_inverse_of_shard(method: str, cp_size: int) -> None:
    x = torch.randn(3, 32, 5)
    shards = [shard_sequence(x, cp_size, rank, method) for rank in range(cp_size)]
    assert torch.equal(unshard_sequence(shards, method), x)


@pytest.mark.parametrize("method", METHODS)
def test_every_token_belongs_to_exactly_one_rank(method: str) -> None:
    held = [token for rank in range(4) for chunk in sequence_chunks(48, 4, rank, method) for token in chunk]
    assert sorted(held) == list(range(48))


def test_ring_deals_head_and_tail_and_ulysses_deals_in_order() -> None:
    tokens = torch.arange(16)
    assert shard_sequence(tokens, 4, 1, "ring", dim=0).tolist() == [2, 3, 12, 13]
    assert shard_sequence(tokens, 4, 1, "ulysses", dim=0).tolist() == [4, 5, 6, 7]


def test_every_rank_of_the_ring_sees_equally_many_pairs_of_a_causal_mask() -> None:
    pairs = [sum(token + 1 for chunk in sequence_chunks(64, 8, rank, "ring") for token in chunk) for rank in range(8)]
    assert len(set(pairs)) == 1


def test_one_rank_holds_the_sequence_untouched() -> None:
    x = torch.arange(7)[None]
    assert shard_sequence(x, 1, 0, "ring") is x


@pytest.mark.parametrize(("method", "length", "words"), [("ring", 60, "60.*8.*56 or 64"), ("ulysses", 3, "3.*4.*4")])
def test_a_sequence_that_does_not_divide_is_refused_with_the_nearest_that_does(
    method: str, length: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        shard_sequence(torch.zeros(1, length), 4, 0, method)


def _refuse(**changes: object) -> list[str]:
    fits = {"cp_size": 4, "method": "ring", "sequence_length": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    return refuse_context(**{**fits, **changes})  # type: ignore[arg-type]


def test_a_layout_that_fits_is_not_refused() -> None:
    assert _refuse() == []
    assert _refuse(method="ulysses", tp_size=2) == []
    assert _refuse(sequence_length=72, tp_size=3, sequence_parallel=True) == []
    assert _refuse(method="ulysses", tp_size=4, heads_sharded=False) == []
    assert _refuse(cp_size=1, sequence_length=7, softcap=True) == []


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"sequence_length": 60}, ["60", "8", "56 or 64"]),
        ({"tp_size": 3, "sequence_parallel": True}, ["64", "24", "48 or 72"]),
        ({"method": "ulysses", "cp_size": 4, "tp_size": 4}, ["8 heads", "tp 4 x cp 4 = 16", "ring"]),
        ({"num_key_value_heads": 3}, ["8", "3"]),
        ({"softcap": True}, ["softcap", "ulysses"]),
        ({"method": "rings"}, ["rings", "ring, ulysses"]),
    ],
)
def test_a_refusal_names_the_numbers(changes: dict[str, object], numbers: list[str]) -> None:
    (reason,) = _refuse(**changes)
    for number in numbers:
        assert number in reason


@pytest.mark.parametrize(("heads", "kv_heads", "cp_size"), [(8, 2, 4), (8, 2, 8), (6, 3, 2), (12, 4, 6), (8, 8, 4)])
def test_replicated_kv_heads_divide_by_cp_and_groups_stay_whole(heads: int, kv_heads: int, cp_size: int) -> None:
    replicated = kv_heads * kv_replication(kv_heads, cp_size)
    assert replicated % cp_size == 0
    assert heads % replicated == 0


def test_byte_formulas_of_a_case_done_by_hand() -> None:
    # K and V of 2 heads x 16 tokens x 8 dims: 512 elements. 3 rotations in bf16, 2 in backward; of their gradients' 3
    # hops the first is in bf16, the sums after it in float32; with a mask all are sums.
    sent = ring_bytes(cp_size=4, batch=1, kv_heads=2, local_length=16, head_dim=8, element_size=2)
    assert sent == {"forward": 3 * 512 * 2, "backward": 2 * 512 * 2 + 512 * 2 + 2 * 512 * 4}
    sent = ring_bytes(cp_size=4, batch=1, kv_heads=2, local_length=16, head_dim=8, element_size=2, masked=True)
    assert sent["backward"] == 2 * 512 * 2 + 3 * 512 * 4
    # 2 kv heads become 4; 8 + 4 + 4 heads go out, 8 come back, each rank keeps a quarter.
    sent = ulysses_bytes(cp_size=4, batch=1, heads=8, kv_heads=2, local_length=16, head_dim=8, element_size=2)
    assert sent == {"forward": 24 * 128 * 3 // 4 * 2, "backward": 24 * 128 * 3 // 4 * 2}


def test_the_rules_need_no_torch() -> None:
    code = "import sys, ndbench.parallel.context; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
