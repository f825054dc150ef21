"""The typed schema of every configuration group, the checks across groups, and the identity of a cell.

A *cell* is one point of a matrix: model x hardware x parallelism x training options. Everything here is plain data:
no torch, no transformers, so that ``ndbench show`` starts fast and works on a laptop.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ndbench.parallel.config import ParallelismConfig

AD_HOC = "adhoc"
"""Suite name of a run without ``suite=``."""


@dataclass
class ModelConfig:
    """Shape of a causal language model, in transformers' names; ``hf`` holds further keys of its config class."""

    name: str = "llama_tiny"
    model_type: str | None = "llama"
    """transformers' model type (``llama``, ``qwen3``, ``mistral``, ...)."""
    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    """Width of one head; null means hidden_size / num_attention_heads."""
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    hf: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    """A local Hugging Face folder; its config.json then gives the shape."""
    target: str | None = None
    """``package.module:callable`` or a dotted path to one that returns an nn.Module (logits or an output with
    ``.logits`` from ``input_ids``)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``target``."""
    tp_plan: dict[str, str] | None = None
    """The user's own tensor-parallel plan: module name pattern (``layers.*.q_proj``) -> style (``colwise``, ...)."""
    blocks: str | None = None
    """Module path of the list of transformer blocks for a ``target`` model (``model.layers``)."""


@dataclass
class HardwareConfig:
    """A machine: what one device can do, and how many there are."""

    name: str = "cpu"
    device: str = "cpu"
    """``cpu`` or ``cuda`` (ROCm builds of torch answer to ``cuda`` too)."""
    match: str | None = None
    """Regular expression on the device's name by which ``hardware=auto`` finds this file."""
    device_count: int | None = None
    """Devices on this machine (CPU: how many gloo ranks); null means what is visible."""
    gpus_per_node: int | None = None
    memory_bytes: int | None = None
    """Memory of one device."""
    peak_flops: dict[str, float] = field(default_factory=dict)
    """Dense peak FLOP/s by dtype (fp32, tf32, bf16, fp16, fp8), from the vendor's datasheet."""
    memory_bandwidth: float | None = None
    """Bytes/s of device memory, from the datasheet."""
    link_bandwidth: float | None = None
    """Bytes/s a direction between two devices of a node, from the datasheet."""
    source: str | None = None
    """Where the figures come from."""


@dataclass
class TrainingConfig:
    steps: int = 12
    """Optimizer steps of a repeat, warm-up included."""
    global_batch_size: int = 16
    """Sequences of one optimizer step, over all ranks and micro-steps."""
    micro_batch_size: int | None = None
    """Sequences of one forward pass on one batch rank; null means no accumulation."""
    sequence_length: int = 128
    """Tokens of one sequence (before the shift by one that makes labels)."""
    precision: str = "fp32"
    """``fp32``, ``bf16`` (bf16 compute, fp32 parameters and gradient reduction) or ``fp8`` (that, with the
    linear layers of the blocks in FP8)."""
    optimizer: str = "adamw"
    """``adamw`` or ``sgd``."""
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    momentum: float = 0.0
    schedule: str = "constant"
    """Learning rate by optimizer step after the warm-up: ``constant``, ``linear``, ``cosine`` or ``wsd``."""
    warmup_steps: int = 0
    """Optimizer steps in which the learning rate rises to its full value."""
    decay_steps: int | None = None
    """Optimizer steps at the end in which it falls; null means all after the warm-up (``wsd``: the last fifth)."""
    min_learning_rate_ratio: float = 0.0
    """What it falls to, as a part of ``learning_rate``."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this; null leaves it alone (the norm is measured either way)."""
    max_grad_value: float | None = None
    """Then clamp each element of the global gradient to plus or minus this; null leaves it alone."""
    activation_checkpointing: str = "none"
    """``none``, ``full``, ``selective`` or ``attention``."""
    activation_offload: bool = False
    """With ``full`` and ``attention``: what blocks keep waits for backward in pinned host memory."""
    compile: bool = False
    """torch.compile each transformer block."""
    cuda_graphs: bool | None = False
    """Capture the whole step in a CUDA graph and replay it, so that the host queues no kernels; null does so where it
    is known to hold, and trains without where it does not."""
    loss_chunk_size: int | None = None
    """Tokens of one chunk of the cross-entropy; null computes all logits at once."""
    seed: int = 0
    deterministic: bool = True


