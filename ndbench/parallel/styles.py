"""Names of the styles of a tensor-parallel plan. Pure, so that a plan is read before torch is."""

from __future__ import annotations

STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "embedding_rowwise",
    "replicated_with_grad_allreduce": "partial",
    "replicated": "replicated",
}
"""Known plan styles and what they mean to ``tensor.py``; ``partial``: replicated weights on sharded activations."""
