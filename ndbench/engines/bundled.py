"""The bundled engine behind the seam: builds a model, lays it out over the mesh, and takes steps.

All numerics are in ``ndbench.parallel`` and ``ndbench.training``; this file only joins them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ndbench.config import ModelConfig, TrainingConfig
from ndbench.engines.bundled_refusals import configuration_refusals, plan_refusals, tensor_plan_of
from ndbench.engines.protocol import Batch, StepResult
from ndbench.training.graph_rules import graph_refusals

if TYPE_CHECKING:
    import torch

    from ndbench.config import Cell
    from ndbench.parallel.copy_engine import CopyEngines
    from ndbench.parallel.mesh import Mesh
    from ndbench.training.graphs import GraphedStep
    from ndbench.training.step import Step


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
        return "; ".join(configuration_refusals(cell, self.attention, self.fp8)) or None

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
        from ndbench.parallel.gradients import Gradients
        from ndbench.parallel.initialize import Weights
        from ndbench.parallel.parallelize import Technique, parallelize
        from ndbench.parallel.peer_memory import why_not
        from ndbench.training.cuda_graph import CudaRecorder
        from ndbench.training.forward import attach_loss, chunk_refusals
        from ndbench.training.graphs import GraphedStep
        from ndbench.training.models import build_model
        from ndbench.training.optimizer import ShardOptimizer
        from ndbench.training.step import Step

        torch.use_deterministic_algorithms(training.deterministic, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        built = build_model(model_config)
        plan = tensor_plan_of(built, model_config, mesh.config) if mesh.config.tp_size > 1 else None
        reasons = [] if plan is None else list(plan.refusals)
        if training.loss_chunk_size is not None:
            reasons += chunk_refusals(built.model)
        low = None
        if training.precision == "fp8":
            low = float8.float8_for(device, self.fp8)
            reasons += float8.float8_refusals(built.model, built.blocks, mesh.config, plan)
        if mesh.config.data_collectives == "copy_engine" and mesh.batch.size() * mesh.cp.size() > 1:
            group = mesh.fsdp.get_group() if mesh.fsdp.size() > 1 else mesh.world["dp_replicate"].get_group()
            reasons += [f"data_collectives=copy_engine: {why}" for why in (why_not(group),) if why]
        ungraphed = graph_refusals(training, mesh.config, device.type)
        if training.cuda_graphs:
            reasons += ungraphed
        if reasons:
            raise ValueError("; ".join(reasons))
        dtype = None if training.precision == "fp32" else torch.bfloat16
        std = float(getattr(getattr(built.model, "config", None), "initializer_range", model_config.initializer_range))
        kernel = _kernel(built, mesh, device, dtype or torch.float32, self.attention)
        micro_steps, tokens = mesh.config.micro_steps(training)
        parallel = parallelize(
            built.model,
            built.blocks,
            mesh,
            device,
            plan,
            Weights(training.seed, std, self.weight_jitter, built.constants),
            Technique(
                param_dtype=dtype,
                activation_checkpointing=training.activation_checkpointing,
                activation_offload=training.activation_offload,
                compile=training.compile,
                registry_attention=built.transformers,
                attention_kernel=kernel,
                micro_steps=micro_steps,
                tokens=tokens,
                float8=low,
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
        if parallel.fully_sharded and parallel.copy_engines is None and training.cuda_graphs is None:
            ungraphed.append("FSDP gathers with NCCL; training.cuda_graphs=true tries it all the same")
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
        shape = getattr(built.model, "config", None)
        window = getattr(shape, "sliding_window", None) or training.sequence_length
        bounded = window < training.sequence_length or getattr(shape, "attn_logit_softcapping", None) is not None
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
            precision, layout = dtype or torch.float32, mesh.config
            whole, self._packed_kernel = (
                attention_kernel(
                    device.type, precision, layout.cp_size, layout.cp_method, kernel, bounded=bounded, documents=packed
                )
                for packed in (False, True)
            )
            self._facts["attention_kernel"] = whole

    def step(self, batch: Batch) -> StepResult:
        assert self._step is not None, "setup comes first"
        if batch.document_ids is not None and self._packed_kernel is not None:
            self._facts["attention_kernel"] = self._packed_kernel
        take = self._step if self._graphs is None else self._graphs
        with nullcontext() if self._copy_engines is None else self._copy_engines.step(self._kind(batch)):
            return take(batch)

    def _kind(self, batch: Batch) -> Any:
        """What the kernels of a step depend on."""
        assert self.model is not None, "setup comes first"
        return batch.input_ids.shape, batch.document_ids is not None, self.model.training

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
        self.model = self._step = self._graphs = self._copy_engines = None

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
