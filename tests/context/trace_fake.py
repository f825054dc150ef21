"""Trace one step of a small Llama as rank 5 of a cp group of 64 that does not exist; prints the calls as JSON.

Run in a process of its own: the fake process group is the default group here.
"""

from __future__ import annotations

import collections
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from ndbench.parallel import attention

WORLD_SIZE, LOCAL_LENGTH, LAYERS = 64, 16, 2


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(func):
            self.count[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def trace(method: str) -> dict[str, int]:
    """Calls of the process group by name in forward and backward over packed documents."""
    with FakeTensorMode():
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=256,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=WORLD_SIZE,
            num_key_value_heads=8,
            attn_implementation=attention.ATTENTION_NAME,
        )
        model = LlamaForCausalLM(config)
        attention.configure(model, dist.group.WORLD, method)
        ids = torch.zeros(1, LOCAL_LENGTH, dtype=torch.int64)
        documents = torch.zeros(1, LOCAL_LENGTH * WORLD_SIZE, dtype=torch.int64)
        with _Calls() as calls:
            out = model(input_ids=ids, position_ids=ids, use_cache=False, document_ids=documents)
            out.logits.sum().backward()
    return dict(calls.count)


if __name__ == "__main__":
    attention.register()
    dist.init_process_group("fake", rank=5, world_size=WORLD_SIZE, store=FakeStore())
    json.dump({method: trace(method) for method in ("ring", "ulysses")}, sys.stdout)
