"""FP8 linear layers of the transformer blocks, through torchao: an extra, of which nothing is imported unless asked.

Weights stay float32 parameters under their names, gathered and copied in bf16; a layer casts its operands to FP8 with
scales of their current values, inside the compiled block (Micikevicius et al., arXiv:2209.05433). So sharding, the
optimizer, gradients and checkpoints see nothing of it, and under tp each shard of a weight has scales of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ndbench.parallel.config import FLOAT8_MISSING, FLOAT8_MULTIPLE, ParallelismConfig
from ndbench.parallel.plan import TensorPlan

CAPABILITY = (8, 9)
"""The first CUDA compute capability with FP8 matrix units."""


@dataclass(frozen=True)
class Float8:
    """How linear layers compute in FP8. ``recipe`` is torchao's name of one; ``emulate`` rounds the operands to FP8 and
    multiplies them in float32: the same numbers to rounding, on a device without FP8 units."""

    recipe: str = "tensorwise"
    emulate: bool = False


def float8_for(device: torch.device, recipe: str) -> Float8:
    """What ``device`` can do. Raises ``ValueError`` for a GPU without FP8, or without torchao."""
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(FLOAT8_MISSING)
    if device.type != "cuda":
        return Float8(recipe, emulate=True)
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        name, need = torch.cuda.get_device_name(device), ".".join(map(str, CAPABILITY))
        raise ValueError(f"precision 'fp8' needs compute capability {need}, {name} has {found[0]}.{found[1]}")
    return Float8(recipe)


def convertible(model: nn.Module, block_names: list[str]) -> dict[str, nn.Linear]:
    """The plain linear layers of the blocks by name. The output head stays, and so do subclasses."""
    inside = tuple(f"{name}." for name in block_names)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and (name in block_names or name.startswith(inside))
    }


def float8_refusals(
    model: nn.Module, block_names: list[str], layout: ParallelismConfig, plan: TensorPlan | None
) -> list[str]:
    """Layers whose shard is no multiple of what FP8 matrix units take, a line for each kind of layer."""
    linears = convertible(model, block_names)
    if not linears:
        return [f"precision 'fp8': the blocks of {type(model).__name__} have no nn.Linear"]
    lines = []
    for name, module in linears.items():
        style = "" if plan is None else plan.styles.get(name, "")
        rows = -(-module.out_features // (layout.tp_size if style.startswith("colwise") else 1))
        columns = -(-module.in_features // (layout.tp_size if style.startswith("rowwise") else 1))
        if rows % FLOAT8_MULTIPLE or columns % FLOAT8_MULTIPLE:
            kind, over = re.sub(r"\.\d+(?=\.|\Z)", ".*", name), f" over tp {layout.tp_size}" if style else ""
            lines.append(f"{kind} is {rows} x {columns}{over}: precision 'fp8' needs multiples of {FLOAT8_MULTIPLE}")
    return list(dict.fromkeys(lines))


def apply_float8(model: nn.Module, block_names: list[str], how: Float8) -> int:
    """Replace the linear layers of the blocks by FP8 ones with the same parameters, in place; returns how many."""
    torchao = _torchao()
    config = replace(torchao.Float8LinearConfig.from_recipe_name(how.recipe), emulate=how.emulate)
    chosen = {id(module) for module in convertible(model, block_names).values()}
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda each, _: id(each) in chosen)
    return len(chosen)


def version() -> str:
    """torchao's, for the record."""
    from importlib.metadata import version as installed

    return installed("torchao")


def _torchao() -> Any:
    # It warns of kernels that it cannot load where there is no GPU; FP8 training uses none of them.
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import torchao.float8
    finally:
        logger.setLevel(level)
    return torchao.float8


def compile_options() -> dict[str, Any]:
    """What Inductor is told for blocks in FP8; nothing where it has nothing of the kind.

    It would join the backward of a norm, a sum over rows and one over columns, with the casts of the result in both
    layouts: on an H200 that one kernel took 1.9 ms of an 8B block's 20.
    """
    from torch._inductor import config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}
