"""Context parallelism as arithmetic: which tokens a rank holds, what does not fit, and the bytes it sends.

The exchange itself is in ``ring.py`` and ``ulysses.py``. Nothing here imports torch at module level, so that the rules
can be checked before any process starts. This module knows nothing of models or masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

METHODS = ("ring", "ulysses")
"""``ring`` rotates keys and values from rank to rank; ``ulysses`` exchanges sequence shards for head shards."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Kinds of layers (transformers' ``layer_types``) that the attention function implements."""


def sequence_chunks(sequence_length: int, cp_size: int, cp_rank: int, method: str) -> list[range]:
    """Global token indices of a rank's shard, in the order in which the rank holds them.

    ``ring`` deals head and tail chunks: of 2·cp equal chunks rank r holds r and 2·cp-1-r ("zigzag"), so that every rank
    has the same share of a causal mask. ``ulysses`` deals one contiguous chunk: ranks see the whole sequence later.

    Raises ``ValueError`` when the sequence does not divide into equal chunks.
    """
    if method not in METHODS:
        raise ValueError(f"cp_method is '{method}', known methods are {', '.join(METHODS)}")
    if cp_size == 1:
        return [range(sequence_length)]
    parts = 2 * cp_size if method == "ring" else cp_size
    if sequence_length < parts or sequence_length % parts:
        raise ValueError(_indivisible(sequence_length, parts, f"{method} context parallelism over {cp_size} ranks"))
    length = sequence_length // parts
    indices = [cp_rank, parts - 1 - cp_rank] if method == "ring" else [cp_rank]
    return [range(index * length, (index + 1) * length) for index in indices]


