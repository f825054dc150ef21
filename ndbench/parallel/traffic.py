"""What one optimizer step sends, in closed form: (operation, mesh axis) -> calls and bytes of one rank.

For a Llama-shaped model (grouped kv heads, gated MLP, no biases). Pure arithmetic: no torch, nothing measured.
``docs/parallelism.md`` quotes these formulas, and tests hold real steps and traced ones to them, call by call. Bytes
are those of the bandwidth-optimal algorithms, as ``ndbench.measure.collectives`` defines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ndbench.parallel.config import AXES, ParallelismConfig
from ndbench.parallel.context import ring_bytes, ulysses_bytes
from ndbench.parallel.mesh import VIEWS

Traffic = dict[tuple[str, str], tuple[int, int]]
"""(operation, mesh axis) -> (calls, bytes)."""

GRADIENT_BYTES = 4
"""Gradients are reduced in float32, whatever they were computed in."""


@dataclass(frozen=True)
class LlamaShape:
    """The sizes that the formulas read, in transformers' names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class StepShape:
    """What a rank computes in one optimizer step."""

    global_batch_size: int
    sequence_length: int
    micro_batch_size: int | None = None
    element_size: int = 4
    """Bytes of an element of the compute dtype: 4 for fp32, 2 for bf16."""
    activation_checkpointing: str = "none"
    loss_chunk_size: int | None = None


def step_traffic(model: LlamaShape, layout: ParallelismConfig, step: StepShape) -> Traffic:
    """Calls and bytes of rank 0, whose shards are the fullest where a dim does not divide; degrees are resolved.

    Receives are counted and have no bytes: they are some other rank's sends.
    """
    total = _Sum()
    _data(total, model, layout, step)
    _tensor(total, model, layout, step)
    _context(total, model, layout, step)
    _bookkeeping(total, layout)
    return dict(total.rows)


def group_label(layout: ParallelismConfig, axes: tuple[str, ...]) -> str:
    """Name of the group that spans ``axes``, as ``mesh.py`` has it: equal groups are one, under the narrowest name.

    An axis when only one of ``axes`` is larger than 1, else the view of just these (``fsdp`` before ``batch`` before
    ``loss``), else ``world``.
    """
    active = [axis for axis in axes if layout.sizes[axis] > 1]
    if len(active) == 1:
        return active[0]
    for view in ("fsdp", "batch", "loss"):
        if active == [axis for axis in VIEWS[view] if layout.sizes[axis] > 1]:
            return view
    return "world"


def block_shard(model: LlamaShape, layout: ParallelismConfig) -> int:
    """Elements of one transformer block's parameters on a rank: tp takes its part, then FSDP its rows of each."""
    tp, hidden = layout.tp_size, model.hidden_size
    q, kv = model.num_attention_heads * model.head_dim // tp, model.num_key_value_heads * model.head_dim // tp
    inner = model.intermediate_size // tp
    weights = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
    weights += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden, 1), (hidden, 1)]
    return _shards(weights, layout.fsdp_size)


def root_shard(model: LlamaShape, layout: ParallelismConfig) -> int:
    """Elements of what is outside the blocks: embedding, output head (unless tied), last norm."""
    return sum(_outside(model, layout))


