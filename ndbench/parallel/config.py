"""Degrees of parallelism, the options of each axis, and every rule that makes a layout valid.

Pure Python: this module imports neither torch nor transformers, so that a layout can be checked on a laptop,
before any process starts. The mesh itself is made in ``mesh.py``; what a model's plan cannot do is in ``tensor.py``.

"Axis" means a mesh axis (``dp_replicate``, ``dp_shard``, ``cp``, ``tp``), "dim" a tensor dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from ndbench.parallel.context import refuse_context

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from the slowest to the fastest varying rank index."""

DATA_COLLECTIVES = ("nccl", "copy_engine")
CHECKPOINTING_MODES = ("none", "full", "selective", "attention")
"""Activation checkpointing: keep everything, a block's input only, or that and what is dear to compute again, or that
and what attention gave."""
OFFLOADED_MODES = ("full", "attention")
"""Those under which what is kept may wait in host memory: few tensors, of one size in all blocks."""

ATTENTION_KERNELS = ("flash4", "cudnn", "flash")
FLASH4_PACKAGE = "flash-attn-4"
"""CUDA kernels that attention can be asked to use."""

FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""How FP8 operands are scaled, in torchao's names: one scale a tensor (fastest), one a row, or that without the
gradients of the weights (most exact)."""

FLOAT8_MULTIPLE = 16
"""FP8 matrix units take rows, columns and tokens in multiples of this."""

FLOAT8_MISSING = "precision 'fp8' needs the package torchao: pip install 'ndbench[fp8]'"

WHOLE_ATTENTION = frozenset({"phi3", "olmo2"})
"""Model types whose plan leaves attention whole on every tp rank, so that heads need not divide by tp."""


class ModelShape(Protocol):
    """What the rules read of a model; None where it is not known before the model is built."""

    @property
    def model_type(self) -> str | None: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def intermediate_size(self) -> int | None: ...
    @property
    def num_attention_heads(self) -> int | None: ...
    @property
    def num_key_value_heads(self) -> int | None: ...
    @property
    def target(self) -> str | None: ...
    @property
    def tp_plan(self) -> dict[str, str] | None: ...


class StepShape(Protocol):
    """What the rules read of a training step."""

    @property
    def global_batch_size(self) -> int: ...
    @property
    def micro_batch_size(self) -> int | None: ...
    @property
    def sequence_length(self) -> int: ...


@dataclass
class ParallelismConfig:
    """One layout: the degree of each axis and the options that belong to it.

    Degrees are numbers of ranks; one of them may be ``-1``, meaning "the rest of the world" (see :meth:`resolved`).
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    cp_size: int = 1
    tp_size: int = 1

    reshard_after_forward: bool = True
    """FSDP: free a block's gathered parameters between forward and backward (less memory, one more all-gather)."""
    kept_blocks: int = 0
    """FSDP: so many of the last blocks stay gathered all the same, to spend the memory there is."""
    data_collectives: str = "nccl"
    """DP and FSDP: parameters are gathered and gradients summed by ``nccl``, or by the ``copy_engine`` of GPUs that
    share a host: they take no multiprocessor from the computation."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    sequence_parallel: bool = True
    """TP: shard the activations between the blocks' matmuls (norms, residuals) over the sequence dim."""
    loss_parallel: bool = True
    """TP: keep the logits sharded over the vocabulary through the cross-entropy."""
    cp_method: str = "ring"
    """CP: ``ring`` (rotate keys and values) or ``ulysses`` (all-to-all over heads)."""

    @property
    def sizes(self) -> dict[str, int]:
        """Degree by axis name, slow to fast."""
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def world_size(self) -> int:
        """Product of the degrees; only meaningful once no degree is -1."""
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def batch_size(self) -> int:
        """Number of ranks with different data: dp_replicate x dp_shard."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def fsdp_size(self) -> int:
        """Number of ranks that share one copy of the parameters: dp_shard x cp."""
        return self.dp_shard_size * self.cp_size

    def micro_batches(self, step: StepShape) -> tuple[int, int]:
        """Micro-steps of an optimizer step, and a rank's sequences in one."""
        sequences = step.global_batch_size // self.batch_size
        rows = step.micro_batch_size or sequences
        return sequences // rows, rows

    def micro_steps(self, step: StepShape) -> tuple[int, int]:
        """Micro-steps of an optimizer step, and a rank's tokens in one."""
        steps, rows = self.micro_batches(step)
        return steps, rows * step.sequence_length // self.cp_size

    def exchanges_rows(self, vocab_size: int, micro_steps: int, tokens: int) -> bool:
        """Do FSDP's ranks exchange the embedding's rows that a micro-step's ``tokens`` ask for, instead of the table?

        If that sends fewer: rows come from the shards' group in forward and go to all ranks as gradients in backward,
        in each micro-step. The table's would be gathered in each, reduced once, and once more over replicas; they count
        like others, though float32 gradients are twice the bytes of bf16 rows.
        """
        shards, replicas = self.fsdp_size, self.dp_replicate_size
        rows = micro_steps * tokens * (shards - 1 + shards * replicas - 1)
        table = -(-vocab_size // shards) * ((shards - 1) * (micro_steps + 1) + 2 * (replicas - 1) / replicas)
        return shards > 1 and self.tp_size == 1 and not self.cpu_offload and rows < table

    def resolved(self, world_size: int) -> ParallelismConfig:
        """The same layout with a degree of -1 replaced by ``world_size`` over the product of the others.

        Raises ``ValueError`` when more than one degree is -1, a degree is not positive, or the product is not
        ``world_size``.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, it must be at least 1")
        sizes = self.sizes
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"parallelism.{axis}_size is {size}, it must be at least 1, or -1 for the rest")
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            raise ValueError(f"parallelism has more than one degree of -1: {', '.join(open_axes)}")
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != -1)
        known = 1
        for size in sizes.values():
            known *= 1 if size == -1 else size
        if not open_axes:
            if known != world_size:
                raise ValueError(f"parallelism {product} = {known} ranks, but world_size is {world_size}")
            return dataclasses.replace(self)
        rest, remainder = divmod(world_size, known)
        if remainder or rest < 1:
            raise ValueError(
                f"parallelism.{open_axes[0]}_size=-1 has no value: world_size {world_size} is not a multiple of "
                f"{product} = {known}"
            )
        changed = dataclasses.replace(self)
        setattr(changed, f"{open_axes[0]}_size", rest)
        return changed

    @property
    def layout(self) -> str:
        """Short readable name: ``ddp8``, ``fsdp8``, ``hsdp2x4``, ``fsdp4_tp2``, ``ddp2_cp2_tp2``, ``single``."""
        replicate, shard = self.dp_replicate_size, self.dp_shard_size
        parts = []
        if replicate != 1 and shard != 1:
            parts.append(f"hsdp{replicate}x{shard}")
        elif replicate != 1:
            parts.append(f"ddp{replicate}")
        elif shard != 1:
            parts.append(f"fsdp{shard}")
        if self.cp_size != 1:
            parts.append(f"cp{self.cp_size}")
        if self.tp_size != 1:
            parts.append(f"tp{self.tp_size}")
        return "_".join(parts) or "single"

    def refuse(self, model: ModelShape, training: StepShape) -> list[str]:
        """Why this layout cannot train this model, one line each with the numbers; empty when it can.

        Degrees must be resolved. What depends on the model's own tensor-parallel plan is not known here:
        see ``tensor.plan_refusals``.
        """
        unresolved = [f"parallelism.{axis}_size is {size}" for axis, size in self.sizes.items() if size < 1]
        if unresolved:
            return unresolved
        return [
            *self._refuse_fsdp(),
            *self._refuse_batch(training),
            *self._refuse_tensor(model),
            *self._refuse_sequence(model, training),
        ]

    def _refuse_fsdp(self) -> list[str]:
        if self.data_collectives not in DATA_COLLECTIVES:
            return [f"data_collectives '{self.data_collectives}' is not known; known: {', '.join(DATA_COLLECTIVES)}"]
        if self.kept_blocks < 0:
            return [f"kept_blocks is {self.kept_blocks}, it must be at least 0"]
        if self.kept_blocks and not self.reshard_after_forward:
            return [f"kept_blocks is {self.kept_blocks}, but reshard_after_forward=false keeps all: give one of both"]
        if self.data_collectives == "copy_engine" and self.cpu_offload:
            return ["data_collectives=copy_engine keeps buffers on the GPU; with cpu_offload=true take nccl"]
        return []

    def _refuse_batch(self, training: StepShape) -> list[str]:
        total, ranks, micro = training.global_batch_size, self.batch_size, training.micro_batch_size
        if total < 1 or total % ranks:
            shared = f"dp_replicate {self.dp_replicate_size} x dp_shard {self.dp_shard_size} = {ranks}"
            return [f"global_batch_size {total} is not a multiple of the {shared} ranks that read different data"]
        if micro is not None and (micro < 1 or (total // ranks) % micro):
            local = f"the {total // ranks} sequences of a rank (global_batch_size {total} / {ranks} batch ranks)"
            return [f"micro_batch_size {micro} does not divide {local}"]
        return []

    def _refuse_tensor(self, model: ModelShape) -> list[str]:
        tp, reasons = self.tp_size, []
        if tp == 1:
            return []
        if model.target is not None:
            return [] if model.tp_plan else [f"tp {tp} on model.target={model.target} needs a model.tp_plan"]
        if model.model_type not in WHOLE_ATTENTION:
            for what, heads in (
                ("attention heads", model.num_attention_heads),
                ("kv heads", model.num_key_value_heads),
            ):
                if heads is not None and heads % tp:
                    reasons.append(f"{heads} {what} do not divide by tp {tp}")
        if model.intermediate_size is not None and model.intermediate_size % tp:
            reasons.append(f"intermediate_size {model.intermediate_size} does not divide by tp {tp}")
        if model.vocab_size is not None and -(-model.vocab_size // tp) * (tp - 1) >= model.vocab_size:
            reasons.append(f"vocab_size {model.vocab_size} over tp {tp} leaves a rank without a token")
        return reasons

    def _refuse_sequence(self, model: ModelShape, training: StepShape) -> list[str]:
        length, sharded = training.sequence_length, self.tp_size > 1 and self.sequence_parallel and not model.target
        if length < 1:
            return [f"sequence_length is {length}, it must be at least 1"]
        if self.cp_size == 1:
            if sharded and length % self.tp_size:
                return [f"sequence_length {length} does not divide by tp {self.tp_size}, which sequence_parallel needs"]
            return []
        if model.target is not None:
            return [f"cp {self.cp_size} needs a transformers model; model.target has its own attention"]
        heads = model.num_attention_heads
        kv_heads = model.num_key_value_heads or heads
        return refuse_context(
            cp_size=self.cp_size,
            method=self.cp_method,
            sequence_length=length,
            num_attention_heads=heads or self.tp_size * self.cp_size,
            num_key_value_heads=kv_heads or self.tp_size * self.cp_size,
            tp_size=self.tp_size,
            sequence_parallel=sharded,
            heads_sharded=model.model_type not in WHOLE_ATTENTION,
            softcap=model.model_type == "gemma2",
        )
