"""training.precision=fp8: the loss curve of bf16, layers that are FP8, the same checkpoints, and refusals with numbers.

A CPU has no FP8 units: operands are rounded to FP8 and multiplied in float32 (``emulated`` in the record).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ndbench.config import Cell, CheckpointConfig, Config, HardwareConfig
from ndbench.engines.bundled import BundledEngine
from ndbench.engines.bundled_refusals import plan_refusals
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.float8 import float8_for
from ndbench.parallel.state_index import read_index
from ndbench.training.models import build_model
from tests.parity.cases import layout, llama, training
from tests.parity.pool import pool
from tests.training import float8_tasks, trainer_tasks

installed = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")

MODEL = llama(initializer_range=0.05, vocab_size=64)
STEPS = training(optimizer="adamw", learning_rate=3e-3, sequence_length=32, global_batch_size=8)
LINEARS = 2 * 7
"""Two blocks of four projections and three MLP matrices."""

LOSS, NORM = 1e-2, 6e-2
"""E4M3 keeps 3 bits after the leading one and E5M2, for gradients, 2: an element moves by up to 6 and 12 %, a product
of independent ones by 3 and 5 % of its spread. The gradient norm sees that once, averaged over many products; the loss
only its square and what is left of its mean over a few hundred tokens. Half of these bands is seen in 30 steps."""


def worst(one: dict[str, Any], other: dict[str, Any], what: str) -> float:
    return max(abs(x / y - 1) for x, y in zip(one[what], other[what], strict=True))


@pytest.fixture(scope="module")
def single() -> tuple[dict[str, Any], dict[str, Any]]:
    """(bf16, fp8) of one process."""
    found: tuple[dict[str, Any], dict[str, Any]] = float8_tasks.in_one_process(
        float8_tasks.both, (MODEL, STEPS, layout())
    )
    return found


@installed
def test_the_loss_curve_is_that_of_bf16(single: tuple[dict[str, Any], dict[str, Any]]) -> None:
    bf16, fp8 = single
    assert len(fp8["loss"]) == 30
    assert fp8["loss"][-1] < 0.6 * fp8["loss"][0], "nothing was learnt, so nothing is compared"
    assert worst(fp8, bf16, "loss") < LOSS
    assert worst(fp8, bf16, "norm") < NORM


@installed
def test_every_linear_layer_of_the_blocks_multiplies_in_fp8(single: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Input and weight in E4M3, forward and backward, the gradient in E5M2 for both of its products; the head stays."""
    bf16, fp8 = single
    assert fp8["casts"] == {"float8_e4m3fn": 4 * LINEARS, "float8_e5m2": 2 * LINEARS}
    assert bf16["casts"] == {}
    assert fp8["kinds"].count("Float8Linear") == LINEARS
    assert fp8["kinds"].count("Linear") == 1
    assert fp8["facts"]["fp8"]["recipe"] == "tensorwise"
    assert fp8["facts"]["fp8"]["emulated"] is True
    assert "fp8" not in bf16["facts"]
    assert worst(fp8, bf16, "norm") > 1e-3, "rounding to FP8 leaves a trace"


