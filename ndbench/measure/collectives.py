"""Which collectives one step issues: operation, mesh axis, count, bytes, and the module they come from.

A dispatch mode for one instrumented step. It sees the collectives of ``torch.distributed`` (``c10d``), functional
ones (``_c10d_functional``, which DTensor and compiled code use) and point-to-point messages, in forward and backward.
It knows nothing of any engine. The result is exact and the same on every machine.

Bytes are those that this rank puts on the wire by the bandwidth-optimal algorithm in a group of n ranks, rounded down
(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005):

    all_gather       (n - 1) x the rank's shard        = (n - 1)/n x the output
    reduce_scatter   (n - 1)/n x the input
    all_reduce       2 (n - 1)/n x the tensor          (a reduce-scatter and an all-gather)
    all_to_all       what is addressed to other ranks  = (n - 1)/n x the input for equal splits
    broadcast, reduce, gather, scatter    (n - 1)/n x the tensor of one rank (the mean over ranks)
    send             the message;   recv, barrier    0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ndbench.measure import _torch_private as private
from ndbench.measure.modules import ModuleStack

NAMESPACES = ("c10d", "_c10d_functional", "symm_mem", "ndbench")

OPERATIONS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "isend": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "irecv": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""Our name by operator name. Any other operator on a process group is recorded under its own name with 0 bytes."""

PAYLOADS = ("input_tensor", "input_tensors", "input_list", "inputs", "input", "tensors", "tensor")
"""Names of the argument that holds what this rank contributes, in the order in which they are looked for."""


class CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the collectives of the code run inside this context.

    ``axis_of_group``: process-group name -> label of the mesh axis. ``model``: when given, each collective is filed
    under the innermost module being run (in backward: whose gradient is being computed, as well as hooks can tell;
    FSDP gathers a block's parameters ahead, in the block before it).
    """

    def __init__(self, axis_of_group: Mapping[str, str], model: torch.nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axis_of_group = axis_of_group
        self._modules = ModuleStack(model)
        self._rows: dict[tuple[str, str, str], list[int]] = {}

    def __enter__(self) -> CollectiveRecorder:
        self._modules.attach()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._modules.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(private.is_dtensor(kind) for kind in types):
            return NotImplemented  # DTensor then issues its collectives on local tensors, which come here
        kwargs = kwargs or {}
        if func.namespace in NAMESPACES:
            names = [argument.name for argument in func._schema.arguments]
            self._record(func._schema.name.partition("::")[2], {**dict(zip(names, args, strict=False)), **kwargs})
        return func(*args, **kwargs)

    def _record(self, operator: str, arguments: dict[str, Any]) -> None:
        group = arguments.get("process_group", arguments.get("group_name"))
        if group is None:
            return  # waits and checks, which send nothing
        name = private.group_name(group)
        if operator == "batch_p2p_ops":
            for kind, tensor in zip(arguments["op_list"], arguments["tensors"], strict=True):
                self._add(kind.removeprefix("i"), name, _bytes([tensor]) if kind.endswith("send") else 0)
            return
        op = OPERATIONS.get(operator, operator)
        self._add(op, name, wire_bytes(op, arguments, private.group_size(name), private.group_rank(name)))

    def _add(self, op: str, group: str, size: int) -> None:
        axis = self._axis_of_group.get(group) or f"other group of {private.group_size(group)}"
        row = self._rows.setdefault((op, axis, self._modules.current or ""), [0, 0])
        row[0] += 1
        row[1] += size

    def table(self) -> list[dict[str, Any]]:
        """One row for each operation, axis and issuing module: ``op``, ``axis``, ``count``, ``bytes`` (all calls
        together), ``where`` (the module's name; empty outside of any), sorted. Equal for equal steps.
        """
        rows = sorted(self._rows.items(), key=lambda item: (item[0][0], item[0][1], _natural(item[0][2])))
        return [
            {"op": op, "axis": axis, "count": count, "bytes": size, "where": [where] if where else []}
            for (op, axis, where), (count, size) in rows
        ]


def totals(table: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[int, int]]:
    """``(op, axis) -> (count, bytes)``: the rows of a table summed over modules."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for row in table:
        count, size = sums.get((row["op"], row["axis"]), (0, 0))
        sums[row["op"], row["axis"]] = (count + row["count"], size + row["bytes"])
    return sums


def wire_bytes(op: str, arguments: Mapping[str, Any], ranks: int, rank: int) -> int:
    """Bytes that this rank sends (the closed forms above), from an operator's arguments by name."""
    if op in ("recv", "barrier") or op not in OPERATIONS.values():
        return 0
    # Only the root of a scatter has the input; every rank has its own part of the output.
    payload = arguments["output_tensors"] if op == "scatter" else _payload(arguments)
    tensors = [leaf for leaf in tree_leaves(payload) if isinstance(leaf, torch.Tensor)]
    size = _bytes(tensors)
    if op == "send":
        return size
    if op == "all_gather":
        return (ranks - 1) * size
    if op == "all_to_all":
        return _sent_to_others(tensors, arguments.get("input_split_sizes"), ranks, rank)
    return (2 if op == "all_reduce" else 1) * (ranks - 1) * size // ranks


def _payload(arguments: Mapping[str, Any]) -> Any:
    return next(arguments[name] for name in PAYLOADS if name in arguments)


def _sent_to_others(tensors: Sequence[torch.Tensor], splits: Sequence[int] | None, ranks: int, rank: int) -> int:
    if len(tensors) > 1:
        return _bytes([tensor for index, tensor in enumerate(tensors) if index != rank])
    size = _bytes(tensors)
    if splits and sum(splits):
        return size * (sum(splits) - splits[rank]) // sum(splits)
    return size * (ranks - 1) // ranks


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which ``layers.10`` comes after ``layers.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
