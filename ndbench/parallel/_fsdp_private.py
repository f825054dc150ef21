"""FSDP2's parameter groups, which have no public name: what a unit gathers, where to, and when.

``tests/parallel/test_fsdp_private.py`` names the versions tried. Nothing here knows how a unit is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

TRIED_TORCH = ("2.11.0", "2.13.0", "2.14.1")


def rows_of(rank: int, padded: int, whole: int) -> tuple[int, int]:
    """The first element of ``rank``'s rows and how many they are; ``padded`` is what the fullest rank holds."""
    start = min(rank * padded, whole)
    return start, min(padded, whole - start)


class ShardedParameter:
    """One parameter of a unit, sharded by rows: rank r holds rows r x p to (r + 1) x p, the last ones fewer or none."""

    def __init__(self, fsdp_param: Any) -> None:
        fsdp_param.reset_sharded_param()
        self._param = fsdp_param
        self.parameter: nn.Parameter = fsdp_param.sharded_param
        self.padded: int = fsdp_param.padded_sharded_param_size.numel()
        """Elements of the fullest shard."""
        self.whole: int = fsdp_param._orig_size.numel()
        """Elements of all shards together."""

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The first element that ``rank`` holds, and how many."""
        return rows_of(rank, self.padded, self.whole)

    def keep_in(self, memory: torch.Tensor) -> nn.Parameter:
        """Have the whole parameter in ``memory``, flat and padded, whenever it is gathered; returns what computes."""
        assert memory.storage_offset() == 0, "FSDP makes the parameter from the start of its storage"
        self._param.all_gather_outputs = [memory]
        self._param.alloc_all_gather_outputs = self._param.free_unsharded_param = _nothing
        self._param.init_unsharded_param()
        leaf: nn.Parameter = self._param._unsharded_param
        return leaf


class Unit:
    """What FSDP shards, gathers and reduces together for ``module``, given to ``fully_shard``."""

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, FSDPModule)
        state = module._get_fsdp_state()
        self._group: Any = state._fsdp_param_group
        self.parameters = [ShardedParameter(each) for each in self._group.fsdp_params] if self._group else []

    @property
    def freed_after_forward(self) -> bool:
        return bool(self._group._reshard_after_forward)

    def gather_by(
        self,
        on: Callable[[], bool],
        start: Callable[[], Any],
        wait: Callable[[Any], None],
        claim: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        """While ``on()``: ``start`` begins to gather and returns what ``wait`` is given before the unit computes.

        Whoever gathers: ``claim`` is called before it is written where the unit computes, ``release`` whenever it has
        computed and is sharded again.
        """
        group = self._group
        by_nccl, wait_for_nccl, reshard = group.unshard, group.wait_for_unshard, group.reshard

        def unshard(async_op: bool = False) -> None:
            if not on():
                by_nccl(async_op)
            elif group._all_gather_result is None and not group.is_unsharded:
                claim()
                group._all_gather_result = SimpleNamespace(
                    gathered=start(), all_gather_event=None, all_gather_work=None
                )

        def wait_for_unshard() -> None:
            if not hasattr(group._all_gather_result, "gathered"):
                if group._all_gather_result is not None:
                    claim()
                wait_for_nccl()
                return
            wait(group._all_gather_result.gathered)
            group._to_unsharded()
            group._all_gather_result = None

        def reshard_and_release() -> None:
            was = group.is_unsharded
            reshard()
            if was and not group.is_unsharded:
                release()

        group.unshard, group.wait_for_unshard, group.reshard = unshard, wait_for_unshard, reshard_and_release

    def drop(self) -> bool:
        """Forget a gather that nobody has waited for: FSDP fetches ahead what a frozen unit never asks for."""
        waiting = self._group._all_gather_result is not None and not self._group.is_unsharded
        if waiting:
            self._group._all_gather_result = None
        return waiting


class Root:
    """What the units of ``model`` share."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        self._state: Any = model._get_fsdp_state()

    def join(self) -> None:
        """Have the current stream wait for FSDP's: a forward has them wait for it, which a CUDA graph must see end."""
        for name in ("all_gather_copy_in_stream", "all_gather_stream"):
            stream = getattr(self._state._comm_ctx, name, None)
            if isinstance(stream, torch.cuda.Stream):
                torch.cuda.current_stream().wait_stream(stream)

    def reset(self) -> None:
        """Between steps: all units are sharded and idle, whatever a step that broke off has left of itself."""
        shared, communication = self._state._state_ctx, self._state._comm_ctx
        if self._state._is_root is None:
            return  # there was no step
        communication.all_gather_state = None
        communication.post_forward_order.clear()
        shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False
        for state in shared.all_states:
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
            group = state._fsdp_param_group
            if group is None:
                continue
            group._all_gather_result, group._training_state = None, TrainingState.IDLE
            group._post_forward_indices.clear()
            group._to_sharded()
            for each in group.fsdp_params:
                each.unsharded_accumulated_grad = each._unsharded_param.grad = None


def _nothing() -> None:
    """What is kept needs no memory anew, and gives none back."""
