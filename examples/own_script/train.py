"""A training script of one's own that knows nothing of ndbench but prints one JSON line a step.

ndbench engine=command engine.command='python examples/own_script/train.py' world_size=2
"""

import json
import os

import torch
import torch.distributed as dist

STEPS = int(os.environ.get("NDBENCH_STEPS", "12"))
SLOWDOWN = int(os.environ.get("MY_SCRIPT_SLOWDOWN", "1"))  # do the work so many times, see the gate turn red

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).to(device)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())

torch.manual_seed(dist.get_rank() + 1)
for step in range(STEPS):
    x = torch.randn(512, 256, device=device)
    for _ in range(SLOWDOWN - 1):
        with model.no_sync():
            model(x).square().mean().backward()
    optimizer.zero_grad()
    loss = (model(x) - x.roll(1, dims=-1)).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    print(json.dumps({"step": step, "loss": mean.item() / dist.get_world_size(), "grad_norm": norm.item()}), flush=True)

del (
    model,
    loss,
)  # what still holds the group would keep its threads running into the interpreter's end, where they abort
dist.destroy_process_group()
