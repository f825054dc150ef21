"""What we use of torch without a public name exists in this version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ndbench.parallel._torch_private import (
    TRIED_TORCH,
    expect_gradients_strided_like_outputs,
    functional,
    no_random_state_for_attention_without_dropout,
)


def test_private_names_exist_in_this_torch() -> None:
    """A failure here names what a new torch has moved; the versions tried are in the module."""
    tried = f"tried with torch {', '.join(TRIED_TORCH)}, this is {torch.__version__}"
    assert hasattr(DeviceMesh, "_flatten"), tried
    assert hasattr(DeviceMesh, "_concatenate"), tried
    assert "_local_tensor" in DTensor.__slots__, tried
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"):
        assert hasattr(functional(), name), tried


class Copies(TorchDispatchMode):
    """Counts the copies and clones of tensors of a shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.count += args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strided", [True, False])
def test_a_gradient_with_its_outputs_strides_is_not_copied(strided: bool) -> None:
    """Without it, each layer of the ring copies the gradients of queries, keys and values once more."""
    import torch._functorch.config as config

    torch.compiler.reset()  # what the other case has compiled
    weight = torch.randn(8, 8, requires_grad=True)
    heads = torch.compile(lambda x: (x @ weight).view(2, 6, 2, 4).transpose(1, 2), backend="aot_eager")
    with config.patch(guess_tangent_strides_as_outputs=False):
        if strided:
            expect_gradients_strided_like_outputs()
        out = heads(torch.randn(12, 8))
    gradient = torch.randn(2, 6, 2, 4).transpose(1, 2)
    assert gradient.stride() == out.stride() != gradient.contiguous().stride()
    with Copies(out.shape) as copies:
        out.backward(gradient)
    assert copies.count == (0 if strided else 1)
    assert weight.grad is not None


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_that_is_computed_again_keeps_a_random_state_for_its_dropout_only(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is drawn none may be kept: torch 2.13 mistakes what it keeps beside DTensors' meshes for these."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import partitioners

    torch.compiler.reset()
    name = "has_recomputable_rng_ops"
    monkeypatch.setattr(partitioners, name, getattr(partitioners, name))  # put back afterwards
    no_random_state_for_attention_without_dropout()
    graphs = []

    def kept(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def attention(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=dropout)

    backend = aot_autograd(fw_compiler=kept, partition_fn=partitioners.min_cut_rematerialization_partition)
    again = torch.compile(lambda q: checkpoint(attention, q.sin(), use_reentrant=False), backend=backend)
    again(torch.randn(1, 2, 8, 8, requires_grad=True)).sum().backward()
    states = [each for graph in graphs for each in graph.graph.nodes if "rng_state" in str(each.target)]
    assert len(graphs) == 2
    assert bool(states) == (dropout > 0)
