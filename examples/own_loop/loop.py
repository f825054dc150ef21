"""A plain DDP training loop of one's own, measured and gated by ndbench: an engine is a class with four methods.

PYTHONPATH=examples/own_loop ndbench engine.name=my_loop engine.target=loop.MyLoop parallelism=ddp world_size=2
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ndbench.engines.protocol import StepResult


class MyModel(torch.nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, hidden_size)
        self.rnn = torch.nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.head = torch.nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(input_ids))[0])


class MyLoop:
    def refuse(self, cell):
        other = {axis: size for axis, size in cell.parallelism.sizes.items() if axis != "dp_replicate" and size > 1}
        return f"this loop knows data parallelism only, the cell also has {other}" if other else None

    def setup(self, cell, mesh):
        torch.manual_seed(cell.config.training.seed)
        model = MyModel(cell.config.model.vocab_size, cell.config.model.hidden_size).to(mesh.device_type)
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=cell.config.training.learning_rate)
        self.slowdown = int(os.environ.get("MY_LOOP_SLOWDOWN", "1"))  # do the work so many times: see the gate turn red

    def step(self, batch):
        for _ in range(self.slowdown - 1):
            with self.model.no_sync():
                self.model(batch.input_ids).square().mean().backward()
        self.optimizer.zero_grad()
        logits = self.model(batch.input_ids)
        loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        totals = torch.stack([loss.detach() * batch.labels.numel(), torch.tensor(float(batch.labels.numel())).to(loss)])
        dist.all_reduce(totals)
        return StepResult(loss=totals[0] / totals[1], grad_norm=norm, tokens=totals[1])

    def close(self):
        pass
