"""A captured step is the step: the same losses, norms and weights to the bit, whatever changes from step to step.

On a CPU a tape stands for the CUDA graph; what the graph itself does is asked in ``test_graphs_cuda.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from ndbench.config import Cell, Config, HardwareConfig, ParallelismConfig, TrainingConfig, cell_id
from ndbench.engines import bundled
from ndbench.engines.bundled import BundledEngine
from ndbench.engines.protocol import Batch, StepResult
from ndbench.measure.memory import STEADY_PEAK_FROM
from ndbench.parallel.mesh import Mesh, build_mesh
from ndbench.parallel.state import Checkpoints
from ndbench.training import cuda_graph, generate, graphs
from ndbench.training.graph_rules import graph_refusals
from ndbench.training.graphs import MAX_SHAPES, WARM_UP_STEPS, GraphedStep
from ndbench.training.optimizer import ShardOptimizer
from tests.parity.cases import batch, case, layout, llama, training
from tests.training.tape import Tape

STEPS = 8
CPU = torch.device("cpu")
MOVING = {"schedule": "cosine", "warmup_steps": 2, "steps": STEPS, "weight_decay": 0.3, "learning_rate": 0.02}
"""The rate differs in every step, by much, and so does the decay."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield build_mesh(layout(), "cpu")
    dist.destroy_process_group()


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    """Engines made from now on capture on this tape."""
    made = Tape()
    monkeypatch.setattr(bundled, "graph_refusals", lambda *_: [])
    monkeypatch.setattr(cuda_graph, "CudaRecorder", lambda _device: made)
    # What is compiled runs as it was written: a tape notes operators.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return made


def engine(mesh: Mesh, graphs: bool | None, **changes: Any) -> BundledEngine:
    made = BundledEngine(weight_jitter=0.1)
    fields = {"optimizer": "adamw", "compile": True, "cuda_graphs": graphs, **MOVING, **changes}
    made.build(llama(), training(**fields), mesh, CPU)
    return made


def batches(count: int = STEPS, **changes: Any) -> list[Batch]:
    return [batch(case(layout(), **changes), step, 0, 1) for step in range(count)]


def numbers(results: list[StepResult]) -> list[tuple[float, float, int]]:
    """Read after all steps: a later one may not have changed the results of an earlier one."""
    return [(float(each.loss), float(each.grad_norm or 0), int(each.tokens or 0)) for each in results]


def train(made: BundledEngine, data: list[Batch]) -> list[tuple[float, float, int]]:
    return numbers([made.step(each) for each in data])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compile": False, "optimizer": "sgd", "momentum": 0.9},
        {"micro_batch_size": 2, "loss_chunk_size": 7, "max_grad_value": 0.01},
        {"precision": "bf16", "activation_checkpointing": "selective"},
    ],
    ids=["adamw", "sgd", "micro_batches", "bf16"],
)
def test_a_replayed_step_is_the_step_to_the_bit(changes: dict[str, Any], mesh: Mesh, tape: Tape) -> None:
    plain, graphed = engine(mesh, False, **changes), engine(mesh, True, **changes)
    assert train(graphed, batches()) == train(plain, batches())
    for one, other in zip(graphed.training_state()[2], plain.training_state()[2], strict=True):
        assert torch.equal(one, other)
    assert (tape.warm_ups, tape.captures, tape.replays) == (WARM_UP_STEPS, 1, STEPS - WARM_UP_STEPS)
    assert graphed.info()["cuda_graph"] == {"captures": 1, "replays": STEPS - WARM_UP_STEPS, "reason": None}
    assert "cuda_graph" not in plain.info()