@dataclass
class DataConfig:
    name: str = "markov"
    """``markov``, ``source``, ``text`` or ``dataset``."""
    files: list[str] = field(default_factory=list)
    dataset: str | None = None
    """``data=dataset``: a local folder or file, or the id of a Hugging Face dataset."""
    subset: str | None = None
    """The dataset's configuration, where it has several."""
    split: str = "train"
    column: str = "text"
    """The dataset's column of text."""
    tokenizer: str | None = None
    """A local tokenizer folder, or its Hugging Face id; null reads bytes as tokens."""
    documents: str = "stream"
    """``stream`` (one text, cut into windows), ``packed`` (the same windows, but attention and positions stay within a
    document) or ``padded`` (a sequence holds one document, or a piece of it)."""
    max_bytes: int = 8 * 2**20
    """Bytes of text that are read at most."""
    valid_fraction: float = 1.0
    """Fraction of each sequence's labels that count; below 1 the number of valid tokens differs between sequences."""
    seed: int = 0


@dataclass
class MeasureConfig:
    repeats: int | None = None
    """Process launches of each cell; null means 3 on CPU, 5 on GPU."""
    warmup: int | None = None
    """Steps to drop; null drops until the step time is steady (at least 1, at most half)."""
    timeout: float = 600.0
    """Seconds of wall clock for one repeat."""
    budget: str | None = None
    """Stop starting rounds after this long (``20m``, ``1h``); the first round is always finished."""
    structure: bool = True
    """Record collectives and FLOPs from one extra step in the first repeat of a cell."""
    yardstick: bool = True
    checkpoint: bool = False
    """Save and load the training state after everything else, for the metrics ``checkpoint_*``; below
    ``checkpoint.dir``, or the repeat's own folder."""
    profile: bool = False
    handicap: float = 0.0
    """Planted slowdown: each step burns this many times its own time again. For testing the gate."""
    handicap_cells: str = "*"
    """Pattern of cell names that ``handicap`` applies to."""
    shuffle_seed: int = 0


@dataclass
class GateConfig:
    mode: str = "auto"
    """``auto`` (no baseline: measure, say how to accept, exit 0), ``require`` (no baseline: exit 4) or ``off``."""
    min_effect: float | None = None
    """Relative slowdown below which nothing is called a regression; null means 0.01 on GPU, 0.05 on CPU."""
    alpha: float = 0.01
    resolve: float | None = None
    """A cell passes when the upper bound of its slowdown is below this; null means 0.03 on GPU; on CPU 0.30 between
    sessions and 0.08 where two sides take turns."""
    fail_on_inconclusive: bool = False
    confirm: str = "auto"
    """``on`` measures the base again next to suspects, which then decides; ``off`` leaves them as suspects; ``auto`` is
    ``on`` on GPUs and off on a CPU, where it takes minutes a cell, and where only one repeat was asked for."""
    base: str | None = None
    """What to measure suspects against (``git:REV`` or ``python:PATH``); null means the baseline's commit."""
    residency: float = 25.0
    """CPU: seconds for which base and head are there together and take turns; 6 or 12 of them decide a cell."""


@dataclass
class LauncherConfig:
    name: str = "local"
    start_method: str = "forkserver"
    omp_num_threads: int | None = None
    """CPU threads of a rank; null means cores / ranks, at least 1."""
    stall_timeout: float = 600.0
    """``ndbench train``: seconds without a step, an evaluated batch or a checkpoint after which the run is ended."""


@dataclass
class TrackerConfig:
    name: str = "none"
    """``none`` or ``wandb``; a tracker only ever sees records that are written already."""
    project: str = "ndbench"
    entity: str | None = None
    mode: str = "auto"
    """``auto`` (online with a key, else offline), ``online`` or ``offline``."""
    tags: list[str] = field(default_factory=list)
    timeout: float = 120.0
    """Seconds that sending may take; then it is stopped, with a warning."""


@dataclass
class CheckpointConfig:
    """``ndbench train``: what is left behind, and where."""

    dir: str | None = None
    """Folder of the checkpoints, the log beside them; null writes none, and the log below ``results.dir``."""
    every: int | None = None
    """Optimizer steps between two checkpoints; null writes one at the end, or when the run is stopped."""
    keep: int = 2
    """So many of the newest stay."""
    mode: str = "sharded"
    """``sharded``, ``async`` (sharded, written while training goes on), ``full`` (by rank 0 alone) or ``hf`` (sharded,
    and the model once more as transformers reads it)."""
    weights: str | None = None
    """A Hugging Face folder with the weights to begin with; null draws them from the seed. Not read on resuming."""


