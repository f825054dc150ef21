"""Steps that ranks of a pool take for the tests of measuring: a small Llama under FSDP2 and TP, and bare collectives.

Meshes are made once a process: DTensor's caches would hold the names of groups that are gone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ndbench.measure.collectives import CollectiveRecorder
from ndbench.measure.memory import TrackedMemory
from ndbench.measure.yardstick import run_yardstick

HIDDEN, LAYERS, VOCAB, TOKENS = 32, 2, 64, 2 * 16


@functools.cache
def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_shard", "tp"))


def axes() -> dict[str, str]:
    named = {mesh().get_group(axis).group_name: axis for axis in ("dp_shard", "tp")}
    return {**named, dist.group.WORLD.group_name: "world"}


def llama() -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    plan: dict[str, Any] = {}
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh()["tp"], plan)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh()["dp_shard"])
    fully_shard(model, mesh=mesh()["dp_shard"])
    return model


def structure(stray: str | None = None) -> dict[str, Any]:
    """Collectives and tracked peak of two equal steps, and of a third with an all-gather planted in ``stray``."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    ids = torch.arange(TOKENS).view(2, 16) % VOCAB

    def step() -> None:
        model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).mean().backward()
        dist.all_reduce(torch.ones(3))
        optimizer.step()
        optimizer.zero_grad()

    def recorded() -> tuple[list[dict[str, Any]], int]:
        recorder, memory = CollectiveRecorder(axes(), model), TrackedMemory([model, optimizer, ids])
        with memory, recorder:
            step()
        return recorder.table(), memory.peak

    def hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    step()
    before = hooks()
    (first, first_peak), (second, second_peak) = recorded(), recorded()
    found = {"first": first, "second": second, "peaks": [first_peak, second_peak]}
    if stray is not None:
        out = torch.empty(4 * mesh()["tp"].size())
        planted = model.get_submodule(stray).register_forward_hook(
            lambda *_: dist.all_gather_into_tensor(out, torch.ones(4), group=mesh().get_group("tp"))
        )
        found["stray"], _ = recorded()
        planted.remove()
    found["hooks_left"] = hooks() - before
    return found


def inside_an_operator() -> list[dict[str, Any]]:
    """An operator of DTensor that must first reduce its operand: the collective is issued inside its own dispatch."""
    from torch.distributed.tensor import DTensor, Partial

    partial = DTensor.from_local(torch.ones(8, 8), mesh()["tp"], [Partial()])
    recorder = CollectiveRecorder(axes())
    with recorder:
        partial.relu()
    return recorder.table()


def block_bytes() -> int:
    """Bytes of one block's parameters on one rank of tp."""
    block = llama().model.layers[0]
    return sum(parameter.to_local().numel() * 4 for parameter in block.parameters()) * mesh()["dp_shard"].size()


def bare_collectives() -> list[dict[str, Any]]:
    """Each collective once over the world, with 1024 float32 a tensor unless its shape says otherwise."""
    import torch.distributed._functional_collectives as functional

    size, rank = dist.get_world_size(), dist.get_rank()
    world = dist.group.WORLD
    whole, part = torch.zeros(1024), torch.zeros(1024 // size)
    recorder = CollectiveRecorder(axes())
    with recorder:
        dist.all_reduce(whole)
        dist.all_gather_into_tensor(whole, part)
        dist.all_gather([torch.zeros(1024 // size) for _ in range(size)], part)
        dist.reduce_scatter_tensor(part, whole)
        dist.broadcast(whole, src=0)
        dist.all_to_all_single(torch.empty(1024), whole)
        uneven = [512, *[0] * (size - 2), 512]
        received = [uneven[rank]] * size
        dist.all_to_all_single(torch.empty(sum(received)), whole, received, uneven)
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, whole, (rank + 1) % size),
                dist.P2POp(dist.irecv, torch.empty(1024), (rank - 1) % size),
            ]
        )
        for request in requests:
            request.wait()
        dist.barrier()
        for result in (
            functional.all_reduce(whole, "sum", world),
            functional.all_gather_tensor(part, 0, world),
            functional.reduce_scatter_tensor(whole, "sum", 0, world),
            functional.all_to_all_single(whole, None, None, world),
        ):
            result.sum()
    return recorder.table()


def yardstick(rounds: int) -> list[tuple[float, dict[str, float | None]]]:
    """Wall seconds and result of each of ``rounds`` yardsticks."""
    import time

    found = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        result = run_yardstick("cpu")
        found.append((time.perf_counter() - began, result))
    return found


def late_release(rounds: int) -> list[int]:
    """Tracked peak of an asynchronous all-reduce whose buffer is dropped at once, before the next one is allocated."""
    peaks = []
    for _ in range(rounds):
        with TrackedMemory() as memory:
            for _ in range(4):
                work = dist.all_reduce(torch.ones(2**18), async_op=True)
                assert work is not None
                work.wait()
                del work
        peaks.append(memory.peak)
    return peaks