def _outside(model: LlamaShape, layout: ParallelismConfig) -> list[int]:
    """Elements of each FSDP unit outside the blocks, the root last: embedding, head, norm; tied, they are one."""
    table = _shards([(-(-model.vocab_size // layout.tp_size), model.hidden_size)], layout.fsdp_size)
    norm = _shards([(model.hidden_size, 1)], layout.fsdp_size)
    return [table + norm] if model.tie_word_embeddings else [table, table, norm]


class _Sum:
    def __init__(self) -> None:
        self.rows: Traffic = {}

    def add(self, op: str, axis: str, count: int, each: int) -> None:
        """``count`` calls of ``each`` bytes."""
        calls, size = self.rows.get((op, axis), (0, 0))
        if count:
            self.rows[op, axis] = (calls + count, size + count * each)


def _shards(weights: list[tuple[int, int]], ranks: int) -> int:
    return sum(-(-rows // ranks) * columns for rows, columns in weights)


def _reduced(size: int, ranks: int) -> int:
    """Bytes of an all-reduce of ``size`` bytes."""
    return 2 * (ranks - 1) * size // ranks


def exchanges_rows(model: LlamaShape, layout: ParallelismConfig, step: StepShape) -> bool:
    """Do FSDP's ranks exchange the embedding's rows? See ``embedding.py``."""
    return not model.tie_word_embeddings and layout.exchanges_rows(model.vocab_size, *layout.micro_steps(step))


def _data(total: _Sum, model: LlamaShape, layout: ParallelismConfig, step: StepShape) -> None:
    """FSDP gathers a unit before its forward and a block again before its backward; gradients are scattered once.

    Where fewer rows of the embedding are asked for than it has, each micro-step tells all ranks its tokens (int64),
    brings a rank its tokens' rows, and their gradients to all ranks.

    Where nothing is sharded, replicas sum each block, and what is after and before the blocks apart. A step by copy
    engines is watched as NCCL takes it; of gradients that it does not add up it sends them in the computed dtype.
    """
    micro_steps, _ = layout.micro_batches(step)
    layers, shards, replicas = model.num_hidden_layers, layout.fsdp_size, layout.dp_replicate_size
    axis = group_label(layout, VIEWS["fsdp"])
    freed = max(layers - layout.kept_blocks, 0) if layout.reshard_after_forward else 0
    outside = _outside(model, layout)
    if exchanges_rows(model, layout, step):
        outside = outside[1:]
        _, tokens = layout.micro_steps(step)
        ranks = replicas * shards
        states, everyone = tokens * model.hidden_size * step.element_size, group_label(layout, VIEWS["loss"])
        total.add("all_gather", everyone, micro_steps, (ranks - 1) * tokens * 8)
        total.add("reduce_scatter", axis, micro_steps, (shards - 1) * states)
        total.add("all_gather", everyone, micro_steps, (ranks - 1) * states)
    units_of = [(layers, freed, block_shard(model, layout)), *((1, 0, size) for size in outside)]
    for units, again, size in units_of:
        if shards > 1:
            total.add("all_gather", axis, micro_steps * (units + again), (shards - 1) * size * step.element_size)
            total.add("reduce_scatter", axis, units, (shards - 1) * size * GRADIENT_BYTES)
        if replicas > 1 and (shards > 1 or layout.cpu_offload):
            total.add("all_reduce", "dp_replicate", units, _reduced(size * GRADIENT_BYTES, replicas))
    if replicas > 1 and shards == 1 and not layout.cpu_offload:
        embedding = -(-model.vocab_size // layout.tp_size) * model.hidden_size
        for units, size in (
            (layers, block_shard(model, layout)),
            (1, root_shard(model, layout) - embedding),
            (1, embedding),
        ):
            total.add("all_reduce", "dp_replicate", units, _reduced(size * GRADIENT_BYTES, replicas))


def _tensor(total: _Sum, model: LlamaShape, layout: ParallelismConfig, step: StepShape) -> None:
    """TP joins activations around attention, MLP, embedding and head; the loss and the norms' gradients are summed."""
    tp, layers = layout.tp_size, model.num_hidden_layers
    if tp == 1:
        return
    micro_steps, rows = layout.micro_batches(step)
    tokens = rows * step.sequence_length // layout.cp_size
    activation = tokens * model.hidden_size * step.element_size
    # Checkpointing that keeps no collectives runs a block's forward again, up to the last tensor that backward needs:
    # not its last sum.
    recomputed = layers if step.activation_checkpointing in ("full", "attention") else 0
    if layout.sequence_parallel:
        part = (tp - 1) * activation // tp
        total.add("all_gather", "tp", micro_steps * (4 * layers + 2 + 2 * recomputed), part)
        total.add("reduce_scatter", "tp", micro_steps * (4 * layers + 2 + recomputed), part)
        norms = (2 * layers + 1) * -(-model.hidden_size // layout.fsdp_size)
        total.add("all_reduce", "tp", 1, _reduced(norms * GRADIENT_BYTES, tp))
    else:
        total.add("all_reduce", "tp", micro_steps * (4 * layers + 2 + recomputed), _reduced(activation, tp))
    if not layout.loss_parallel:
        logits = tokens * -(-model.vocab_size // tp) * step.element_size
        total.add("all_gather", "tp", micro_steps, (tp - 1) * logits)
        return
    chunk = step.loss_chunk_size or tokens
    for length in [chunk] * (tokens // chunk) + ([tokens % chunk] if tokens % chunk else []):
        total.add("all_reduce", "tp", micro_steps, _reduced(4 * length, tp))  # the highest logit
        total.add("all_reduce", "tp", micro_steps, _reduced(8 * length, tp))  # sum of exponentials, target logit


def _context(total: _Sum, model: LlamaShape, layout: ParallelismConfig, step: StepShape) -> None:
    """CP rotates keys and values (ring) or exchanges sequence for heads (Ulysses) in every layer."""
    cp = layout.cp_size
    if cp == 1:
        return
    micro_steps, rows = layout.micro_batches(step)
    calls = micro_steps * model.num_hidden_layers
    kv_heads, local = model.num_key_value_heads // layout.tp_size, step.sequence_length // cp
    mode = step.activation_checkpointing
    if layout.cp_method == "ring":
        size = ring_bytes(
            cp_size=cp, batch=rows, kv_heads=kv_heads, local_length=local, head_dim=model.head_dim,
            element_size=step.element_size,
        )  # fmt: skip
        # With its result kept the ring is not run again; backward still begins with the next rank's keys.
        rotations = {"full": cp - 1, "selective": cp - 1, "attention": 1}.get(mode, 0) + cp - 1
        sends, each = rotations + 2 * cp - 3, size["forward"] // (cp - 1)
        total.rows["send", "cp"] = (calls * sends, calls * (rotations * each + size["backward"]))
        total.rows["recv", "cp"] = (calls * sends, 0)
        return
    size = ulysses_bytes(
        cp_size=cp, batch=rows, heads=model.num_attention_heads // layout.tp_size, kv_heads=kv_heads,
        local_length=local, head_dim=model.head_dim, element_size=step.element_size,
    )  # fmt: skip
    forwards = 2 if mode in ("full", "attention") else 1
    sent = calls * (forwards * size["forward"] + size["backward"])
    total.rows["all_to_all", "cp"] = (calls * 2 * (forwards + 1), sent)


def _bookkeeping(total: _Sum, layout: ParallelismConfig) -> None:
    """The number of valid tokens (int64) over the ranks of one loss; gradient norm and loss (float64) over all."""
    loss, world = layout.dp_replicate_size * layout.fsdp_size, layout.world_size
    if loss > 1:
        total.add("all_reduce", group_label(layout, VIEWS["loss"]), 1, _reduced(8, loss))
    if world > 1:
        total.add("all_reduce", group_label(layout, AXES), 1, _reduced(16, world))


def difference(have: Mapping[tuple[str, str], tuple[int, int]], want: Traffic) -> dict[tuple[str, str], str]:
    """Rows in which a measured step is not the closed form, with both; empty when it is."""
    keys = sorted(have.keys() | want.keys())
    rows = {key: (have.get(key, (0, 0)), want.get(key, (0, 0))) for key in keys}
    return {
        (op, axis): f"{measured[0]} calls of {measured[1]} bytes, the closed form says {form[0]} of {form[1]}"
        for (op, axis), (measured, form) in rows.items()
        if measured != form
    }
