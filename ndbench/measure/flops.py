"""What a step must compute and hold, in closed form: parameters, model FLOPs, MFU, and an estimate of memory.

Pure arithmetic on a cell's configuration: no torch, so that ``ndbench show`` can tell what fits on a laptop. The FLOPs
are checked against PyTorch's own counter in the tests, the parameters against transformers' models.
"""

from __future__ import annotations

from ndbench.config import Cell, HardwareConfig, ModelConfig, TrainingConfig
from ndbench.measure.shape import Shape, shape_of

CONVENTIONS = ("causal", "palm")


def parameter_count(model: ModelConfig) -> int | None:
    """Parameters of the whole model, a tied ``lm_head`` counted once; None when its shape is not known."""
    shape = shape_of(model)
    return None if shape is None else _parameters(shape)


def _parameters(shape: Shape) -> int:
    final_norm = shape.hidden * (2 if shape.family.norm_bias else 1)
    layers = shape.layers * (shape.layer_matrices + shape.layer_vectors)
    return shape.embedding * (1 if shape.tied else 2) + layers + final_norm


def step_flops(model: ModelConfig, training: TrainingConfig, convention: str = "causal") -> float | None:
    """Model FLOPs of one optimizer step of the global batch: forward and backward, without recomputation.

    Matrix multiplications only, 2 for a multiply-add, backward twice the forward. The embedding lookup counts nothing,
    ``lm_head`` does. Attention costs 4 x heads x head_dim for each (query, key) pair of a layer, and the conventions
    differ in the pairs of a sequence of S tokens:

        palm    S x S, the whole matrix (Chowdhery et al., "PaLM", 2022, appendix B)
        causal  S x S / 2, what a causal kernel must compute (Megatron-LM)

    A layer with a sliding window w < S has S x w pairs (palm) or w x (S - w/2) (causal). None when the model's shape is
    not known. Raises ``ValueError`` for another convention.
    """
    shape = shape_of(model)
    if shape is None:
        return None
    matrices = shape.layers * shape.layer_matrices + shape.embedding
    pairs = sum(attention_pairs(training.sequence_length, window, convention) for window in shape.windows)
    forward = 2.0 * matrices * training.sequence_length + 4.0 * shape.heads * shape.head_dim * pairs
    return 3.0 * training.global_batch_size * forward


def attention_pairs(sequence: int, window: int | None, convention: str) -> float:
    """(query, key) pairs of one layer and one sequence that ``convention`` counts."""
    if convention not in CONVENTIONS:
        raise ValueError(f"FLOPs convention '{convention}' is not known; known: {', '.join(CONVENTIONS)}")
    seen = sequence if window is None else min(window, sequence)
    return float(sequence * seen) if convention == "palm" else seen * (sequence - seen / 2)


def mfu(
    flops_per_second_per_device: float, hardware: HardwareConfig, precision: str
) -> tuple[float | None, str | None]:
    """Model FLOPs utilisation: achieved over the device's dense peak at ``precision``; (None, why) without a peak."""
    if hardware.device == "cpu":
        return None, "a CPU has no peak to divide by"
    peak = hardware.peak_flops.get(precision)
    if not peak:
        return None, (
            f"hardware '{hardware.name}' has no {precision} peak: give peak_flops.{precision} in a file of yours,"
            f" hardware/<name>.yaml under --config-dir (conf/hardware/h100.yaml is an example)"
        )
    return flops_per_second_per_device / peak, None


MATMUL_SIDE = {"cpu": 192, "cuda": 8192}
"""Side of the matrices that the yardstick multiplies, float32 on CPU and bfloat16 on CUDA."""
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
"""Bytes of an activation by training precision (fp8 is a format of matmul operands only)."""
MASTER_BYTES = 4
"""Parameters, gradients and optimizer state are kept in float32."""
LSE_BYTES = 4
"""Of attention's log-sum-exp, a query and head: float32 whatever computes."""
LAYERS_THERE = 2
"""Of those whose activations wait on the host: one that computes, and one on its way."""
CUDA_CONTEXT_BYTES = 2 * 2**30
"""What the CUDA context, cuBLAS and NCCL take outside of the allocator."""


def memory_estimate(cell: Cell) -> int | None:
    """Bytes that one rank needs at its peak, to tell before a launch what cannot fit; None for an unknown shape."""
    parts = memory_parts(cell)
    return None if parts is None else sum(parts.values())


