"""HSDP + TP: replicas of sharded, tensor-parallel models, with evaluation, a log and checkpoints.

torchrun --nproc-per-node 8 examples/train_hsdp_tp.py
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ndbench.config import CheckpointConfig, Config, DataConfig, EvaluationConfig, ModelConfig, TrainingConfig
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.mesh import build_mesh
from ndbench.training.data import build_split
from ndbench.training.trainer import Outcome, Trainer

LLAMA = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


def main(folder: Path, steps: int = 200, device: str = "cpu", replicas: int = 2, tp: int = 2) -> Outcome:
    config = Config(
        model=ModelConfig(**LLAMA, num_attention_heads=8, num_key_value_heads=4),
        parallelism=ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=-1, tp_size=tp),
        training=TrainingConfig(
            steps=steps,
            global_batch_size=16,
            micro_batch_size=2,
            learning_rate=5e-3,
            schedule="cosine",
            warmup_steps=10,
        ),
        data=DataConfig(name="source", max_bytes=2**20),
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(every=50),
        resume="auto",  # start it again after whatever ended it
    )
    config.parallelism = config.parallelism.resolved(dist.get_world_size())
    mesh = build_mesh(config.parallelism, torch.device(device).type)
    train, validation = build_split(config)
    return Trainer(config, mesh, torch.device(device), train, validation, folder=folder).run()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(f"start it by torchrun: torchrun --nproc-per-node 8 {sys.argv[0]}")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    outcome = main(Path("runs/hsdp_tp"), device=f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if dist.get_rank() == 0:
        print(outcome)
    dist.destroy_process_group()