@pytest.mark.parametrize("evaluated", [(3, 5), (1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize(
    "changes", [{"compile": True}, {"compile": False, "optimizer": "sgd"}], ids=["writes the copies", "does not"]
)
def test_what_is_evaluated_between_replays_are_the_weights_of_now(
    changes: dict[str, Any], evaluated: tuple[int, ...], mesh: Mesh, tape: Tape
) -> None:
    """And the next replays compute with those of then, though no counter has seen the update."""
    found = []
    for with_graph in (False, True):
        made = engine(mesh, with_graph, precision="bf16", **changes)
        tape.uncounted = list(made.training_state()[2]) if with_graph else []
        losses = []
        for index, each in enumerate(batches()):
            losses.append(made.step(each).loss)
            if index + 1 in evaluated:
                ((labels, inputs),) = made.stepper.micro_batches(each)
                with torch.no_grad():
                    losses.append(made.stepper.loss_sum(labels=labels, **inputs))
        found.append([float(loss) for loss in losses])
    assert found[0] == found[1]


def test_torchs_own_adamw_reads_the_rate_from_the_device(mesh: Mesh, tape: Tape) -> None:
    """In float32, as its kernels have it: the host's float64 is rounded."""
    plain, graphed = engine(mesh, False, compile=False), engine(mesh, True, compile=False)
    ours, theirs = train(graphed, batches()), train(plain, batches())
    assert [each[0] for each in ours] == pytest.approx([each[0] for each in theirs], rel=1e-5)
    assert tape.replays == STEPS - WARM_UP_STEPS


def test_documents_are_data(mesh: Mesh, tape: Tape) -> None:
    data = batches(documents=True)
    assert train(engine(mesh, True), data) == train(engine(mesh, False), data)
    assert tape.captures == 1


def frozen_rate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardOptimizer, "_reading_device_rates", lambda self: torch.no_grad())


def frozen_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(graphs, "_tensors", lambda batch: [])


def shared_results(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(graphs, "_copied", lambda result: result)


def rate_not_advanced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardOptimizer, "advance", lambda self: None)


@pytest.mark.parametrize("fault", [frozen_rate, frozen_batch, shared_results, rate_not_advanced])
def test_a_planted_fault_shows(
    fault: Callable[[pytest.MonkeyPatch], None], mesh: Mesh, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = train(engine(mesh, False), batches())
    graphed = engine(mesh, True)
    fault(monkeypatch)
    assert train(graphed, batches()) != want


@pytest.mark.parametrize("noticed", [True, False])
def test_a_loaded_checkpoint_is_noticed(
    noticed: bool, mesh: Mesh, tape: Tape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's state lies elsewhere then; a graph would go on with the old one."""
    data, found = batches(), []
    if not noticed:
        monkeypatch.setattr(graphs._Fixed, "holds", lambda self: True)
    for graphed in (False, True):
        made = engine(mesh, graphed)
        model, optimizer, parameters = made.training_state()
        for each in data[:5]:
            made.step(each)
        checkpoints = Checkpoints(tmp_path / str(graphed), mesh)
        checkpoints.save(5, model, optimizer, parameters, {})
        train(made, data[5:])
        newest = checkpoints.newest()
        assert newest is not None
        checkpoints.load(newest, model, optimizer, parameters)
        made.stepper.optimizer.taken = 5
        found.append(train(made, data[5:]))
    assert (found[0] == found[1]) is noticed
    assert tape.captures == 1 + noticed


def test_each_shape_has_a_graph_and_there_are_not_too_many(mesh: Mesh, tape: Tape) -> None:
    def cut(each: Batch, length: int) -> Batch:
        return Batch(*(x[:, :length].contiguous() for x in (each.input_ids, each.labels, each.position_ids)))

    lengths = [32 - 4 * index for index in range(MAX_SHAPES + 1)]
    data = [cut(each, length) for length in lengths for each in batches(WARM_UP_STEPS + 2)]
    data += [cut(each, lengths[0]) for each in batches(2)]
    plain, graphed = engine(mesh, False, steps=100), engine(mesh, True, steps=100)
    assert train(graphed, data) == train(plain, data)
    assert tape.captures == MAX_SHAPES
    assert tape.replays == 2 * MAX_SHAPES + 2


def test_who_looks_at_operations_sees_all_of_them(mesh: Mesh, tape: Tape) -> None:
    """The instrumented step of a measurement; the steps after it are captured anew."""
    plain, graphed, counted = engine(mesh, False), engine(mesh, True), []
    for made in (plain, graphed):
        train(made, batches(5))
        with FlopCounterMode(display=False) as flops:
            made.step(batches()[5])
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] > 0
    assert tape.released == 1
    assert train(graphed, batches()[6:]) == train(plain, batches()[6:])
    assert tape.captures == 2


def fails_in(patch: pytest.MonkeyPatch, made: BundledEngine) -> None:
    """The host reads a number in each step, as routing between experts does."""
    backward = made.stepper.backward
    patch.setattr(made.stepper, "backward", lambda batch: (backward(batch), float(batch.labels.sum()))[0])


def test_a_capture_that_fails_is_said_and_costs_no_step(
    mesh: Mesh, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed = engine(mesh, None)
    fails_in(monkeypatch, graphed)
    assert train(graphed, batches()) == train(engine(mesh, False), batches())
    why = "RuntimeError: the host reads a number of the device during a capture"
    assert graphed.info()["cuda_graph"] == {"captures": 0, "replays": 0, "reason": why}


def test_a_capture_that_was_asked_for_and_fails_is_an_error(
    mesh: Mesh, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed = engine(mesh, True)
    fails_in(monkeypatch, graphed)
    with pytest.raises(
        RuntimeError, match=r"^training\.cuda_graphs=true: the step cannot be captured: RuntimeError: the"
    ):
        train(graphed, batches())


def test_what_shows_in_warm_up_is_not_captured(mesh: Mesh, tape: Tape) -> None:
    tape.problem = "the host waits for the device in model.py:7"
    graphed = engine(mesh, None)
    assert train(graphed, batches()) == train(engine(mesh, False), batches())
    assert graphed.info()["cuda_graph"]["reason"] == tape.problem
    assert tape.captures == 0


def test_another_ranks_failure_is_this_ones_too(mesh: Mesh, tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_on_any_rank", lambda problem, device: True)
    graphed = engine(mesh, None)
    train(graphed, batches())
    assert graphed.info()["cuda_graph"]["reason"] == "another rank cannot be captured"


def test_out_of_memory_stays_what_it_is(mesh: Mesh, tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_work: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(tape, "capture", full)
    with pytest.raises(torch.OutOfMemoryError):
        train(engine(mesh, True), batches())


def test_a_closed_engine_holds_no_graph(mesh: Mesh, tape: Tape) -> None:
    graphed = engine(mesh, True)
    train(graphed, batches(5))
    graphed.close()
    assert tape.released == 1


def test_the_peak_of_memory_is_taken_over_the_capture() -> None:
    """A replay asks the allocator for nothing: what a graph needs shows while it is captured."""
    assert STEADY_PEAK_FROM <= WARM_UP_STEPS


@pytest.mark.parametrize(
    ("fields", "offload", "device", "why"),
    [
        ({}, False, "cpu", "cuda_graphs need a CUDA device, this is cpu"),
        ({}, True, "cuda", "cuda_graphs: under cpu_offload the host waits for the gradients in each step"),
        (
            {"optimizer": "torch.optim.Adamax"},
            False,
            "cuda",
            "cuda_graphs: optimizer 'torch.optim.Adamax' has its learning rate on the host; adamw, sgd do not",
        ),
        ({}, False, "cuda", None),
    ],
)
def test_what_the_configuration_rules_out_is_refused(
    fields: dict[str, Any], offload: bool, device: str, why: str | None
) -> None:
    steps = TrainingConfig(cuda_graphs=True, **fields)
    parallelism = ParallelismConfig(cpu_offload=offload)
    config = Config(llama(), HardwareConfig(device=device), parallelism, steps, world_size=1)
    refused = BundledEngine().refuse(Cell("cell", "suite", config))
    assert refused == why
    asked_for_nothing = dataclasses.replace(config, training=dataclasses.replace(steps, cuda_graphs=None))
    assert BundledEngine().refuse(Cell("cell", "suite", asked_for_nothing)) is None
    assert graph_refusals(steps, parallelism, device) == ([] if why is None else [why])


def test_where_it_does_not_hold_it_is_left_away_with_the_reason(mesh: Mesh) -> None:
    made = engine(mesh, None, compile=False)
    train(made, batches(1))
    assert made.info()["cuda_graph"]["reason"] == "cuda_graphs need a CUDA device, this is cpu"
    with pytest.raises(ValueError, match="cuda_graphs need a CUDA device, this is cpu"):
        engine(mesh, True, compile=False)


def test_a_model_trained_with_graphs_is_sampled_from_on_a_cpu(mesh: Mesh, tmp_path: Path) -> None:
    model, _, parameters = engine(mesh, False, compile=False).training_state()
    checkpoints = Checkpoints(tmp_path, mesh)
    checkpoints.save(1, model, None, parameters, {})
    newest = checkpoints.newest()
    assert newest is not None
    loaded = generate._load(newest, Config(llama(), training=training(cuda_graphs=True)), CPU)
    for one, other in zip(loaded.parameters(), parameters, strict=True):
        assert torch.equal(one, other)


def test_cells_of_before_keep_their_identity() -> None:
    cell = Cell("cell", "suite", Config(world_size=1)).to_dict()
    without = {**cell, "training": {key: value for key, value in cell["training"].items() if key != "cuda_graphs"}}
    asked = {**cell, "training": {**cell["training"], "cuda_graphs": True}}
    assert cell_id(cell) == cell_id(without) != cell_id(asked)


def test_a_step_is_told_from_its_host_part() -> None:
    """The recorder gets the device's part alone: what it holds may not count steps."""
    calls: list[str] = []
    optimizer = SimpleNamespace(advance=lambda: calls.append("advance"), state_tensors=lambda: [], parameters=[])
    optimizer.optimizer = SimpleNamespace(param_groups=[])
    optimizer.prepare_capture = lambda: calls.append("cast")
    optimizer.prepare_replay = lambda: calls.append("prepare")
    optimizer.replayed = lambda: calls.append("replayed")
    step: Any = SimpleNamespace(
        optimizer=optimizer,
        gradients=SimpleNamespace(device=None),
        model=SimpleNamespace(training=True),
        on_device=lambda batch: calls.append("device") or StepResult(1.0, 1.0, 1),
    )
    recorder = Tape()
    graphed = GraphedStep(step, recorder, required=True)
    graphed._warm = {graphs._shape(batches(1)[0]): WARM_UP_STEPS}
    graphed(batches(1)[0])
    assert calls == ["cast", "device", "advance", "prepare", "replayed"]


@pytest.mark.parametrize("compiled", [True, False], ids=["one_pass", "torchs"])
def test_a_replay_computes_with_the_parameters_as_they_are(compiled: bool, mesh: Mesh, tape: Tape) -> None:
    """In bf16 a step computes with copies: a replay must see that someone else has changed the parameters."""
    losses = []
    for graphs_on in (False, True):
        made = engine(mesh, graphs_on, precision="bf16", compile=compiled)
        train(made, batches(6))
        with torch.no_grad():
            for parameter in made.training_state()[2]:
                parameter.mul_(1.5)
        losses.append(float(made.step(batches()[6]).loss))
    assert tape.replays == 6 + 1 - WARM_UP_STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