def memory_parts(cell: Cell) -> dict[str, int] | None:
    """The estimate by part, in bytes of one rank; the parts add up to :func:`memory_estimate`.

    With P parameters, t = tp, s = dp_shard x cp, b bytes of an activation, T tokens of one micro-batch on one rank
    (after cp), r = t under sequence parallelism else 1, H hidden, A = heads x head_dim, K = kv heads x head_dim, I
    intermediate:

        parameters   4 P / (t s)
        gradients    4 P / (t s); b P / t where compiled AdamW reads those of one micro-batch on a rank without peers
                     but tp's
        optimizer    8 P / (t s) for AdamW, 4 with momentum, else 0
        gathered     b / t x (lm_head, embedding unless its rows are exchanged, and two blocks and kept_blocks; all
                     blocks without reshard_after_forward)
        copies       instead of gathered where s = 1: b P / t, none in float32; with data_collectives=copy_engine
                     b P / (t s) of the blocks that are freed after forward
        activations  b T x (10 H / r + (3 A + 3 K + 4 I) / t) a layer; compiled blocks and selective checkpointing:
                     (2 H / r + (2 A + 2 K + 3 I) / t); full checkpointing: H / r a layer, and one whole layer;
                     attention: A / t more a layer, and 4 T x heads / t of log-sum-exp; 2 K / t more a whole layer for
                     the keys that came last round a ring; with activation_offload two layers instead of all
        logits       T (or a chunk) x vocab / (t under loss parallelism) x (b + 8): logits, their float32 copy, gradient
        not_at_once  -min(gradients, activations + logits): backward frees these as it makes those; with
                     activation_offload logits only, since each layer needs as much as the one before; 0 when gradients
                     are accumulated over micro-batches
        context      2 GiB on CUDA

    Attention is taken to keep no S x S matrix. Within a quarter of the peaks in the tests.
    """
    shape = shape_of(cell.config.model)
    if shape is None:
        return None
    training, layout = cell.config.training, cell.parallelism
    tp, fsdp = layout.tp_size, layout.dp_shard_size * layout.cp_size
    width = COMPUTE_BYTES.get(training.precision, 4)
    owned = _parameters(shape) / (tp * fsdp)
    state = {"adamw": 8, "sgd": 4 if training.momentum else 0}.get(training.optimizer, 8)

    exchanged = not shape.tied and layout.exchanges_rows(shape.vocab, *layout.micro_steps(training))
    ends = shape.embedding * (1 if shape.tied or exchanged else 2)
    blocks = min(2 + layout.kept_blocks, shape.layers) if layout.reshard_after_forward else shape.layers
    gathered = width / tp * (ends + blocks * (shape.layer_matrices + shape.layer_vectors))
    unsharded = fsdp == 1 and not layout.cpu_offload
    copies = width * owned if unsharded and width < MASTER_BYTES else 0.0
    if fsdp > 1 and layout.data_collectives == "copy_engine" and layout.reshard_after_forward:
        freed = max(shape.layers - layout.kept_blocks, 0)
        copies = width * freed * (shape.layer_matrices + shape.layer_vectors) / (tp * fsdp)

    sequences = _sequences(cell)
    micro = min(training.micro_batch_size or sequences, sequences)
    as_computed = unsharded and layout.dp_replicate_size == 1 and micro == sequences
    as_computed = as_computed and training.compile and training.optimizer == "adamw"
    gradients = (width if as_computed else MASTER_BYTES) * owned
    tokens = micro * training.sequence_length / layout.cp_size
    logit_tokens = min(tokens, training.loss_chunk_size or tokens)
    loss_split = tp if layout.loss_parallel else 1
    activations = _activations(cell, shape, tokens, width)
    logits = logit_tokens * shape.vocab / loss_split * (width + 8)
    let_go = logits if _waits_on_host(cell) else activations + logits
    parts = {
        "parameters": MASTER_BYTES * owned,
        "gradients": gradients,
        "optimizer": state * owned,
        "gathered": 0 if unsharded else gathered,
        "copies": copies,
        "activations": activations,
        "logits": logits,
        "not_at_once": -min(gradients, let_go) if micro == sequences else 0,
        "context": 0 if cell.config.hardware.device == "cpu" else CUDA_CONTEXT_BYTES,
    }
    return {name: round(value) for name, value in parts.items()}


def _sequences(cell: Cell) -> int:
    """Sequences of one step on one batch rank."""
    batch_ranks = cell.parallelism.dp_replicate_size * cell.parallelism.dp_shard_size
    return max(1, cell.config.training.global_batch_size // batch_ranks)


def _waits_on_host(cell: Cell) -> bool:
    """What blocks keep is not on the device; on a CPU host and device are one."""
    return cell.config.training.activation_offload and cell.config.hardware.device != "cpu"


def _activations(cell: Cell, shape: Shape, tokens: float, width: int) -> float:
    layout, training = cell.parallelism, cell.config.training
    tp, residual_split = layout.tp_size, layout.tp_size if layout.sequence_parallel else 1
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    eager = 10 * shape.hidden / residual_split + (3 * q + 3 * kv + 4 * shape.intermediate) / tp
    fused = 2 * shape.hidden / residual_split + (2 * q + 2 * kv + 3 * shape.intermediate) / tp
    ring = 2 * kv / tp if layout.cp_size > 1 and layout.cp_method == "ring" else 0.0
    whole = (fused if training.compile else eager) + ring
    attended = (q + shape.heads * LSE_BYTES / width) / tp
    there = min(LAYERS_THERE, shape.layers) if _waits_on_host(cell) else shape.layers
    kept = {
        "none": shape.layers * whole,
        "selective": shape.layers * fused + whole,
        "attention": there * (shape.hidden / residual_split + attended) + whole,
        "full": there * shape.hidden / residual_split + whole,
    }[training.activation_checkpointing]
    return width * tokens * kept
