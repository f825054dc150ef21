"""``engine=accelerate``: the same cell trained through Hugging Face Accelerate, by our runner and clock.

Accelerate chooses how: DDP, FSDP2, its TP and CP, regional compilation. The model, its starting weights, the data, the
optimizer and the meaning of a step are those of the bundled engine. What Accelerate refuses is refused in its words.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import distributions
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ndbench.engines.peers import peer_refusals
from ndbench.engines.protocol import Batch, StepResult

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ndbench.config import Cell, ModelConfig, TrainingConfig
    from ndbench.parallel.config import ParallelismConfig
    from ndbench.parallel.mesh import Mesh


ATTENTION = {
    "sdpa": None,
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""transformers' name of an attention -> the package that it is in."""


class AccelerateEngine:
    """``cp_strategy`` is how Accelerate's CP rotates keys and values: ``allgather`` or ``alltoall``; ``attention`` is
    transformers' ``attn_implementation``, one of ``ATTENTION``.

    ``training.loss_chunk_size`` and the options of our own axes (``sequence_parallel``, ...) do not apply to it.
    """

    def __init__(self, cp_strategy: str = "allgather", attention: str = "sdpa") -> None:
        self.cp_strategy, self.attention = cp_strategy, attention
        self.model: nn.Module | None = None
        self._facts: dict[str, Any] = {}

    def refuse(self, cell: Cell) -> str | None:
        """Why this engine cannot run ``cell``; needs neither torch nor Accelerate's code."""
        if importlib.util.find_spec("accelerate") is None:
            return "engine=accelerate needs the package accelerate: pip install 'ndbench[accelerate]'"
        return "; ".join([*peer_refusals(cell, "accelerate"), *self._refuse_attention(cell)]) or None

    def _refuse_attention(self, cell: Cell) -> list[str]:
        name, cp_size, device = self.attention, cell.parallelism.cp_size, cell.config.hardware.device
        if name not in ATTENTION:
            return [f"engine.options.attention '{name}' is not known; known: {', '.join(ATTENTION)}"]
        package = ATTENTION[name]
        if package is None:
            return []
        if cp_size > 1:
            return [f"engine.options.attention '{name}' with cp {cp_size}: Accelerate's cp takes sdpa alone"]
        if device == "cpu":
            return [f"engine.options.attention '{name}' has no kernel for device 'cpu'"]
        if next(iter(distributions(name=package)), None) is None:
            return [f"engine.options.attention '{name}' needs the package {package}"]
        return []

    def refuse_plan(self, cell: Cell) -> str | None:
        """Accelerate's own word on the layout."""
        layout = cell.parallelism
        try:
            made = _parallelism(layout, self.cp_strategy)
            if layout.tp_size > 1 and layout.fsdp_size > 1:
                getattr(importlib.import_module("transformers.integrations.tensor_parallel"), "ReplicateParallel")  # noqa: B009
            if made is not None and cell.config.hardware.device == "cpu" and not _only_sharded(layout):
                _validate_on_cpu(made, cell.world_size)
        except (ValueError, AttributeError) as error:  # it imports a name of transformers that some versions lack
            return "accelerate: " + " ".join(str(error).split())
        return None

    def setup(self, cell: Cell, mesh: Mesh) -> None:
        import accelerate
        import torch
        from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin

        training, layout = cell.config.training, cell.parallelism
        torch.use_deterministic_algorithms(training.deterministic, warn_only=True)
        cuda = mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)
        sharded = layout.fsdp_size > 1
        if sharded and not cuda:
            _ranks_are_devices()
        options: dict[str, Any] = {}
        if sharded:
            options["fsdp_plugin"] = _fsdp_plugin(training, layout)
        if training.compile:
            options["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        # One rank trains without DDP, as it would if no launcher had started it.
        with _without(*LAUNCHER) if cell.world_size == 1 else nullcontext():
            self.accelerator = accelerate.Accelerator(
                cpu=not cuda,
                mixed_precision="bf16" if training.precision == "bf16" else "no",
                parallelism_config=_parallelism(layout, self.cp_strategy),
                kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
                **options,
            )
        tp_mesh = self.accelerator.torch_device_mesh["tp"] if layout.tp_size > 1 else None
        model = _model(cell.config.model, training, device, tp_mesh, self.attention)
        if training.activation_checkpointing == "full" and not sharded:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        self._train(cell, mesh, model)
        self._facts = {
            "accelerate": accelerate.__version__,
            "distributed_type": str(self.accelerator.distributed_type.value),
            "attention_kernel": self.attention,
        }

    def _train(self, cell: Cell, mesh: Mesh, model: nn.Module) -> None:
        import torch

        from ndbench.training.optimizer import optimizer_class
        from ndbench.training.schedule import schedule_factors

        training, layout = cell.config.training, cell.parallelism
        kind, options = optimizer_class(training)
        # Under TP transformers leaves norms plain, and a fused update takes one kind of tensor at a time.
        kinds: dict[type, list[Any]] = {}
        for parameter in model.parameters():
            kinds.setdefault(type(parameter.data), []).append(parameter)
        optimizer = kind([{"params": parameters} for parameters in kinds.values()], **options)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._factor, self._taken = schedule_factors(training), 0
        self._mesh, self._limit, self._micro = mesh, training.max_grad_norm, training.micro_batch_size
        # DDP and FSDP take the mean over the ranks that share the parameters' gradient; a step's loss is a sum.
        self._averaged = layout.batch_size * layout.cp_size
        self._cross_entropy = torch.compile(_cross_entropy) if training.compile else _cross_entropy

    def step(self, batch: Batch) -> StepResult:
        import torch
        import torch.distributed as dist

        assert self.model is not None, "setup comes first"
        tokens = (batch.labels != -100).sum()
        group = self._mesh.batch.get_group() if self._mesh.batch.size() > 1 else None
        if group is not None:
            dist.all_reduce(tokens, group=group)
        divisor = tokens.clamp(min=1).to(torch.float32)
        rows = len(batch.labels)
        size = self._micro or rows
        total = torch.zeros((), dtype=torch.float32, device=batch.labels.device)
        for start in range(0, rows, size):
            part = slice(start, start + size)
            last = start + size >= rows
            synced = nullcontext() if last else self.accelerator.no_sync(self.model)
            pieces = [x[part].clone() for x in (batch.input_ids, batch.labels, batch.position_ids)]
            with synced, self._sharing(pieces):
                loss = self._loss_sum(*pieces)
                self.accelerator.backward(loss * (self._averaged / divisor))
            total += loss.detach()
        limit = float("inf") if self._limit is None else self._limit
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        for options, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            options["lr"] = rate * self._factor(self._taken)
        self._taken += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._mesh.loss.size() > 1:
            dist.all_reduce(total, group=self._mesh.loss.get_group())
        return StepResult(total / divisor, norm.full_tensor() if hasattr(norm, "full_tensor") else norm, tokens)

    def _sharing(self, pieces: list[torch.Tensor]) -> AbstractContextManager[Any]:
        """Inside, each cp rank has its part of the sequence."""
        if self._mesh.config.cp_size == 1:
            return nullcontext()
        shared: AbstractContextManager[Any] = self.accelerator.maybe_context_parallel(
            buffers=pieces, buffer_seq_dims=[1] * len(pieces), no_restore_buffers=set(pieces)
        )
        return shared

    def _loss_sum(self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        assert self.model is not None
        inputs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids}
        if self.attention != "sdpa":
            # Documents are not packed, which transformers would read off the positions, on the host, in each layer.
            del inputs["position_ids"]
        if self._mesh.config.cp_size > 1:
            # Positions of a part of the sequence have a gap, which transformers takes for packed documents, and makes a
            # mask of all pairs of tokens that Accelerate then drops. A mask of four dims it takes as it is.
            inputs["attention_mask"] = input_ids.new_zeros(1, 1, 1, 1)
        loss: torch.Tensor = self._cross_entropy(self.model(**inputs, use_cache=False).logits, labels)
        return loss

    def close(self) -> None:
        from accelerate.state import AcceleratorState, GradientState

        self.model = self.optimizer = self.accelerator = None
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    def info(self) -> dict[str, Any]:
        """Facts for the record."""
        return dict(self._facts)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the labels that bear loss; ``logits`` is [batch, sequence, vocabulary]."""
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def _only_sharded(layout: ParallelismConfig) -> bool:
    return layout.tp_size == layout.cp_size == 1


def _parallelism(layout: ParallelismConfig, cp_strategy: str) -> Any:
    """Accelerate's ParallelismConfig; None for one rank and for plain DDP, which it wants without."""
    from accelerate.utils import ParallelismConfig, TorchContextParallelConfig

    if layout.dp_shard_size == layout.cp_size == layout.tp_size == 1:
        return None
    handler = TorchContextParallelConfig(cp_comm_strategy=cp_strategy) if layout.cp_size > 1 else None
    return ParallelismConfig(**{f"{axis}_size": size for axis, size in layout.sizes.items()}, cp_handler=handler)


def _validate_on_cpu(made: Any, ranks: int) -> None:
    """Ask as an Accelerator of CPU ranks would; raises ``ValueError`` with its words."""
    from accelerate.utils import DistributedType

    made._validate_accelerator(
        SimpleNamespace(
            multi_device=False,
            num_processes=ranks,
            is_fsdp2=False,
            is_main_process=True,
            distributed_type=DistributedType.MULTI_CPU,
        )
    )


def _ranks_are_devices() -> None:
    """Accelerate keeps FSDP from CPU ranks; told that each is a device, it runs it, which rehearses a GPU's run."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Inside, the environment lacks these variables: it is where Accelerate looks for a launcher."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _fsdp_plugin(training: TrainingConfig, layout: ParallelismConfig) -> Any:
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    low = torch.bfloat16 if training.precision == "bf16" else None
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=layout.reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
        activation_checkpointing=training.activation_checkpointing == "full",
        cpu_ram_efficient_loading=False,
    )


def _model(config: ModelConfig, training: TrainingConfig, device: torch.device, tp_mesh: Any, attention: str) -> Any:
    """The bundled engine's model and starting weights, with transformers' own attention and, on ``tp_mesh``, its TP."""
    import torch

    from ndbench.parallel.initialize import Weights, fill, materialize
    from ndbench.training.models import build_model

    built = build_model(config)
    model: Any = built.model
    std = float(getattr(model.config, "initializer_range", config.initializer_range))
    weights = Weights(training.seed, std, 0.0, built.constants)
    if tp_mesh is None:
        materialize(model, device, device)
        fill(model, weights)
        model.set_attn_implementation(attention)
        return model
    # transformers shards a model over tp while it loads weights, so it is given them to load
    from transformers.distributed.configuration_utils import DistributedConfig

    whole = {name: weights.whole(name, parameter.shape, device) for name, parameter in model.named_parameters()}
    made = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=whole,
        distributed_config=DistributedConfig(tp_size=tp_mesh.size(), tp_plan="auto"),
        device_mesh=tp_mesh,
        dtype=torch.float32,
        attn_implementation=attention,
    )
    _own_memory(made)
    return made


def _own_memory(model: nn.Module) -> None:
    """Copy each sharded parameter: on a GPU it is a view of the whole weight, which would stay in memory with it.

    It is copied as a DTensor. Its local part alone would lose the offset in the whole that the DTensor goes on telling
    (on all ranks but the first), and torch.compile cannot trace one whose two offsets differ.
    """
    import torch
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            copied = torch.nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            vars(copied).update(vars(parameter))
            torch.utils.swap_tensors(parameter, copied)  # type: ignore[no-untyped-call]
