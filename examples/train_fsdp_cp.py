"""FSDP + CP: sequences longer than one device could hold, packed with documents that do not see each other.

torchrun --nproc-per-node 4 examples/train_fsdp_cp.py
"""

import os
import sys

import torch
import torch.distributed as dist

from ndbench.config import Config, DataConfig, EvaluationConfig, ModelConfig, TrainingConfig
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.mesh import build_mesh
from ndbench.training.data import build_split
from ndbench.training.trainer import Outcome, Trainer

LLAMA = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


def main(steps: int = 20, device: str = "cpu", length: int = 2048, cp: int = 2) -> Outcome:
    config = Config(
        model=ModelConfig(**LLAMA, num_attention_heads=8, num_key_value_heads=4),
        # ring attention: each rank holds 1 / cp of every sequence, keys and values go round
        parallelism=ParallelismConfig(dp_shard_size=-1, cp_size=cp, cp_method="ring"),
        training=TrainingConfig(
            steps=steps,
            global_batch_size=4,
            sequence_length=length,
            learning_rate=5e-3,
            warmup_steps=5,
            activation_checkpointing="full",
            loss_chunk_size=1024,
        ),
        data=DataConfig(name="source", max_bytes=2**20, documents="packed"),
        evaluation=EvaluationConfig(batches=2),
    )
    config.parallelism = config.parallelism.resolved(dist.get_world_size())
    mesh = build_mesh(config.parallelism, torch.device(device).type)
    train, validation = build_split(config)
    return Trainer(config, mesh, torch.device(device), train, validation).run()  # without a folder nothing is written


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(f"start it by torchrun: torchrun --nproc-per-node 8 {sys.argv[0]}")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    outcome = main(device=f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if dist.get_rank() == 0:
        print(outcome)
    dist.destroy_process_group()
