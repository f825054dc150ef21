"""When a training step can be captured in a CUDA graph, as far as the configuration tells. No torch."""

from __future__ import annotations

from ndbench.config import TrainingConfig
from ndbench.parallel.config import ParallelismConfig

GRAPHED_OPTIMIZERS = ("adamw", "sgd")
"""Values of ``training.optimizer`` that can read the learning rate from the device."""


def graph_refusals(training: TrainingConfig, parallelism: ParallelismConfig, device: str) -> list[str]:
    """Why a step cannot be captured in a CUDA graph, as far as the configuration tells."""
    reasons = []
    if device != "cuda":
        reasons.append(f"cuda_graphs need a CUDA device, this is {device}")
    if parallelism.cpu_offload:
        reasons.append("cuda_graphs: under cpu_offload the host waits for the gradients in each step")
    if training.activation_offload:
        reasons.append("cuda_graphs: under activation_offload blocks leave for host memory and come back")
    if training.optimizer not in GRAPHED_OPTIMIZERS:
        known = ", ".join(GRAPHED_OPTIMIZERS)
        reasons.append(
            f"cuda_graphs: optimizer '{training.optimizer}' has its learning rate on the host; {known} do not"
        )
    return reasons