@dataclass
class EvaluationConfig:
    """``ndbench train``: the loss on data that is never trained on."""

    every: int | None = None
    """Optimizer steps between two evaluations; null evaluates at the end."""
    batches: int = 8
    """Global batches of one evaluation, always the same ones; fewer where the data holds fewer."""
    fraction: float = 0.05
    """Part of the data that is held out; 0 trains on everything and evaluates nothing."""


@dataclass
class ResultsConfig:
    dir: str = "results"


@dataclass
class FingerprintConfig:
    redact: list[str] = field(default_factory=list)


@dataclass
class EngineConfig:
    """Whose code is measured. ``target`` is a dotted path or the name of an ``ndbench.engines`` entry point."""

    name: str = "ndbench"
    target: str | None = None
    command: str | None = None
    """``engine=command``: the command line of the user's script, started once a rank."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config:
    """Root of the composed configuration: one cell, plus what concerns the run as a whole."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    results: ResultsConfig = field(default_factory=ResultsConfig)
    fingerprint: FingerprintConfig = field(default_factory=FingerprintConfig)
    world_size: int | None = None
    """Ranks of the cell; null means the hardware's device count."""
    cells: str | None = None
    """Patterns of cell names to run, comma separated (``hsdp*,ddp8``); null runs all."""
    shard: str | None = None
    """``1/4``: run the first quarter of the matrix."""
    baseline: str | None = None
    """A baseline folder; null means ``<results.dir>/baselines/<hardware>/<suite>``."""
    resume: str | None = None
    """``ndbench train``: ``auto`` (the newest whole checkpoint in ``checkpoint.dir``, if any) or a checkpoint."""


@dataclass(frozen=True)
class Cell:
    """One resolved point of the matrix: every null default filled in, every degree positive."""

    name: str
    suite: str
    config: Config

    @property
    def parallelism(self) -> ParallelismConfig:
        return self.config.parallelism

    @property
    def world_size(self) -> int:
        assert self.config.world_size is not None, "cells are resolved"
        return self.config.world_size

    @property
    def layout(self) -> str:
        """The layout's name; of a script of the user's (``engine=command``), which lays out its ranks itself, the
        part of the cell's name that says so."""
        return self.parallelism.layout if self.config.engine.command is None else self.name.split("-")[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as it stands in a record: ``cell.engine`` is the engine's name."""
        groups = dataclasses.asdict(self.config)
        engine = groups.pop("engine")
        return {"name": self.name, "suite": self.suite, "engine": engine["name"], "engine_config": engine, **groups}

    @property
    def cell_id(self) -> str:
        """12 hex digits: a hash of the part of the configuration that changes what is measured."""
        return cell_id(self.to_dict())


IDENTITY_GROUPS = ("model", "parallelism", "training", "data", "engine_config", "world_size")
"""Hardware is left out on purpose: structure and FLOPs of one cell are compared across machines."""


ADDED_LATER: dict[str, dict[str, Any]] = {
    "data": {"dataset": None, "subset": None, "split": "train", "column": "text", "documents": "stream"},
    "training": {"cuda_graphs": False, "activation_offload": False},
    "parallelism": {"kept_blocks": 0, "data_collectives": "nccl"},
}
"""Fields that came after the first stored baselines: at these values they leave a cell's identity as it was."""


def cell_id(cell: dict[str, Any]) -> str:
    """Hash of the identity part of a cell's JSON form; equal for equivalent overrides, whatever their order."""
    identity = {group: cell[group] for group in IDENTITY_GROUPS}
    for group, defaults in ADDED_LATER.items():
        new = {key for key, default in defaults.items() if key in identity[group] and identity[group][key] == default}
        identity[group] = {key: value for key, value in identity[group].items() if key not in new}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def cell_from_dict(cell: dict[str, Any]) -> Cell:
    """Inverse of :meth:`Cell.to_dict`; raises ``ValueError`` naming a key that the schema lacks."""
    groups = {key: value for key, value in cell.items() if key not in ("name", "suite", "engine", "engine_config")}
    groups["engine"] = cell["engine_config"]
    return Cell(name=cell["name"], suite=cell["suite"], config=_build(Config, groups, "cell"))


def config_from_dict(values: dict[str, Any]) -> Config:
    """Inverse of ``dataclasses.asdict``; raises ``ValueError`` naming a key that the schema lacks."""
    config: Config = _build(Config, values, "config")
    return config


def _build(cls: Any, values: dict[str, Any], where: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}")
    kwargs: dict[str, Any] = {}
    for key, value in values.items():
        factory = known[key].default_factory
        nested = isinstance(value, dict) and isinstance(factory, type) and dataclasses.is_dataclass(factory)
        kwargs[key] = _build(factory, value, f"{where}.{key}") if nested else value
    return cls(**kwargs)
