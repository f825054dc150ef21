"""How fast each attention kernel of this GPU is: ``python -m tests.micro.attention_kernels [FILE]`` (one minute).

Every kernel that serves the heads runs the same block forward and backward, in turns; the table has the median of the
rounds in milliseconds, the FLOP/s that a causal mask leaves, and the time as a fraction of the slowest's. ``FILE`` gets
the rounds as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from ndbench.parallel.kernels import block_backward, block_forward
from ndbench.parallel.sdpa import KERNELS, choose_kernel

ROUNDS = 7
CALLS = 4


@dataclass(frozen=True)
class Shape:
    """A block: rows of queries and of keys, and heads as Llama has them."""

    queries: int
    keys: int
    head_dim: int
    causal: bool
    heads: int = 32
    kv_heads: int = 8

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}, head dim {self.head_dim}{', causal' if self.causal else ''}"


SHAPES = [
    Shape(8192, 8192, 64, True),
    Shape(16384, 16384, 64, True),
    Shape(16384, 8192, 64, False),
    Shape(8192, 16384, 64, False),
    Shape(8192, 8192, 128, True),
    Shape(65536, 65536, 128, True),
    Shape(65536, 32768, 128, False),
]


def usable(shape: Shape, device: torch.device) -> list[str]:
    found = []
    for name in KERNELS:
        try:
            found.append(choose_kernel(device, torch.bfloat16, shape.heads, shape.kv_heads, shape.head_dim, name))
        except ValueError as refused:
            print(refused, file=sys.stderr)
    return [name for name in found if name is not None]


def seconds(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS / 1e3


def measure(shape: Shape, device: torch.device) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round: direction -> kernel -> rounds."""
    torch.manual_seed(0)
    scale = shape.head_dim**-0.5

    def rows(tokens: int, heads: int) -> torch.Tensor:
        drawn = torch.randn(1, tokens, heads, shape.head_dim, device=device, dtype=torch.bfloat16)
        return drawn.transpose(1, 2)

    q, dout = rows(shape.queries, shape.heads), rows(shape.queries, shape.heads)
    k, v = rows(shape.keys, shape.kv_heads), rows(shape.keys, shape.kv_heads)
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    for name in usable(shape, device):

        def forward(name: str = name) -> tuple[torch.Tensor, torch.Tensor]:
            return block_forward(q, k, v, causal=shape.causal, mask=None, scale=scale, asked=name)

        out, lse = forward()

        def backward(name: str = name, out: torch.Tensor = out, lse: torch.Tensor = lse) -> object:
            return block_backward(dout, q, k, v, out, lse, causal=shape.causal, mask=None, scale=scale, asked=name)

        backward()
        calls["forward"][name], calls["backward"][name] = forward, backward
    taken: dict[str, dict[str, list[float]]] = {way: {name: [] for name in each} for way, each in calls.items()}
    for _ in range(ROUNDS):
        for way, each in calls.items():
            for name, call in each.items():
                taken[way][name].append(seconds(call))
    return taken


def main(arguments: list[str]) -> None:
    device = torch.device("cuda", 0)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuDNN {cudnn}")
    results = []
    for shape in SHAPES:
        taken = measure(shape, device)
        results.append({"shape": asdict(shape), "seconds": taken})
        scores = shape.queries * shape.keys * (0.5 if shape.causal else 1.0)
        for way, matmuls in (("forward", 2), ("backward", 5)):
            flops = 2 * matmuls * scores * shape.head_dim * shape.heads
            each = {name: median(rounds) for name, rounds in taken[way].items()}
            slowest = max(each.values())
            said = "  ".join(
                f"{name} {time * 1e3:.2f} ms {flops / time / 1e12:.0f} TFLOP/s {time / slowest:.2f}"
                for name, time in each.items()
            )
            print(f"{shape!s:>38} {way:>8}: {said}", flush=True)
    if arguments:
        Path(arguments[0]).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
