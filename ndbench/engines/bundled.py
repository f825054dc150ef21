"""The bundled engine behind the seam: builds a model, lays it out over the mesh, and takes steps.

All numerics are in ``ndbench.parallel`` and ``ndbench.training``; this file only joins them.
"""

from __future__ import annotations

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.engines.protocol import Batch, StepResult
from ndbench.parallel.config import (
    ATTENTION_KERNELS,
    CHECKPOINTING_MODES,
    FLOAT8_MISSING,
    FLOAT8_MULTIPLE,
    FLOAT8_RECIPES,
    ParallelismConfig,
)
from ndbench.parallel.context import refuse_attention
from ndbench.training.graph_rules import graph_refusals
from ndbench.training.schedule import refuse_schedule

if TYPE_CHECKING:
    import torch

    from ndbench.config import Cell
    from ndbench.parallel.copy_engine import CopyEngines
    from ndbench.parallel.mesh import Mesh
    from ndbench.training.graphs import GraphedStep
    from ndbench.training.step import Step

PRECISIONS = ("fp32", "bf16", "fp8")


class BundledEngine:
    """ND-parallel training of a causal language model.

    ``weight_jitter`` adds normal noise of that standard deviation to weights that start constant (norms, biases):
    for tests that compare layouts, where a constant would hide a mistake. ``attention`` is the kernel to use on CUDA
    (``cudnn`` or ``flash``); null takes the fastest that the device has. ``fp8`` is how ``training.precision=fp8``
    scales, one of ``FLOAT8_RECIPES``.
    """

    def __init__(self, weight_jitter: float = 0.0, attention: str | None = None, fp8: str = "tensorwise") -> None:
        self.weight_jitter, self.attention, self.fp8 = weight_jitter, attention, fp8
        self.model: torch.nn.Module | None = None
        self._step: Step | None = None
        self._graphs: GraphedStep | None = None
        self._copy_engines: CopyEngines | None = None
        self._facts: dict[str, Any] = {}
        self._packed_kernel: str | None = None

    def refuse(self, cell: Cell) -> str | None:
        """Why this engine cannot run ``cell``, in one line; needs neither torch nor transformers."""
        config = cell.config
        reasons = [
            *config.parallelism.refuse(config.model, config.training),
            *_refuse_training(config.training, config.model),
            *_refuse_chunks(config.training, config.parallelism),
            *_refuse_kernel(self.attention),
            *_refuse_copy_engine(config.parallelism, config.hardware.device),
            *_refuse_float8(cell, self.fp8),
            *(
                graph_refusals(config.training, config.parallelism, config.hardware.device)
                if config.training.cuda_graphs
                else []
            ),
            *_refuse_written_attention(config.model, config.parallelism),
        ]
        return "; ".join(reasons) or None

    def refuse_plan(self, cell: Cell) -> str | None:
        """What only the model itself can tell (an unknown plan style, an unplanned module); imports transformers."""
        float8 = cell.config.training.precision == "fp8"
        if cell.parallelism.tp_size == 1 and cell.config.model.target is not None and not float8:
            return None
        return "; ".join(plan_refusals(cell.config.model, cell.parallelism, float8)) or None

    def setup(self, cell: Cell, mesh: Mesh) -> None:
        """Build model and optimizer; raises ``ValueError`` naming what the model's own plan does not allow."""
        import torch

        config = cell.config
        cuda = mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)
        self.build(config.model, config.training, mesh, device)

    def build(self, model_config: ModelConfig, training: TrainingConfig, mesh: Mesh, device: torch.device) -> None:
        """:meth:`setup` from its parts."""
        import torch
        import torch.distributed as dist

        from ndbench.parallel import float8
        from ndbench.parallel.attention import attention_kernel
        from ndbench.parallel.copy_engine import why_not
        from ndbench.parallel.gradients import Gradients
        from ndbench.parallel.initialize import Weights
        from ndbench.parallel.parallelize import Technique, parallelize
        from ndbench.training.cuda_graph import CudaRecorder
        from ndbench.training.forward import attach_loss, chunk_refusals
        from ndbench.training.graphs import GraphedStep
        from ndbench.training.models import build_model
        from ndbench.training.optimizer import ShardOptimizer
        from ndbench.training.step import Step

        torch.use_deterministic_algorithms(training.deterministic, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        built = build_model(model_config)
        plan = _plan(built, model_config, mesh.config) if mesh.config.tp_size > 1 else None
        reasons = [] if plan is None else list(plan.refusals)
        if training.loss_chunk_size is not None:
            reasons += chunk_refusals(built.model)
        low = None
        if training.precision == "fp8":
            low = float8.float8_for(device, self.fp8)
            reasons += float8.float8_refusals(built.model, built.blocks, mesh.config, plan)
        if mesh.config.fsdp_collectives == "copy_engine" and mesh.fsdp.size() > 1:
            reasons += [f"fsdp_collectives=copy_engine: {why}" for why in (why_not(mesh.fsdp.get_group()),) if why]
        ungraphed = graph_refusals(training, mesh.config, device.type)
        if training.cuda_graphs:
            reasons += ungraphed
        if reasons:
            raise ValueError("; ".join(reasons))
        dtype = None if training.precision == "fp32" else torch.bfloat16
        std = float(getattr(getattr(built.model, "config", None), "initializer_range", model_config.initializer_range))
        kernel = _kernel(built, mesh, device, dtype or torch.float32, self.attention)
        parallel = parallelize(
            built.model,
            built.blocks,
            mesh,
            device,
            plan,
            Weights(training.seed, std, self.weight_jitter, built.constants),
            Technique(
                dtype,
                training.activation_checkpointing,
                training.compile,
                built.transformers,
                kernel,
                _accumulates(training, mesh.config),
                low,
            ),
        )
        vocab_size = getattr(getattr(built.model, "config", None), "vocab_size", None)
        loss_sum = attach_loss(
            parallel.model, mesh, plan, vocab_size, training.loss_chunk_size, parallel.computing, training.compile
        )
        world = mesh.config.world_size
        gradients = Gradients(
            parallel.model,
            parallel.partial_gradients,
            dist.group.WORLD if world > 1 else None,
            mesh.tp.get_group() if mesh.tp.size() > 1 else None,
            device,
            parallel.held,
        )
        if parallel.fully_sharded and training.cuda_graphs is None:
            ungraphed.append("FSDP holds the parameters; training.cuda_graphs=true tries it all the same")
        graphed = training.cuda_graphs is not False and not ungraphed
        optimizer = ShardOptimizer(gradients.parameters, training, graphed, parallel.held, parallel.copies)
        self.model, self._copy_engines = parallel.model, parallel.copy_engines
        self._step = Step(
            parallel.model,
            loss_sum,
            gradients,
            optimizer,
            mesh,
            training.micro_batch_size,
            training.max_grad_norm,
            training.max_grad_value,
            parallel.computing,
        )
        window = getattr(getattr(built.model, "config", None), "sliding_window", None) is not None
        self._facts = {
            "blocks": len(built.blocks),
            "fully_sharded": parallel.fully_sharded,
            "sequence_parallel": plan is not None and plan.sequence_parallel,
            "loss_parallel": plan is not None and plan.head is not None,
        }
        if low is not None:
            self._facts["fp8"] = {"recipe": low.recipe, "emulated": low.emulate, "torchao": float8.version()}
        if graphed:
            self._graphs = GraphedStep(self._step, CudaRecorder(device), required=bool(training.cuda_graphs))
        elif training.cuda_graphs is None:
            self._facts["cuda_graph"] = {"captures": 0, "replays": 0, "reason": "; ".join(ungraphed)}
        if built.transformers:
            # Whether documents are packed is known with the first batch; both answers are made ready here.
            whole, self._packed_kernel = (
                attention_kernel(
                    device.type, dtype or torch.float32, mesh.config.cp_size, mesh.config.cp_method, masked, kernel
                )
                for masked in (window, True)
            )
            self._facts["attention_kernel"] = whole

    def step(self, batch: Batch) -> StepResult:
        assert self._step is not None, "setup comes first"
        if batch.document_ids is not None and self._packed_kernel is not None:
            self._facts["attention_kernel"] = self._packed_kernel
        take = self._step if self._graphs is None else self._graphs
        with nullcontext() if self._copy_engines is None else self._copy_engines.step(batch.input_ids.shape):
            return take(batch)

    @property
    def stepper(self) -> Step:
        """Model, loss, gradients and optimizer in one, for whoever trains beyond single steps."""
        assert self._step is not None, "setup comes first"
        return self._step

    def training_state(self) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[torch.nn.Parameter]]:
        """Model, optimizer, and the model's parameters in the order of the optimizer's: what a checkpoint holds."""
        optimizer = self.stepper.optimizer
        return self.stepper.model, optimizer.optimizer, list(optimizer.parameters)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.release(wait=False)  # before the groups whose messages they hold
        self.model = self._step = self._graphs = None

    def info(self) -> dict[str, Any]:
        """Facts for the record."""
        return dict(self._facts) if self._graphs is None else self._facts | {"cuda_graph": self._graphs.facts()}