def shard_sequence(x: torch.Tensor, cp_size: int, cp_rank: int, method: str, dim: int = 1) -> torch.Tensor:
    """This rank's tokens of ``x``, whose dim ``dim`` is the whole sequence; a copy when cp_size > 1.

    To be applied exactly once to each of input ids, labels and position ids. RoPE is then right because the positions
    travel with their tokens. Document ids stay whole: the attention function takes them as [batch, sequence].
    """
    import torch

    if cp_size == 1:
        return x
    chunks = sequence_chunks(x.shape[dim], cp_size, cp_rank, method)
    return torch.cat([x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim=dim)


def unshard_sequence(shards: Sequence[torch.Tensor], method: str, dim: int = 1) -> torch.Tensor:
    """The whole sequence from the shards of all cp ranks in rank order: the inverse of :func:`shard_sequence`."""
    import torch

    if len(shards) == 1:
        return shards[0]
    length = sum(shard.shape[dim] for shard in shards)
    placed: list[tuple[int, torch.Tensor]] = []
    for rank, shard in enumerate(shards):
        offset = 0
        for chunk in sequence_chunks(length, len(shards), rank, method):
            placed.append((chunk.start, shard.narrow(dim, offset, len(chunk))))
            offset += len(chunk)
    return torch.cat([piece for _, piece in sorted(placed, key=lambda item: item[0])], dim=dim)


def refuse_context(
    *,
    cp_size: int,
    method: str,
    sequence_length: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    tp_size: int = 1,
    sequence_parallel: bool = False,
    heads_sharded: bool = True,
    softcap: bool = False,
) -> list[str]:
    """What does not fit, one line each with the numbers; empty when the layout is valid.

    ``heads_sharded`` is False where the model's plan leaves attention whole on each tp rank; ``softcap`` says that the
    model bounds its attention scores (Gemma 2).
    """
    if method not in METHODS:
        return [f"cp_method is '{method}', known methods are {', '.join(METHODS)}"]
    if cp_size == 1:
        return []
    reasons = []
    if softcap and method == "ring":
        reasons.append(f"attention softcap is not implemented under cp_method=ring (cp {cp_size}); ulysses has it")
    parts = cp_size * (2 if method == "ring" else 1)
    if sequence_parallel:
        # A shard of sequence/cp tokens is split once more over tp.
        parts = math.lcm(parts, cp_size * tp_size)
    if sequence_length < parts or sequence_length % parts:
        sharing = f"{method} context parallelism over {cp_size} ranks"
        reasons.append(_indivisible(sequence_length, parts, sharing + (f" and tp {tp_size}" if tp_size > 1 else "")))
    if num_attention_heads % num_key_value_heads:
        reasons.append(f"{num_attention_heads} attention heads are not a multiple of {num_key_value_heads} kv heads")
    shards = cp_size * (tp_size if heads_sharded else 1)
    if method == "ulysses" and num_attention_heads % shards:
        axes = f"tp {tp_size} x cp {cp_size} = {shards}" if shards > cp_size else f"cp {cp_size}"
        reasons.append(
            f"ulysses splits attention heads over cp: {num_attention_heads} heads do not divide by {axes}; "
            "cp_method=ring has no such limit"
        )
    return reasons


def refuse_attention(config: Any, cp_size: int = 1, method: str = "ring") -> list[str]:
    """What ``config`` (a transformers configuration) asks of attention that is not implemented; empty when all is.

    For the parent process, before any rank starts: it reads attributes and needs no weights.
    """
    reasons = []
    if dropout := getattr(config, "attention_dropout", None):
        reasons.append(f"attention_dropout is {dropout}: attention with dropout is not implemented")
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap and cp_size > 1 and method == "ring":
        what = f"attn_logit_softcapping is {softcap}"
        reasons.append(f"{what}: not implemented under cp_method=ring (cp {cp_size}); ulysses has it")
    if getattr(config, "use_bidirectional_attention", False):
        reasons.append("use_bidirectional_attention is set: only causal attention is implemented")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    if unknown:
        reasons.append(f"layer types {', '.join(unknown)} are not implemented, only {', '.join(LAYER_TYPES)}")
    return reasons


def _indivisible(length: int, parts: int, what: str) -> str:
    below = length // parts * parts
    nearest = f"{below} or {below + parts}" if below else f"{parts}"
    return f"sequence_length {length} is not a multiple of {parts}, which {what} needs; nearest: {nearest}"


def ring_bytes(
    *,
    cp_size: int,
    batch: int,
    kv_heads: int,
    local_length: int,
    head_dim: int,
    element_size: int,
    masked: bool = False,
) -> dict[str, int]:
    """Bytes one rank sends in one attention layer of the ring: ``{"forward": ..., "backward": ...}``.

    With n = cp_size, s = local_length, kv = 2 · batch · kv_heads · s · head_dim elements (keys and values, never
    expanded to the query heads), e = element_size, f = max(e, 4):

    * forward: n-1 rotations of kv in the compute dtype, (n-1) · kv · e;
    * backward: n-2 rotations of kv, since it begins with the keys that forward ended with and ends with the rank's own,
      and n-1 of the gradients of kv. These are sums in float32 (float64 for float64), but the first hop takes them as
      one kernel gave them: (n-2) · kv · e + kv · (e + (n-2) · f). With a mask (window, documents) many tiles add up to
      the first, too: (n-2) · kv · e + kv · (n-1) · f.
    """
    if cp_size == 1:
        return {"forward": 0, "backward": 0}
    elements = 2 * batch * kv_heads * local_length * head_dim
    rotation = elements * element_size
    narrow = 0 if masked else 1
    gradients = elements * (narrow * element_size + (cp_size - 1 - narrow) * max(element_size, 4))
    return {"forward": (cp_size - 1) * rotation, "backward": (cp_size - 2) * rotation + gradients}


def ulysses_bytes(
    *, cp_size: int, batch: int, heads: int, kv_heads: int, local_length: int, head_dim: int, element_size: int
) -> dict[str, int]:
    """Bytes one rank sends in one attention layer under Ulysses: ``{"forward": ..., "backward": ...}``.

    One all-to-all takes queries, keys and values, one brings the output back. With n = cp_size and kv' = kv_heads ·
    :func:`kv_replication` (kv heads are repeated until they divide by n), each direction sends
    (n-1)/n · batch · local_length · head_dim · (2 · heads + 2 · kv') · element_size; backward sends the same.
    """
    replicated = kv_heads * kv_replication(kv_heads, cp_size)
    elements = batch * local_length * head_dim * (2 * heads + 2 * replicated)
    sent = elements // cp_size * (cp_size - 1) * element_size
    return {"forward": sent, "backward": sent}


def kv_replication(kv_heads: int, cp_size: int) -> int:
    """How often Ulysses repeats each kv head so that they divide by cp: cp / gcd(kv_heads, cp).

    When the query heads divide by cp, the number of query heads of a kv head divides by this, so grouping stays right.
    """
    return cp_size // math.gcd(kv_heads, cp_size)
