"""Data parallelism: FSDP2 over the ``fsdp`` view, replicas as the outer dim of a 2-D mesh, (N, 1) without shards.

One unit a transformer block and one for the rest. Gradients are sums over ranks, never means: the loss is already
divided by the tokens of the whole global batch. It knows nothing of tensor or context parallelism.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ndbench.parallel.mesh import Mesh


def apply_fully_shard(model: nn.Module, blocks: list[nn.Module], mesh: Mesh, param_dtype: torch.dtype | None) -> None:
    """Shard ``blocks`` and then ``model`` in place; ``param_dtype`` is what forward and backward compute in.

    Gradients are reduced in float32 whatever they are computed in.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if mesh.config.cpu_offload else OffloadPolicy()
    for module in (*blocks, model):
        # The root is needed again at once in backward; freeing it would only gather it twice.
        reshard = mesh.config.reshard_after_forward and module is not model
        fully_shard(
            module, mesh=mesh.fsdp_mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo has no PREMUL_SUM, which a divide factor would otherwise go through.
        module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over ranks; before the last micro-step they are only added up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)
        model.set_is_last_backward(sync)
