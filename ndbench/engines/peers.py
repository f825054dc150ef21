"""What the other trainers have in common: cells that they are not asked to train. Needs nothing of their code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ndbench.config import Cell


def peer_refusals(cell: Cell, name: str) -> list[str]:
    """What another trainer is not asked to do here, one line each with the numbers."""
    training, layout, model = cell.config.training, cell.parallelism, cell.config.model
    reasons = [*layout.refuse(model, training)]
    if training.precision not in ("fp32", "bf16"):
        reasons.append(f"precision '{training.precision}' is not implemented for {name}; implemented: fp32, bf16")
    if training.activation_checkpointing not in ("none", "full"):
        reasons.append(f"activation_checkpointing '{training.activation_checkpointing}' is not offered by {name}")
    if training.activation_offload:
        reasons.append(f"activation_offload is not implemented for {name}")
    if layout.cpu_offload:
        reasons.append(f"cpu_offload is not implemented for {name}")
    if layout.cp_size > 1 and layout.cp_method != "ring":
        reasons.append(f"cp_method '{layout.cp_method}' is not implemented for {name}; implemented: ring")
    if model.target is not None:
        reasons.append(f"model.target={model.target} is not implemented for {name}, which needs a transformers model")
    if training.cuda_graphs:
        reasons.append(f"cuda_graphs=true is not implemented for {name}")
    if training.max_grad_value is not None:
        reasons.append(f"max_grad_value {training.max_grad_value} is not implemented for {name}")
    if cell.config.data.documents == "packed":
        reasons.append(f"data.documents=packed is not implemented for {name}")
    return reasons
