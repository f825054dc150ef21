"""The formulas that ``docs/parallelism.md`` prints are the closed forms that recorded steps are held to."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ndbench.parallel.config import AXES, CHECKPOINTING_MODES, ParallelismConfig
from ndbench.parallel.context import kv_replication
from ndbench.parallel.mesh import VIEWS
from ndbench.parallel.traffic import (
    LlamaShape,
    StepShape,
    block_shard,
    exchanges_rows,
    group_label,
    root_shard,
    step_traffic,
)
from tests.parity.cases import all_layouts, layout

PAGE = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
MODEL = LlamaShape(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=8, head_dim=8,
)  # fmt: skip
OPTIONS = [
    layout(1, 4, reshard_after_forward=False),
    layout(1, 4, kept_blocks=2),
    layout(1, 2, 1, 2, sequence_parallel=False, loss_parallel=False),
    layout(1, 2, 2, 2, cp_method="ulysses"),
    layout(1, 1, 8, cp_method="ulysses"),
]
STEPS = [
    StepShape(16, 64),
    StepShape(16, 64, 1, 2, "full"),
    StepShape(16, 64, 2, 4, "selective"),
    StepShape(8, 16),  # of the embedding fewer rows than it has
    StepShape(16, 64, 2, 4, "attention"),
]


def rows() -> list[list[str]]:
    table = PAGE[PAGE.index("| operation, axis | when |") :]
    lines = table[: table.index("\n\n")].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def value(formula: str, names: dict[str, Any]) -> float:
    """A printed formula as a number; ``⌈a / b⌉`` rounds up."""
    text = re.sub(r"⌈(.*?)⌉", r"ceil(\1)", formula)
    for sign, word in (("·", "*"), ("\u2212", "-"), ("kv\u2032", "kv_repeated"), (" > ", ">"), (" = ", "==")):
        text = text.replace(sign, word)
    assert re.fullmatch(r"[\w\s*/+()>=,.-]+", text), f"not a formula: {formula}"
    return float(eval(text, {"__builtins__": {}, "ceil": math.ceil, "max": max}, names))


def symbols(at: ParallelismConfig, step: StepShape) -> dict[str, Any]:
    F, T, cp = at.fsdp_size, at.tp_size, at.cp_size
    each = step.global_batch_size // at.batch_size
    b = step.micro_batch_size or each
    kv = MODEL.num_key_value_heads // T
    return {
        "F": F, "T": T, "cp": cp, "R": at.dp_replicate_size, "n": at.dp_replicate_size * F, "N": at.world_size,
        "M": each // b, "L": MODEL.num_hidden_layers, "H": MODEL.hidden_size, "V": MODEL.vocab_size, "b": b,
        "e": step.element_size, "g": max(step.element_size, 4), "s": step.sequence_length // cp,
        "t": b * step.sequence_length // cp, "d": MODEL.head_dim, "h": MODEL.num_attention_heads // T, "kv": kv,
        "tables": 1 if exchanges_rows(MODEL, at, step) else 2, "kept": at.kept_blocks,
        "kv_repeated": kv * kv_replication(kv, cp), "block": block_shard(MODEL, at),
        "table": math.ceil(math.ceil(MODEL.vocab_size / T) / F) * MODEL.hidden_size,
        "norm": math.ceil(MODEL.hidden_size / F),
    }  # fmt: skip


def applies(when: str, at: ParallelismConfig, names: dict[str, Any]) -> bool:
    facts = {
        "sequence parallel": at.sequence_parallel,
        "no sequence parallel": not at.sequence_parallel,
        "loss parallel": at.loss_parallel,
        "no loss parallel": not at.loss_parallel,
        "ring": at.cp_method == "ring",
        "Ulysses": at.cp_method == "ulysses",
        "rows exchanged": names["tables"] == 1,
    }
    return all(facts[each] if each in facts else bool(value(each, names)) for each in when.split(", "))


def calls(cell: str, at: ParallelismConfig, step: StepShape, names: dict[str, Any]) -> float:
    plain, *others = cell.split("; ")
    for other in others:
        techniques, formula = other.split(": ")
        if techniques == "not resharding":
            plain = formula if not at.reshard_after_forward else plain
            continue
        modes = techniques.split(", ")
        assert set(modes) <= set(CHECKPOINTING_MODES), techniques
        if step.activation_checkpointing in modes:
            plain = formula
    return value(plain, names)


def printed(at: ParallelismConfig, step: StepShape) -> dict[tuple[str, str], tuple[float, float]]:
    names = symbols(at, step)
    spans = {"fsdp": VIEWS["fsdp"], "loss": VIEWS["loss"], "world": AXES}
    found: dict[tuple[str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for what, when, times, size in rows():
        if applies(when, at, names):
            op, axis = what.split(", ")
            key = (op, group_label(at, spans[axis]) if axis in spans else axis)
            count = calls(times, at, step, names)
            found[key] = (found[key][0] + count, found[key][1] + count * value(size, names))
    return {key: each for key, each in found.items() if each[0]}


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("at", [*all_layouts(), *OPTIONS], ids=str)
def test_the_table_of_traffic_is_the_closed_form(at: ParallelismConfig, step: StepShape) -> None:
    if at.batch_size * (step.micro_batch_size or 1) > step.global_batch_size:
        pytest.skip("the batch does not divide")
    form = {key: each for key, each in step_traffic(MODEL, at, step).items() if key[0] != "recv"}
    table = printed(at, step)
    assert set(table) == set(form)
    for key, (count, size) in form.items():
        assert table[key] == (count, pytest.approx(size, rel=1e-9)), key


@pytest.mark.parametrize("at", all_layouts(), ids=str)
def test_the_formula_of_the_root_is_the_one_in_use(at: ParallelismConfig) -> None:
    line = next(line for line in PAGE.splitlines() if line.strip().startswith("root "))
    table, norm = line.split("=")[1].replace("(twice unless tied)", "|").split("|")
    table = table.replace("⌈⌈V / T⌉ / F⌉", "⌈V_T / F⌉")
    names = symbols(at, STEPS[0])
    names["V_T"] = math.ceil(MODEL.vocab_size / at.tp_size)
    assert 2 * value(table, names) + value(norm.replace("+", "", 1), names) == root_shard(MODEL, at)
