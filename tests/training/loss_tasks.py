"""What ranks do for ``test_loss.py``."""

from __future__ import annotations

from unittest.mock import patch

import torch

from ndbench.engines.bundled import BundledEngine
from ndbench.parallel.mesh import build_mesh
from tests.parity.cases import batch, case, layout, llama, training


def multiplications() -> int:
    """How often a step in bf16 multiplies what the loss has left for backward."""
    at = case(
        layout(shard=2), llama(num_hidden_layers=2), training=training(precision="bf16", loss_chunk_size=16), steps=1
    )
    mesh = build_mesh(at.parallelism, "cpu")
    engine = BundledEngine()
    engine.build(at.model, at.training, mesh, torch.device("cpu"))
    with patch("ndbench.training.loss.torch.mul", side_effect=torch.mul) as multiplied:
        engine.step(batch(at, 0, mesh.batch_rank, mesh.batch_size))
    engine.close()
    return multiplied.call_count