@installed
@pytest.mark.parametrize(
    ("parallelism", "technique", "count"),
    [(layout(1, 2), "none", 30), (layout(1, 1, 1, 2), "full", 8), (layout(1, 1, 2), "selective", 8)],
    ids=["fsdp2", "tp2_full", "cp2_selective"],
)
def test_layouts_agree(
    parallelism: ParallelismConfig, technique: str, count: int, single: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Not to the bit: each rank scales the activations that it has, and under tp its shard of a weight."""
    steps = dataclasses.replace(STEPS, precision="fp8", activation_checkpointing=technique)
    fp8, other = pool(2).run(float8_tasks.curve, (MODEL, steps, parallelism), "cpu", count)
    bf16, alone = ({what: each[what][:count] for what in ("loss", "norm")} for each in single)
    assert fp8["loss"] == other["loss"]
    assert fp8["norm"] == other["norm"]
    assert fp8["loss"][0] == pytest.approx(alone["loss"][0], rel=1e-3)
    assert fp8["norm"][0] == pytest.approx(alone["norm"][0], rel=1e-2)
    assert worst(fp8, alone, "loss") < LOSS
    assert worst(fp8, bf16, "loss") < LOSS
    assert fp8["casts"]["float8_e5m2"] == 2 * LINEARS


@installed
def test_a_compiled_block_is_one_graph_with_the_same_numbers() -> None:
    """Traced and partitioned; the code generator would take half a minute here."""
    case = (llama(num_hidden_layers=1, vocab_size=64), dataclasses.replace(STEPS, precision="fp8"), layout())
    plain = float8_tasks.in_one_process(float8_tasks.curve, case, "cpu", 2)
    traced = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    with patch.object(torch, "compile", traced):
        compiled = float8_tasks.in_one_process(
            float8_tasks.curve, (case[0], dataclasses.replace(case[1], compile=True), case[2]), "cpu", 2
        )
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert compiled["norm"] == pytest.approx(plain["norm"], rel=1e-2)


@installed
@pytest.mark.parametrize(("first", "then"), [("fp8", "bf16"), ("bf16", "fp8")])
def test_a_checkpoint_goes_on_in_the_other_precision(first: str, then: str, tmp_path: Path) -> None:
    """State is float32 under the model's own names, whatever multiplied."""
    (tmp_path / "text").write_text("To be, or not to be, that is the question. " * 40)

    def config(precision: str, steps: int, **changes: Any) -> Config:
        return Config(
            model=dataclasses.replace(MODEL, vocab_size=256),
            parallelism=layout(1, 2),
            training=dataclasses.replace(STEPS, precision=precision, steps=steps),
            data=dataclasses.replace(Config().data, name="text", files=[str(tmp_path / "text")]),
            evaluation=dataclasses.replace(Config().evaluation, fraction=0.0),
            checkpoint=CheckpointConfig(),
            world_size=2,
            **changes,
        )

    folder = tmp_path / "run"
    before = pool(2).run(trainer_tasks.train, config(first, 2), str(folder))
    index = read_index(folder / "step-00000002")
    names = {name for name, _ in build_model(MODEL).model.named_parameters()}
    assert names == {name for name in index.tensors if not name.startswith("optimizer/")}
    assert {stored.dtype for name, stored in index.tensors.items() if name in names} == {torch.float32}
    after = pool(2).run(trainer_tasks.train, config(then, 4, resume="auto"), str(folder))
    assert [each["began"] for each in after] == [2, 2]
    assert after[0]["outcome"].step == 4
    assert all(weight.dtype == torch.float32 for weight in after[0]["weights"].values())
    assert after[0]["weights"].keys() == before[0]["weights"].keys() == names


def refused(parallelism: ParallelismConfig, hardware: HardwareConfig | None = None, fp8: str = "tensorwise") -> Any:
    def ask(**changes: Any) -> str | None:
        steps = dataclasses.replace(STEPS, precision="fp8", **changes)
        config = Config(model=MODEL, parallelism=parallelism, training=steps, world_size=parallelism.world_size)
        config.hardware = hardware or HardwareConfig()
        return BundledEngine(fp8=fp8).refuse(Cell("cell", "suite", config))

    return ask


@installed
def test_what_cannot_be_fp8_is_one_line_with_the_numbers() -> None:
    assert refused(layout(1, 2))() is None
    assert refused(layout(1, 1, 2))(micro_batch_size=1, sequence_length=24) == (
        "precision 'fp8' needs a multiple of 16 tokens a forward, here 1 sequences of 24 over cp 2 are 12"
    )
    assert refused(layout(), fp8="blockwise")() == (
        "engine.options.fp8 'blockwise' is not known; known: tensorwise, rowwise, rowwise_with_gw_hp"
    )
    a100 = HardwareConfig(name="a100", device="cuda", peak_flops={"tf32": 156e12, "bf16": 312e12})
    assert refused(layout(), a100)() == "precision 'fp8': hardware 'a100' has no FP8, its peaks are tf32, bf16"


def test_layers_of_odd_sizes_are_refused_by_name_before_ranks_start() -> None:
    assert plan_refusals(MODEL, layout(1, 1, 1, 2), float8=True) == []
    assert plan_refusals(llama(intermediate_size=88), layout(), float8=True) == [
        "model.layers.*.mlp.gate_proj is 88 x 64: precision 'fp8' needs multiples of 16",
        "model.layers.*.mlp.up_proj is 88 x 64: precision 'fp8' needs multiples of 16",
        "model.layers.*.mlp.down_proj is 64 x 88: precision 'fp8' needs multiples of 16",
    ]
    assert plan_refusals(MODEL, layout(1, 1, 1, 4), float8=True)[0] == (
        "model.layers.*.self_attn.k_proj is 8 x 64 over tp 4: precision 'fp8' needs multiples of 16"
    )
    (none,) = plan_refusals(llama(model_type="gpt2"), layout(), float8=True)
    assert none == "precision 'fp8': the blocks of GPT2LMHeadModel have no nn.Linear"


def test_a_missing_torchao_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = "precision 'fp8' needs the package torchao: pip install 'ndbench[fp8]'"
    assert refused(layout())() == line
    with pytest.raises(ValueError, match="pip install"):
        float8_for(torch.device("cpu"), "tensorwise")


@installed
def test_a_gpu_without_fp8_is_refused_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match=r"precision 'fp8' needs compute capability 8\.9, Some GPU has 8\.0"):
        float8_for(gpu, "tensorwise")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert not float8_for(gpu, "tensorwise").emulate


def test_nothing_of_torchao_is_imported_unless_asked() -> None:
    """By transformers neither, which imports it wherever it is installed."""
    code = (
        "import sys, importlib.util\n"
        "from ndbench.engines.bundled_refusals import plan_refusals\n"
        "from tests.parity.cases import layout, llama\n"
        "import ndbench.parallel.parallelize\n"
        "assert plan_refusals(llama(), layout(1, 1, 1, 2), float8=True) == []\n"
        "assert 'torchao' not in sys.modules, 'imported'\n"
        "print(importlib.util.find_spec('torchao') is not None)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.strip() == str(importlib.util.find_spec("torchao") is not None), "hidden for good"
