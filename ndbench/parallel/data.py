"""Sharded data parallelism: FSDP2 over the ``fsdp`` view, replicas as the outer dim of a 2-D mesh.

A unit is gathered and reduced at once: each transformer block, the embedding, the output head, and the rest. Gradients
are sums over ranks, never means: the loss is already divided by the tokens of the whole global batch. It knows nothing
of tensor or context parallelism. Replicas of what is not sharded at all are ``replicate.py``'s, unless they are
offloaded: these are a mesh of (N, 1).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ndbench.parallel.copy_engine import CopyEngines, use_copy_engines
from ndbench.parallel.mesh import Mesh


def apply_fully_shard(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: Mesh,
    param_dtype: torch.dtype | None,
    device: torch.device,
    accumulates: bool = True,
    fused: bool = False,
) -> CopyEngines | None:
    """Shard the units of ``model`` in place; ``param_dtype`` is what forward and backward compute in.

    Gradients are summed in float32 whatever they are computed in. Copy engines do so on arrival, so what they carry may
    be narrower unless a step ``accumulates`` micro-batches; ``fused`` compiles their sums. Returns who uses them.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    copies = mesh.config.fsdp_collectives == "copy_engine" and mesh.fsdp.size() > 1
    of_units = replace(policy, reduce_dtype=None) if copies and not accumulates else policy
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if mesh.config.cpu_offload else OffloadPolicy()
    freed = blocks[: max(len(blocks) - mesh.config.kept_blocks, 0)] if mesh.config.reshard_after_forward else []
    tables = _tables(model)
    for module in (*blocks, *tables, model):
        # What comes last in forward comes first in backward; freeing it would only gather it twice. The embedding is
        # kept like it: all of both is what a rank holds anyway when it computes the loss.
        fully_shard(
            module,
            mesh=mesh.fsdp_mesh,
            mp_policy=policy if module is model else of_units,
            offload_policy=offload,
            reshard_after_forward=module in freed,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo has no PREMUL_SUM, which a divide factor would otherwise go through.
        module.set_force_sum_reduction_for_comms(True)
    return use_copy_engines(blocks, tables, mesh.fsdp.get_group(), device, fused) if copies else None


def _tables(model: nn.Module) -> list[nn.Module]:
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
