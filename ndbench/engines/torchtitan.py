"""``engine=torchtitan``: the same cell trained through torchtitan's Llama 3, by our runner and clock.

torchtitan's own model, parallelization, loss and clipping; the shape, the starting weights, the data, the optimizer and
the meaning of a step are those of the bundled engine. Read against torchtitan 0.2.2.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from ndbench.engines.peers import peer_refusals
from ndbench.engines.protocol import Batch, StepResult

if TYPE_CHECKING:
    from torch import nn

    from ndbench.config import Cell, ModelConfig, TrainingConfig
    from ndbench.parallel.config import ParallelismConfig
    from ndbench.parallel.mesh import Mesh

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""torchtitan's module names -> transformers'."""


class TorchtitanEngine:
    """``training.loss_chunk_size`` and the options of our own axes do not apply to it.

    torchtitan computes in float32 where TP is alone, whatever the precision: with ``tp_autocast`` it gets what it uses
    itself on one GPU and with DDP, torch's autocast.
    """

    def __init__(self, tp_autocast: bool = True) -> None:
        self.tp_autocast = tp_autocast
        self.model: nn.Module | None = None
        self._facts: dict[str, Any] = {}

    def refuse(self, cell: Cell) -> str | None:
        """Why this engine cannot run ``cell``; needs neither torch nor torchtitan's code."""
        if importlib.util.find_spec("torchtitan") is None:
            return "engine=torchtitan needs the package torchtitan: pip install 'ndbench[torchtitan]'"
        model, layout = cell.config.model, cell.parallelism
        reasons = peer_refusals(cell, "torchtitan")
        if model.model_type != "llama" or model.tie_word_embeddings or model.sliding_window is not None:
            reasons.append(f"model type '{model.model_type}' is not its Llama 3 (untied, full attention)")
        if model.head_dim is not None and model.head_dim * (model.num_attention_heads or 0) != model.hidden_size:
            reasons.append(f"head_dim {model.head_dim} x {model.num_attention_heads} is not {model.hidden_size}")
        if layout.dp_replicate_size > 1 and layout.fsdp_size == 1 and layout.tp_size > 1:
            reasons.append("torchtitan: DDP has not supported > 1D parallelism")
        micro, rows = cell.config.training.micro_batch_size, cell.config.training.global_batch_size // layout.batch_size
        if micro is not None and micro < rows:
            reasons.append(f"micro_batch_size {micro} of {rows} sequences a rank is not implemented for torchtitan")
        return "; ".join(reasons) or None

    def setup(self, cell: Cell, mesh: Mesh) -> None:
        import torch
        import torchtitan
        from torch.distributed.fsdp import FSDPModule
        from torchtitan.components.loss import build_cross_entropy_loss
        from torchtitan.distributed import ParallelDims, parallel_dims, utils
        from torchtitan.models.llama3 import Transformer, parallelize_llama

        training, layout = cell.config.training, cell.parallelism
        torch.use_deterministic_algorithms(training.deterministic, warn_only=True)
        cuda = mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)
        parallel_dims.device_type = mesh.device_type  # it looks for an accelerator when it is imported
        dims = ParallelDims(**layout.sizes, pp=1, ep=1, etp=1, world_size=cell.world_size)
        dims.build_mesh()
        job = _job(training, layout)
        with torch.device("meta"):
            model = Transformer(_arguments(cell.config.model, training))
        model = parallelize_llama(model, dims, job)
        for module in model.modules():
            if isinstance(module, FSDPModule) and not cuda:
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights(buffer_device=device)
            _fill(model, cell.config.model, training)
        model.train()
        self.model, self._mesh, self._dims = model, mesh, dims
        self._loss = build_cross_entropy_loss(job)
        self._context = utils.get_train_context(layout.tp_size > 1)
        self._amp = utils.maybe_enable_amp(dims, job.training.mixed_precision_param, mesh.device_type)
        alone = layout.tp_size > 1 and layout.fsdp_size == 1
        if alone and self.tp_autocast and training.precision == "bf16":
            self._amp = torch.autocast(mesh.device_type, dtype=torch.bfloat16)
        self._clip = utils.clip_grad_norm_
        # DDP takes the mean over its ranks; torchtitan turns FSDP's off.
        self._averaged = layout.dp_replicate_size if layout.fsdp_size == 1 else 1
        self._optimize(training)
        self._facts = {
            "torchtitan": getattr(torchtitan, "__version__", None),
            "attention_kernel": "sdpa",
            "tp_autocast": alone and self.tp_autocast,
        }

    def _optimize(self, training: TrainingConfig) -> None:
        from ndbench.training.optimizer import optimizer_class
        from ndbench.training.schedule import schedule_factors

        assert self.model is not None
        kind, options = optimizer_class(training)
        self.optimizer = kind(self.model.parameters(), **options)
        self._rate, self._factor, self._taken = training.learning_rate, schedule_factors(training), 0
        self._limit = training.max_grad_norm

    def step(self, batch: Batch) -> StepResult:
        import torch
        import torch.distributed as dist

        assert self.model is not None, "setup comes first"
        tokens = (batch.labels != -100).sum()
        if self._mesh.batch.size() > 1:
            dist.all_reduce(tokens, group=self._mesh.batch.get_group())
        divisor = tokens.clamp(min=1).to(torch.float32)
        inputs, labels, more = batch.input_ids, batch.labels, dict[str, Any]()
        if self._dims.cp_enabled:
            from torchtitan.distributed.context_parallel import prepare_context_parallel_input

            cp_mesh = self._dims.get_mesh("cp")
            inputs, labels, more = prepare_context_parallel_input(inputs, labels, more, cp_mesh, inputs.device)
        with self._context():
            with self._amp:
                logits = self.model(inputs, **more)
                loss = self._loss(logits, labels)
                scaled = loss * (self._averaged / divisor)
            del logits
            scaled.backward()
        limit = float("inf") if self._limit is None else self._limit
        norm = self._clip(list(self.model.parameters()), limit, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * self._factor(self._taken)
        self._taken += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = _whole(loss.detach())
        if self._mesh.loss.size() > 1:
            dist.all_reduce(total, group=self._mesh.loss.get_group())
        return StepResult((total / divisor).float(), _whole(norm), tokens)

    def close(self) -> None:
        self.model = self.optimizer = None

    def info(self) -> dict[str, Any]:
        """Facts for the record."""
        return dict(self._facts)


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _job(training: TrainingConfig, layout: ParallelismConfig) -> Any:
    """torchtitan's configuration of this cell."""
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.training.seq_len = training.sequence_length
    job.training.mixed_precision_param = "bfloat16" if training.precision == "bf16" else "float32"
    job.training.mixed_precision_reduce = "float32"
    job.compile.enable = training.compile
    job.activation_checkpoint.mode = training.activation_checkpointing
    job.parallelism.data_parallel_replicate_degree = layout.dp_replicate_size
    job.parallelism.data_parallel_shard_degree = layout.dp_shard_size
    job.parallelism.context_parallel_degree = layout.cp_size
    job.parallelism.tensor_parallel_degree = layout.tp_size
    job.parallelism.fsdp_reshard_after_forward = "default" if layout.reshard_after_forward else "never"
    return job


def _arguments(model: ModelConfig, training: TrainingConfig) -> Any:
    """Its model arguments: the MLP's width is rounded up to a multiple of itself, which makes it exact."""
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    assert model.hidden_size is not None
    assert model.intermediate_size is not None
    return TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_hidden_layers,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.num_key_value_heads,
        vocab_size=model.vocab_size,
        multiple_of=model.intermediate_size,
        ffn_dim_multiplier=0.9 * model.intermediate_size / (8 * model.hidden_size / 3),
        norm_eps=model.hf.get("rms_norm_eps", 1e-6),
        rope_theta=model.hf.get("rope_theta", 10000.0),
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),  # its default stretches positions as Llama 3.1 does
        max_seq_len=training.sequence_length,
    )


def _fill(model: nn.Module, config: ModelConfig, training: TrainingConfig) -> None:
    """The bundled engine's starting weights; its rotary embedding pairs neighbours, so q and k rows are reordered."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    from ndbench.parallel.initialize import Weights, computing_device

    weights = Weights(training.seed, config.initializer_range)
    assert config.num_attention_heads is not None
    heads = {"wq": config.num_attention_heads, "wk": config.num_key_value_heads or config.num_attention_heads}
    for name, parameter in model.named_parameters():
        module = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "").removesuffix(".weight")
        full = weights.whole(_theirs(module), parameter.shape, computing_device(parameter))
        kind = module.rpartition(".")[2]
        if kind in heads:
            full = full.view(heads[kind], 2, -1, full.shape[1]).transpose(1, 2).reshape(full.shape)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)


def _theirs(module: str) -> str:
    """transformers' parameter name of torchtitan's module."""
    if module.startswith("layers."):
        _, layer, rest = module.split(".", 2)
        return f"model.layers.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[module]}.weight"
