"""The suites and files that ship: each composes, and holds what it promises."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from ndbench.matrix.expand import expand
from ndbench.matrix.sources import GROUPS, find_sources
from ndbench.report.peers import MEMORY


def names(overrides: list[str]) -> list[str]:
    return [cell.name for cell in expand(overrides, here=False).cells]


HSDP_TP = ["ddp8", "fsdp8", "hsdp2x4", "hsdp4x2", "fsdp4_tp2", "fsdp2_tp4", "ddp4_tp2", "hsdp2x2_tp2"]


@pytest.mark.parametrize("hardware", ["cpu", "h100_x8", "h200_x8", "b200_x8", "mi300x_x8"])
def test_hsdp_tp_holds_its_eight_layouts(hardware: str) -> None:
    assert names(["suite=hsdp_tp", f"hardware={hardware}"]) == HSDP_TP


@pytest.mark.parametrize(("devices", "count"), [(4, 6), (2, 3), (1, 1)])
def test_hsdp_tp_holds_what_fits_on_fewer_devices(devices: int, count: int) -> None:
    matrix = expand(["suite=hsdp_tp", f"hardware=h100_x{devices}"], here=False)
    assert len(matrix.cells) == count
    assert all(cell.world_size == devices for cell in matrix.cells)


def test_hsdp_tp_uses_the_largest_world_it_knows_and_says_so() -> None:
    matrix = expand(["suite=hsdp_tp", "hardware=h100_x6"], here=False)
    assert {cell.world_size for cell in matrix.cells} == {4}
    assert any("4 of 6 devices" in warning for warning in matrix.warnings)


def test_hsdp_tp_on_cpu_times_at_least_eight_steps_three_times() -> None:
    for cell in expand(["suite=hsdp_tp", "hardware=cpu"]).cells:
        assert cell.config.measure.repeats == 3
        assert cell.config.training.steps - cell.config.training.steps // 2 + 1 >= 8
        assert cell.config.model.name == "llama_tiny"


def test_smoke_is_two_cells_on_real_text() -> None:
    cells = expand(["suite=smoke", "hardware=cpu"]).cells
    assert [cell.name for cell in cells] == ["ddp2", "fsdp2"]
    assert {cell.config.data.name for cell in cells} == {"source"}


def test_layouts_is_every_factorisation_and_says_why_one_cannot_run() -> None:
    matrix = expand(["suite=layouts", "hardware=cpu"])
    assert len(matrix.cells) + len(matrix.skipped) == 20
    assert [(cell.name, reason) for cell, reason in matrix.skipped] == [("tp8", "4 kv heads do not divide by tp 8")]


def test_scaling_is_one_layout_over_four_world_sizes() -> None:
    assert names(["suite=scaling", "hardware=cpu"]) == ["single", "fsdp2", "fsdp4", "fsdp8"]
    assert names(["suite=scaling", "hardware=cpu", "parallelism=ddp"]) == ["single", "ddp2", "ddp4", "ddp8"]


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_a_gpu_suite_gives_each_device_two_sequences(devices: int) -> None:
    for cell in expand(["suite=hsdp_tp", f"hardware=h100_x{devices}"], here=False).cells:
        assert cell.config.training.global_batch_size == 2 * devices


H200 = {
    ("h200_x1", 1): {"single-8k", "single-8k_x2", "single-128k"},
    ("h200_x2", 2): {"ddp2-1b_8k", "fsdp2-1b_8k", "tp2-1b_8k", "cp2-1b_32k", "fsdp2-8b_8k", "cp2-8b_128k"},
    ("h200_x8", 8): {"fsdp8-8b_8k", "hsdp2x2_tp2-1b_8k", "fsdp2_cp2_tp2-8b_128k"},
    ("h200_x8", 4): {"fsdp4-8b_8k", "ddp2_tp2-1b_8k", "cp4-8b_128k"},
}


@pytest.mark.parametrize(("suite", "devices"), H200)
def test_the_suites_for_h200_hold_their_cells_and_all_of_them_fit(suite: str, devices: int) -> None:
    matrix = expand([f"suite={suite}", f"hardware=h200_x{devices}"], here=False)
    assert {cell.name for cell in matrix.cells} >= H200[suite, devices]
    assert not matrix.skipped
    assert {cell.world_size for cell in matrix.cells} == {devices}
    for cell in matrix.cells:
        assert cell.config.training.global_batch_size == cell.parallelism.batch_size * (2 if "_x2" in cell.name else 1)
        assert cell.config.training.deterministic is False


def test_peers_are_the_same_cell_but_for_the_engine() -> None:
    matrix = expand(["suite=peers", "hardware=h200_x2"], here=False)
    cells = [*matrix.cells, *(cell for cell, _ in matrix.skipped)]
    sizes = {cell.name.removesuffix(f"-{cell.config.engine.name}"): cell.world_size for cell in cells}
    layouts = dict.fromkeys(("ddp2-1b", "fsdp2-1b", "tp2-1b", "cp2-1b", "fsdp2-8b", "fsdp2-8b_fp8", "cp2-8b_128k"), 2)
    assert sizes == {"single-one": 1, **layouts}
    for name in sizes:
        same = [cell.config for cell in cells if cell.name.startswith(f"{name}-")]
        assert {config.engine.name for config in same} == {"ndbench", *PEERS}
        # How each finds room for it is its own business: peers.MEMORY.
        plain = {"activation_checkpointing": "none", "activation_offload": False}
        work = [replace(config.training, **plain) for config in same]
        assert all(each == work[0] for each in work)
        assert all(config.model == same[0].model for config in same)
        assert set(plain) == set(MEMORY)
        ours = {config.training.activation_offload for config in same if config.engine.name == "ndbench"}
        assert ours == {name == "cp2-8b_128k"}
        assert not any(config.training.activation_offload for config in same if config.engine.name != "ndbench")
        assert same[0].training.sequence_length == {"cp2-1b": 32768, "cp2-8b_128k": 131072}.get(name, 8192)
        assert same[0].training.compile


PEERS = ("accelerate", "torchtitan")

EXTRA = {
    ("model", "custom"): ["model.target=collections:OrderedDict", "model.vocab_size=8"],
    ("engine", "command"): ["engine.command=true"],
    ("data", "text"): ["data.files=[a.txt]"],
    ("parallelism", "tp"): ["world_size=4"],
}


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group in GROUPS if group != "suite" for name in find_sources().names(group)],
)
def test_every_shipped_file_makes_a_cell(group: str, name: str) -> None:
    overrides = [f"{group}={name}", *EXTRA.get((group, name), [])]
    if group == "engine" and name in PEERS and importlib.util.find_spec(name) is None:
        with pytest.raises(ValueError, match=f"engine={name} needs the package {name}: pip install"):
            expand(overrides, here=False)
        return
    matrix = expand(overrides, here=False)
    assert len(matrix.cells) + len(matrix.skipped) == 1


@pytest.mark.parametrize(
    ("model", "billions"),
    [("llama_1b", 1.5), ("llama_8b", 8.03), ("llama_70b", 70.6), ("qwen3_8b", 8.19), ("mistral_7b", 7.24)],
)
def test_the_shapes_have_the_sizes_of_the_models_they_are_named_after(model: str, billions: float) -> None:
    from ndbench.measure.flops import parameter_count

    matrix = expand([f"model={model}", "hardware=b200_x8", "parallelism=fsdp"], here=False)
    assert parameter_count(matrix.config.model) == pytest.approx(billions * 1e9, rel=0.01)
