"""The order in which the axes are applied to a model, on one page.

Each step takes just its own mesh and options. What cannot work was refused before (``config.py``, ``plan.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ndbench.parallel._torch_private import (
    expect_gradients_strided_like_outputs,
    no_random_state_for_attention_without_dropout,
    trace_side_effects_of_checkpoints,
)
from ndbench.parallel.attention import configure
from ndbench.parallel.checkpointing import apply_checkpointing, compiles_inside
from ndbench.parallel.copies import Copies
from ndbench.parallel.copy_engine import CopyEngines, replicate_by_copies, shard_by_copies
from ndbench.parallel.data import apply_fully_shard, tables_of
from ndbench.parallel.embedding import can_exchange_rows, exchange_rows
from ndbench.parallel.float8 import Float8, apply_float8, compile_options
from ndbench.parallel.held import Held, HeldAsComputed
from ndbench.parallel.initialize import Weights, fill, materialize
from ndbench.parallel.joined import JoinProducts
from ndbench.parallel.mesh import Mesh
from ndbench.parallel.offload import Offload
from ndbench.parallel.plan import TensorPlan
from ndbench.parallel.precision import ComputeCopies
from ndbench.parallel.replicate import HeldInBuckets
from ndbench.parallel.tensor import apply_tensor_parallel


@dataclass(frozen=True)
class Technique:
    """What is not an axis: numbers, memory and compilation."""

    param_dtype: torch.dtype | None = None
    """What forward and backward compute in; None: the parameters' own float32."""
    activation_checkpointing: str = "none"
    activation_offload: bool = False
    """What recomputed blocks keep waits for backward in host memory."""
    compile: bool = False
    registry_attention: bool = True
    """Attention goes through transformers' registry (not so in a model of the user's own)."""
    attention_kernel: str | None = None
    """One of ``sdpa.KERNELS``; None leaves the choice to PyTorch."""
    micro_steps: int = 0
    """Micro-batches of an optimizer step, whose gradients are added up before they are reduced; 0: any number."""
    tokens: int = 0
    """Of a rank in a micro-batch; 0: any number."""
    float8: Float8 | None = None
    """The blocks' linear layers multiply in FP8; ``param_dtype`` is what the rest computes in."""


@dataclass(frozen=True)
class Parallel:
    """A parallelized model: the same module, and what the gradients' owner must know."""

    model: nn.Module
    held: Held
    """Where the gradients are after backward."""
    partial_gradients: frozenset[str] = frozenset()
    """Replicated parameters whose gradient is split over tp."""
    fully_sharded: bool = False
    copies: Copies | None = None
    """What forward and backward compute with, where that is not the parameters; written with them."""
    copy_engines: CopyEngines | None = None
    """A step is taken inside its ``step``."""

    @property
    def computing(self) -> Callable[[], AbstractContextManager[None]]:
        """Forward and backward run inside it; it may be entered again inside."""
        return self.copies.active if isinstance(self.copies, ComputeCopies) else nullcontext


