"""Degrees of parallelism, the options of each axis, and every rule that makes a layout valid.

Pure Python: this module imports neither torch nor transformers, so that a layout can be checked on a laptop,
before any process starts. The mesh itself is made in ``mesh.py``.

"Axis" means a mesh axis (``dp_replicate``, ``dp_shard``, ``cp``, ``tp``), "dim" a tensor dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from the slowest to the fastest varying rank index."""


@dataclass
class ParallelismConfig:
    """One layout: the degree of each axis and the options that belong to it.

    Degrees are numbers of ranks; one of them may be ``-1``, meaning "the rest of the world" (see :meth:`resolved`).
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    cp_size: int = 1
    tp_size: int = 1

    reshard_after_forward: bool = True
    """FSDP: free a block's gathered parameters between forward and backward (less memory, one more all-gather)."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    sequence_parallel: bool = True
    """TP: shard the activations between the blocks' matmuls (norms, residuals) over the sequence dim."""
    loss_parallel: bool = True
    """TP: keep the logits sharded over the vocabulary through the cross-entropy."""
    cp_method: str = "ring"
    """CP: ``ring`` (rotate keys and values) or ``ulysses`` (all-to-all over heads)."""

    @property
    def sizes(self) -> dict[str, int]:
        """Degree by axis name, slow to fast."""
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def world_size(self) -> int:
        """Product of the degrees; only meaningful once no degree is -1."""
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    def resolved(self, world_size: int) -> ParallelismConfig:
        """The same layout with a degree of -1 replaced by ``world_size`` over the product of the others.

        Raises ``ValueError`` when more than one degree is -1, a degree is not positive, or the product is not
        ``world_size``.
        """
        raise ValueError("not written yet")

    @property
    def layout(self) -> str:
        """Short readable name: ``ddp8``, ``fsdp8``, ``hsdp2x4``, ``fsdp4_tp2``, ``ddp2_cp2_tp2``, ``tp4``, ``single``."""
        raise ValueError("not written yet")
