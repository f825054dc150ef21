"""What we use of FSDP2 without a public name exists in this version."""

from __future__ import annotations

import inspect

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state

from ndbench.parallel._fsdp_private import TRIED_TORCH


def test_private_names_exist_in_this_torch() -> None:
    """A failure here names what a new torch has moved; the versions tried are in the module."""
    tried = f"tried with torch {', '.join(TRIED_TORCH)}, this is {torch.__version__}"
    names = {
        _fsdp_param.FSDPParam: (
            "reset_sharded_param", "alloc_all_gather_outputs", "free_unsharded_param", "init_unsharded_param",
        ),
        _fsdp_param_group.FSDPParamGroup: (
            "unshard", "wait_for_unshard", "reshard", "is_unsharded", "_to_unsharded", "_reshard_after_forward",
        ),
    }  # fmt: skip
    for where, each in names.items():
        for name in each:
            assert hasattr(where, name), f"{where.__name__}.{name}: {tried}"
    for where, each in {
        _fsdp_param: ("padded_sharded_param_size", "_orig_size", "all_gather_outputs", "_unsharded_param"),
        _fsdp_param_group: ("_all_gather_result", "all_gather_event", "all_gather_work"),
        _fsdp_state: ("_fsdp_param_group", "_comm_ctx"),
    }.items():
        source = inspect.getsource(where)
        for name in each:
            assert name in source, f"{where.__name__}: {name}: {tried}"
