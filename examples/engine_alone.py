"""The engine alone: a sharded, tensor-parallel Llama under a loop of one's own, without ndbench's trainer.

torchrun --nproc-per-node 4 examples/engine_alone.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ndbench.config import ModelConfig
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.gradients import Gradients
from ndbench.parallel.initialize import Weights
from ndbench.parallel.mesh import build_mesh
from ndbench.parallel.parallelize import Technique, parallelize
from ndbench.parallel.plan import tensor_plan
from ndbench.training.models import build_model

LLAMA = ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=8)


def main(steps: int = 30, device: str = "cpu") -> list[float]:
    parallelism = ParallelismConfig(dp_shard_size=-1, tp_size=2).resolved(dist.get_world_size())
    mesh = build_mesh(parallelism, torch.device(device).type)
    built = build_model(LLAMA)  # its parameters are on meta: nothing is allocated before it is sharded
    plan = tensor_plan(built.model, built.blocks, tp_size=2, sequence_parallel=True, loss_parallel=False)
    weights, technique = Weights(seed=0, std=0.02, constants=built.constants), Technique()
    parallel = parallelize(built.model, built.blocks, mesh, torch.device(device), plan, weights, technique)
    model = parallel.model
    gradients = Gradients(model, parallel.partial_gradients, dist.group.WORLD, mesh.tp.get_group(), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(mesh.batch_rank)  # the ranks of a tp group read the same data
    losses = []
    for _ in range(steps):
        start = torch.randint(0, 256, (4, 1), generator=generator)
        tokens = ((start + 7 * torch.arange(65)) % 256).to(device)
        positions = torch.arange(64, device=device).expand(4, 64)  # explicit: hidden states are sharded over tp
        logits = model(input_ids=tokens[:, :-1], position_ids=positions).logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / mesh.batch_size).backward()  # gradients are summed over ranks, never averaged
        gradients.sum_over_tp()
        norm, (total,) = gradients.norm(loss.detach() / dist.get_world_size())  # one all-reduce for both
        gradients.clip(norm, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(f"start it by torchrun: torchrun --nproc-per-node 8 {__file__}")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    found = main(device=f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
    dist.destroy_process_group()
