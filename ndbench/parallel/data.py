"""Sharded data parallelism: FSDP2 over the ``fsdp`` view, replicas as the outer dim of a 2-D mesh.

A unit is gathered and reduced at once: each transformer block, the embedding (unless ``embedding.py`` has it), the
output head, and the rest. Gradients are sums over ranks, never means: the loss is already divided by the tokens of the
whole global batch. It knows nothing of tensor or context parallelism. Replicas of what is not sharded at all are
``replicate.py``'s, unless they are offloaded: these are a mesh of (N, 1).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ndbench.parallel.embedding import EmbeddingByRows
from ndbench.parallel.mesh import Mesh


def apply_fully_shard(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: Mesh,
    param_dtype: torch.dtype | None,
) -> list[nn.Module]:
    """Shard the units of ``model`` in place and return them in the order of forward, with ``model`` for the rest.

    ``param_dtype`` is what forward and backward compute in; gradients are summed in float32 whatever that is.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if mesh.config.cpu_offload else OffloadPolicy()
    freed = blocks[: max(len(blocks) - mesh.config.kept_blocks, 0)] if mesh.config.reshard_after_forward else []
    tables = tables_of(model)
    by_rows = {cast(nn.Parameter, table.weight) for table in tables if isinstance(table, EmbeddingByRows)}
    units = [each for each in tables if not isinstance(each, EmbeddingByRows)]
    for module in (*blocks, *units, model):
        # What comes last in forward comes first in backward; freeing it would only gather it twice. The embedding is
        # kept like it: all of both is what a rank holds anyway when it computes the loss.
        fully_shard(
            module,
            mesh=mesh.fsdp_mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=module in freed,
            ignored_params=by_rows,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo has no PREMUL_SUM, which a divide factor would otherwise go through.
        module.set_force_sum_reduction_for_comms(True)
    # A root without tables has the norms before the head; with them, what comes first and what comes last.
    return [*units[:-1], *blocks, model, units[-1]] if units else [model, *blocks]


def tables_of(model: nn.Module) -> list[nn.Module]:
    """Embedding and output head, the largest weights outside the blocks, unless they are one.

    As units of their own the head's is gathered, and its gradient reduced, while blocks compute.
    """
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, name)())
        except (AttributeError, NotImplementedError):
            return []  # a model of the user's own
    if not all(isinstance(module, (nn.Embedding, nn.Linear)) for module in found):
        return []
    embedding, head = found
    return [] if embedding.weight is head.weight else found


def set_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over ranks; before the last micro-step they are only added up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)
        model.set_is_last_backward(sync)