def parallelize(
    model: nn.Module,
    block_names: list[str],
    mesh: Mesh,
    device: torch.device,
    plan: TensorPlan | None,
    weights: Weights,
    technique: Technique,
) -> Parallel:
    """Apply the layout of ``mesh`` to ``model``, whose parameters are on meta, and give it its weights on ``device``.

    ``block_names`` are the transformer blocks in order; ``plan`` is needed when tp > 1. Collective over the world.
    """
    partial: frozenset[str] = frozenset()

    # 0. FP8 makes new modules of linear layers, so it comes before anything that changes or remembers a module.
    if technique.float8 is not None:
        apply_float8(model, block_names, technique.float8)
    blocks = [model.get_submodule(name) for name in block_names]

    # 1. TP replaces modules' arithmetic, so everything later wraps its result.
    if mesh.tp.size() > 1:
        assert plan is not None, "tp needs a plan"
        partial = apply_tensor_parallel(model, mesh.tp, plan)

    # 2. Attention learns where the rest of the sequence is.
    fused = technique.compile and device.type == "cuda"
    if technique.registry_attention:
        cp_group = mesh.cp.get_group() if mesh.cp.size() > 1 else None
        configure(model, cp_group, mesh.config.cp_method, technique.attention_kernel, fused)

    # 3. Recomputation encloses TP's and CP's communication, and is what gets compiled. Only where the ring breaks the
    #    graph compiled parts are what is computed again: PyTorch compiles nothing of a checkpoint with a break in it.
    options: dict[str, Any] = {"post_grad_custom_pre_pass": JoinProducts()}
    if technique.float8 is not None and device.type == "cuda":
        options |= compile_options()
    inside = [block for block in blocks if compiles_inside(block, technique.activation_checkpointing)]
    if technique.compile:
        if mesh.tp.size() > 1 and device.type == "cpu":
            # GPUs' graphs take a generator instead of giving a state back.
            no_random_state_for_attention_without_dropout()
        if mesh.tp.size() > 1:
            # Modules remember that they are inside of their forward, and forget it at its end.
            trace_side_effects_of_checkpoints()
        if mesh.cp.size() > 1:
            # Attention between two graphs leaves gradients as it was given queries, keys and values: by rows.
            expect_gradients_strided_like_outputs()
        _compile(inside, options)
    offload = Offload(len(blocks), device) if technique.activation_offload else None
    ways = (None, None) if offload is None else (offload.pack, offload.unpack)
    apply_checkpointing(blocks, technique.activation_checkpointing, *ways)
    if technique.compile:
        _compile([*(block for block in blocks if block not in inside), *_norms_outside(model, blocks)], options)
    if offload is not None:
        # Around the compiled graph, whose saved tensors it then sees, but inside of FSDP, which has gathered by then.
        offload.wrap(blocks)

    # 4. FSDP last: it gathers what TP left, outside the compiled and recomputed part. A rank whose parameters nothing
    #    shards needs it only for its offload.
    #    An embedding may have less to send: then its ranks exchange rows, and FSDP leaves it alone.
    sharded = mesh.fsdp.size() > 1 or mesh.config.cpu_offload
    for table in filter(can_exchange_rows, tables_of(model)[:1] if sharded and technique.tokens else ()):
        if mesh.config.exchanges_rows(table.num_embeddings, technique.micro_steps, technique.tokens):
            exchange_rows(table, mesh, technique.tokens, technique.param_dtype)
    units = apply_fully_shard(model, blocks, mesh, technique.param_dtype) if sharded else []

    # 5. Only now is memory allocated, a shard at a time.
    materialize(model, device, torch.device("cpu") if mesh.config.cpu_offload else device)
    fill(model, weights)

    # 6. FSDP casts what it gathers and reduces gradients, unless copies between GPUs do both. Without it the parameters
    #    get copies to compute with, and replicas sum their gradients in buckets, or by copies too.
    by_copies = mesh.config.data_collectives == "copy_engine"
    # Several micro-batches are added up in float32, which then is what travels.
    low = technique.param_dtype or torch.float32
    of_gradients = low if technique.micro_steps == 1 else torch.float32
    replicas = mesh.world["dp_replicate"].get_group() if mesh.config.dp_replicate_size > 1 else None
    if sharded and by_copies and mesh.fsdp.size() > 1:
        group = mesh.fsdp.get_group()
        engines = shard_by_copies(model, units, group, replicas, low, of_gradients, device, fused)
        return Parallel(model, engines.held, partial, True, engines.shards, engines)
    if sharded:
        return Parallel(model, Held(model), partial, fully_sharded=True)
    copies = None if technique.param_dtype is None else ComputeCopies(model, technique.param_dtype)
    leaves = [(p, p) for p in model.parameters() if p.requires_grad] if copies is None else copies.leaves
    if replicas is not None and by_copies:
        engines = replicate_by_copies(model, leaves, blocks, replicas, of_gradients, device, fused)
        return Parallel(model, engines.held, partial, copies=copies, copy_engines=engines)
    if replicas is not None:
        held: Held = HeldInBuckets(model, leaves, blocks, replicas)
    else:
        held = Held(model) if copies is None else HeldAsComputed(model, leaves)
    return Parallel(model, held, partial, copies=copies)


def _compile(modules: Iterable[nn.Module], options: dict[str, Any]) -> None:
    for module in modules:
        # Its forward, not the module: hooks that come later, FSDP's, stay out of the compiled graph.
        module.forward = torch.compile(module.forward, options=options)  # type: ignore[method-assign]


def _norms_outside(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The norms that are in no block: several passes over the hidden states each, one when compiled."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [each for each in model.modules() if id(each) not in inside and type(each).__name__.endswith("Norm")]
