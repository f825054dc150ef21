"""What we use of torch without a public name exists in this version."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ndbench.parallel._torch_private import TRIED_TORCH, functional


def test_private_names_exist_in_this_torch() -> None:
    """A failure here names what a new torch has moved; the versions tried are in the module."""
    tried = f"tried with torch {', '.join(TRIED_TORCH)}, this is {torch.__version__}"
    assert hasattr(DeviceMesh, "_flatten"), tried
    assert hasattr(DeviceMesh, "_concatenate"), tried
    assert "_local_tensor" in DTensor.__slots__, tried
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"):
        assert hasattr(functional(), name), tried