def _kernel(built: Any, mesh: Mesh, device: torch.device, dtype: torch.dtype, asked: str | None) -> str | None:
    """What a layer's plain causal attention runs on, of :data:`ATTENTION_KERNELS`."""
    from ndbench.parallel.sdpa import choose_kernel

    if not built.transformers:
        return None
    model, layout = built.model.config, mesh.config
    # The heads that attention sees on a rank; under Ulysses cp splits them too. A remainder was refused before.
    split = layout.tp_size * (layout.cp_size if layout.cp_method == "ulysses" else 1)
    heads = model.num_attention_heads
    kv_heads = getattr(model, "num_key_value_heads", None) or heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // heads
    return choose_kernel(device, dtype, max(heads // split, 1), max(kv_heads // split, 1), head_dim, asked)


def _refuse_training(training: TrainingConfig, model: ModelConfig) -> list[str]:
    reasons = []
    if training.precision not in PRECISIONS:
        reasons.append(f"precision '{training.precision}' is not implemented; implemented: {', '.join(PRECISIONS)}")
    if training.activation_checkpointing not in CHECKPOINTING_MODES:
        known = ", ".join(CHECKPOINTING_MODES)
        reasons.append(f"activation_checkpointing '{training.activation_checkpointing}' is not known; known: {known}")
    if training.optimizer not in ("adamw", "sgd") and "." not in training.optimizer:
        reasons.append(f"optimizer '{training.optimizer}' is not known: adamw, sgd, or a dotted path")
    chunk = training.loss_chunk_size
    if chunk is not None and chunk < 1:
        reasons.append(f"loss_chunk_size is {chunk}, it must be at least 1")
    if chunk is not None and model.target is not None:
        reasons.append("loss_chunk_size needs a transformers model; model.target has its own output head")
    for name, limit in (("max_grad_norm", training.max_grad_norm), ("max_grad_value", training.max_grad_value)):
        if limit is not None and limit <= 0:
            reasons.append(f"{name} is {limit}, it must be above 0, or null")
    return reasons + refuse_schedule(training)


def _refuse_kernel(name: str | None) -> list[str]:
    if name in (None, *ATTENTION_KERNELS):
        return []
    return [f"engine.options.attention '{name}' is not known; known: {', '.join(ATTENTION_KERNELS)}"]


def _refuse_float8(cell: Cell, recipe: str) -> list[str]:
    config, layout = cell.config, cell.parallelism
    if config.training.precision != "fp8":
        return []
    if importlib.util.find_spec("torchao") is None:
        return [FLOAT8_MISSING]
    reasons = []
    if recipe not in FLOAT8_RECIPES:
        reasons.append(f"engine.options.fp8 '{recipe}' is not known; known: {', '.join(FLOAT8_RECIPES)}")
    peaks = config.hardware.peak_flops
    if config.hardware.device != "cpu" and peaks and "fp8" not in peaks:
        reasons.append(
            f"precision 'fp8': hardware '{config.hardware.name}' has no FP8, its peaks are {', '.join(peaks)}"
        )
    if min(layout.sizes.values()) < 1:
        return reasons  # a refusal of its own
    sequences = config.training.micro_batch_size or config.training.global_batch_size // layout.batch_size
    tokens = sequences * config.training.sequence_length // layout.cp_size
    if tokens % FLOAT8_MULTIPLE:
        reasons.append(
            f"precision 'fp8' needs a multiple of {FLOAT8_MULTIPLE} tokens a forward, here {sequences} sequences of "
            f"{config.training.sequence_length} over cp {layout.cp_size} are {tokens}"
        )
    return reasons


def _accumulates(training: TrainingConfig, parallelism: ParallelismConfig) -> bool:
    return (
        training.micro_batch_size is not None
        and training.micro_batch_size < training.global_batch_size // parallelism.batch_size
    )


def _refuse_copy_engine(parallelism: ParallelismConfig, device: str) -> list[str]:
    if parallelism.fsdp_collectives == "copy_engine" and device == "cpu":
        return ["parallelism.fsdp_collectives=copy_engine needs GPUs; hardware.device is cpu"]
    return []


def _refuse_chunks(training: TrainingConfig, parallelism: ParallelismConfig) -> list[str]:
    if training.loss_chunk_size is None or parallelism.tp_size == 1 or parallelism.loss_parallel:
        return []
    return [
        f"loss_chunk_size {training.loss_chunk_size} under tp {parallelism.tp_size} needs parallelism.loss_parallel: "
        "a chunk's logits are never gathered"
    ]


def _refuse_written_attention(model: ModelConfig, parallelism: ParallelismConfig) -> list[str]:
    """What the configuration says in so many words; a class's own defaults are known to :func:`plan_refusals`."""
    if model.target is not None:
        return []
    written: dict[str, Any] = {}
    if model.path is not None:
        file = Path(model.path) / "config.json"
        if not file.is_file():
            return [f"model.path {model.path} has no config.json"]
        written = json.loads(file.read_text())
    asked = SimpleNamespace(**{**written, **model.hf})
    return refuse_attention(asked, parallelism.cp_size, parallelism.cp_method)


def plan_refusals(model: ModelConfig, parallelism: ParallelismConfig, float8: bool = False) -> list[str]:
    """What the model's configuration class, its own tensor-parallel plan and its FP8 layers do not allow, by name.

    For the parent process before ranks start: imports torch and transformers, allocates nothing. With tp or FP8 it
    builds the model on meta.
    """
    from ndbench.parallel.float8 import float8_refusals
    from ndbench.training.models import build_model, transformers_config

    try:
        if model.target is None:
            config = transformers_config(model)
            if reasons := refuse_attention(config, parallelism.cp_size, parallelism.cp_method):
                return reasons
        if parallelism.tp_size == 1 and not float8:
            return []
        built = build_model(model)
    except ValueError as error:
        return [str(error)]
    plan = _plan(built, model, parallelism) if parallelism.tp_size > 1 else None
    reasons = [] if plan is None else list(plan.refusals)
    return reasons + (float8_refusals(built.model, built.blocks, parallelism, plan) if float8 else [])


def _plan(built: Any, model: ModelConfig, parallelism: ParallelismConfig) -> Any:
    from ndbench.parallel.plan import tensor_plan

    return tensor_plan(
        built.model,
        built.blocks,
        tp_size=parallelism.tp_size,
        sequence_parallel=parallelism.sequence_parallel,
        loss_parallel=parallelism.loss_parallel,
        user_plan=model.tp_plan,
    )
