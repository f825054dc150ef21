"""The names of torch that have no public spelling yet, in one place; ``tests/parallel`` names the versions tried.

Nothing here knows what the calls are for.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

TRIED_TORCH = ("2.11.0", "2.13.0", "2.14.1")


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """1-D mesh over all ranks of ``mesh``; the caller keeps the object, looking it up by name is deprecated."""
    flat: DeviceMesh = mesh._flatten(name)
    return flat


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The mesh whose dims are those of ``meshes``, all of them views of one root."""
    joined: DeviceMesh = DeviceMesh._concatenate(meshes)
    return joined


def group_name(group: dist.ProcessGroup) -> str:
    """The name under which the functional collectives find ``group``."""
    name: str = group.group_name
    return name


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this rank holds: of a DTensor its local part itself (no view, no autograd)."""
    return getattr(tensor, "_local_tensor", tensor)


def placed_like(original: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local`` as what ``original`` is: itself, or a DTensor over the same mesh."""
    if not isinstance(original, DTensor):
        return local
    return DTensor.from_local(
        local,
        original.device_mesh,
        original.placements,
        run_check=False,
        shape=original.shape,
        stride=original.stride(),
    )


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of ``model`` that belong to its state, by name, each once; not those that its code recomputes."""
    lasting = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                lasting[f"{prefix}.{name}" if prefix else name] = buffer
    return lasting


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do both look at the same memory? Fake tensors, too, which have a storage but no address."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def is_fake(tensor: torch.Tensor) -> bool:
    """Has it a shape, but no values?"""
    return isinstance(tensor, FakeTensor)


def assert_on_device(condition: torch.Tensor) -> None:
    """The device's program fails where ``condition``, a scalar on it, is false; the host does not wait."""
    torch._assert_async(condition)


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Let a CUDA graph hold steps of ``optimizer``, without its advice not to ask for that outside of a graph."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]


def watched() -> bool:
    """Is a dispatch mode active, that looks at each operation?"""
    return _len_torch_dispatch_stack() > 0


def abandon_capture(device: torch.device, pool: Any) -> None:
    """After a capture that failed: memory and random numbers are drawn as outside of one again."""
    for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # the capture got so far by itself
            end(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


def version(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was changed in place; views and ``detach()`` share the counter, ``.data`` has its own."""
    return tensor._version


def functional() -> Any:
    """``all_reduce``, ``all_gather_into_tensor``, ``all_to_all_single``, ``wait_tensor``, ... by group name.

    The operators behind ``torch.distributed._functional_collectives``: they trace under fake tensors and torch.compile.
    """
    return torch.ops._c10d_functional


def expect_gradients_strided_like_outputs() -> None:
    """Graphs compiled from here on, in this process, expect an output's gradient with its strides, not contiguous.

    What comes otherwise is copied, in either case. From torch 2.13 on it is so without asking.
    """
    import torch._functorch.config as config

    if not config.guess_tangent_strides_as_outputs:
        config.guess_tangent_strides_as_outputs = True


def trace_side_effects_of_checkpoints() -> None:
    """What is compiled from here on, in this process, may set attributes in a checkpoint; recomputation does not.

    Otherwise such a checkpoint breaks the graph, and then none of it is compiled.
    """
    import torch._dynamo.config as config

    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def no_random_state_for_attention_without_dropout() -> None:
    """Graphs compiled from here on compute attention again without saving the random state for it, if it draws nothing.

    torch 2.14 does so by itself. Older ones save a state for each such operator, on CPUs as an output of the graph,
    after the meshes of DTensors; 2.13 expects these last, takes one of them for a tensor and fails.
    """
    from torch._functorch import partitioners

    if not hasattr(partitioners, "is_rng_op"):
        setattr(partitioners, "has_recomputable_rng_ops", _draws_again)  # noqa: B010 (mypy minds)


def _draws_again(graph: torch.fx.GraphModule) -> bool:
    """Does ``graph`` have an operator that draws random numbers and is computed again?"""
    from torch._functorch.partitioners import must_recompute

    random = torch.Tag.nondeterministic_seeded
    tagged = (node for node in graph.graph.nodes if random in getattr(node.target, "tags", ()))
    return any(must_recompute(node) and _dropout(node) != 0 for node in tagged)


def _dropout(node: torch.fx.Node) -> Any:
    """What ``node`` says of the argument ``dropout_p``; None where its operator has none."""
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    for position, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return node.kwargs.get("dropout_p", given)
    return None


def symmetric_memory() -> Any:
    """``empty`` and ``rendezvous`` of memory that the ranks of a host map into each other."""
    import torch.distributed._symmetric_memory as module

    return module
