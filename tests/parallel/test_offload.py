"""Activations that wait on the host: the same numbers to the bit, nothing left on the device, nothing left behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ndbench.config import Cell, Config, HardwareConfig, TrainingConfig, cell_id
from ndbench.engines.bundled import BundledEngine
from ndbench.parallel import offload as module
from ndbench.parallel.checkpointing import apply_checkpointing
from ndbench.parallel.config import ParallelismConfig
from ndbench.parallel.offload import Offload
from ndbench.training.graph_rules import graph_refusals
from tests.parallel import offload_tasks
from tests.parallel.offload_tasks import watched
from tests.parity.cases import case, layout, llama, training
from tests.parity.pool import pool

LAYERS, STEPS, MICRO = 4, 3, 2
LAYOUTS = [layout(), layout(1, 2), layout(1, 1, 1, 2), layout(1, 1, 2), layout(1, 1, 2, cp_method="ulysses")]
CPU = torch.device("cpu")


def kept(parallelism: ParallelismConfig, mode: str, sequences: int) -> list[str]:
    """Shapes that a block keeps: its input; attention's output and log-sum-exp."""
    cp, tp, ring = parallelism.cp_size, parallelism.tp_size, parallelism.cp_method == "ring"
    tokens, heads = 32 // cp, 8 // tp
    if not ring:
        heads, seen = heads // cp, 32
    else:
        seen = tokens
    attention = [f"[{sequences}, {heads}, {seen}, 8]", f"[{sequences}, {heads}, {seen}]"]
    return [f"[{sequences}, {tokens // tp}, 64]", *(attention if mode == "attention" else [])]


@pytest.mark.parametrize("mode", ["full", "attention"])
@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("parallelism", LAYOUTS, ids=lambda each: f"{each.layout}_{each.cp_method}")
def test_training_is_the_same_to_the_bit(parallelism: ParallelismConfig, backend: str | None, mode: str) -> None:
    sequences = 8 // parallelism.batch_size // MICRO
    steps = training(activation_checkpointing=mode, micro_batch_size=sequences, compile=backend is not None)
    here = case(parallelism, llama(num_hidden_layers=LAYERS), training=steps, steps=STEPS)
    for found in pool(parallelism.world_size).run(offload_tasks.both, here, backend):
        assert found["differing"] == []
        # All blocks but the last one, in each micro-batch of the steps and of one more backward.
        times = (LAYERS - 1) * MICRO * (STEPS + 1)
        expected = dict.fromkeys(kept(parallelism, mode, sequences), times)
        assert expected.items() <= found["sent"].items()
        traced = backend is not None and parallelism.cp_method == "ulysses"
        if not traced or torch.__version__ >= "2.13":  # before, compiled graphs keep what Ulysses exchanged
            assert found["sent"] == expected
            assert found["hosts"] == (LAYERS - 1) * len(expected), "a step has as much host memory as the one before"
        assert (found["ahead"], found["late"]) == (sum(found["sent"].values()), 0)
        assert found["left"] == 0, "what was sent is still on the device when forward is over"
        assert found["there"] <= found["sent"].total() // times, "what came back stays longer than its block"
        assert found["moving"] <= found["sent"].total() // times


class Block(nn.Module):
    """Takes a mask and a table that all blocks share."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        if table is not None:
            x = x + table
        return x + self.two(torch.tanh(self.one(x)) * mask)


class Stack:
    """Four recomputed blocks whose inputs wait on the host."""

    def __init__(self, blocks: int = 4) -> None:
        torch.manual_seed(0)
        self.blocks = [Block() for _ in range(blocks)]
        self.modules: list[nn.Module] = [*self.blocks]
        self.x = torch.randn(5, 8)
        self.mask, self.table = torch.ones(5, 8), torch.randn(5, 8)
        self.embedding = nn.Linear(8, 8)

    def offloaded(self) -> Offload:
        made = Offload(len(self.blocks), CPU)
        apply_checkpointing(self.modules, "full", made.pack, made.unpack)
        made.wrap(self.modules)
        return made

    def forward(self) -> torch.Tensor:
        x: torch.Tensor = self.embedding(self.x)
        for block in self.blocks:
            x = block(x, self.mask, table=self.table)
        return x.square().sum()

    def gradients(self, backward: Callable[[torch.Tensor], None] = torch.Tensor.backward) -> list[torch.Tensor]:
        parameters = [each for block in (self.embedding, *self.blocks) for each in block.parameters()]
        for each in parameters:
            each.grad = None
        backward(self.forward())
        return [each.grad for each in parameters if each.grad is not None]


def hosts(offload: Offload) -> set[int]:
    """Where the host memory is that waits to be used again."""
    return {each.data_ptr() for free in offload._free.values() for each in free}


@pytest.fixture
def expected() -> list[torch.Tensor]:
    return Stack().gradients()


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) == 18 and all(map(torch.equal, one, other))


def test_only_what_is_a_blocks_own_leaves(expected: list[torch.Tensor]) -> None:
    """Not the mask, nor the table, nor a weight, nor indices; and nothing of the last block."""
    stack = Stack()
    stack.offloaded()
    with watched() as seen:
        assert equal(stack.gradients(), expected)
    assert seen["sent"] == {"[5, 8]": 3}
    assert (seen["ahead"], seen["late"], seen["left"]) == (3, 0, 0)


@pytest.mark.parametrize(
    ("made", "travels"),
    [
        (lambda x: x * 2, True),
        (lambda x: (x * 2).t(), True),
        (lambda x: (x * 2).view(4, 10), True),
        (lambda x: (x * 2)[1:], False),
        (lambda x: (x * 2)[:, 1:], False),
        (lambda x: (x * 2).expand(3, 5, 8), False),
        (lambda x: (x * 2).long(), False),
        (lambda x: x[:0] * 2, False),
        (lambda x: nn.Parameter(x * 2), False),
    ],
)
def test_what_leaves_is_float_and_all_of_its_memory(made: Callable[[Any], torch.Tensor], travels: bool) -> None:
    tensor = made(torch.randn(5, 8, requires_grad=True))
    offload = Offload(2, CPU)
    with offload._passing(0, set()):
        packed = offload.pack(tensor)
    assert (packed.host is not None) == travels
    assert packed.tensor is None or packed.tensor.grad_fn is None, "what it was made of stays, too"
    back = offload.unpack(packed)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
    assert (back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()) == travels
    assert (packed.tensor is None) == travels, "what came back is its user's alone"


def test_small_tensors_stay_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = Offload(2, CPU)
    monkeypatch.setattr(offload, "_least", module.LEAST_BYTES)
    with offload._passing(0, set()):
        assert offload.pack(torch.zeros(2**18 - 1)).host is None
        assert offload.pack(torch.zeros(2**18)).host is not None


def test_host_memory_is_made_once(expected: list[torch.Tensor]) -> None:
    stack = Stack()
    offload = stack.offloaded()
    assert equal(stack.gradients(), expected)
    first = hosts(offload)
    assert len(first) == 3
    for _ in range(3):
        assert equal(stack.gradients(), expected)
        assert hosts(offload) == first


def test_evaluation_moves_nothing(expected: list[torch.Tensor]) -> None:
    stack = Stack()
    offload = stack.offloaded()
    with watched() as seen, torch.no_grad():
        stack.forward()
    assert not seen["sent"]
    assert not offload._moving
    assert equal(stack.gradients(), expected)


def test_a_graph_that_is_dropped_gives_everything_back() -> None:
    stack = Stack()
    offload = stack.offloaded()
    loss = stack.forward()
    assert not hosts(offload)
    del loss
    assert len(hosts(offload)) == 3
    assert not offload._moving


class Broken(Exception):
    pass


@pytest.mark.parametrize("again", [False, True], ids=["forward", "recomputation"])
@pytest.mark.parametrize("where", range(4))
def test_a_step_that_fails_leaves_nothing_to_the_next(where: int, again: bool, expected: list[torch.Tensor]) -> None:
    stack = Stack()
    offload = stack.offloaded()
    calls = 0

    def fails(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1 + again:
            raise Broken

    hook = stack.blocks[where].one.register_forward_hook(fails)
    with pytest.raises(Broken):
        stack.gradients()
    hook.remove()
    assert offload._now is None

    def nothing_else_moves(*_: Any) -> None:
        assert all(passage is offload._now for _, _, passage in offload._moving)
        assert offload._now is None or offload._now.before is None

    hook = stack.blocks[0].one.register_forward_pre_hook(nothing_else_moves)
    stack.forward()
    hook.remove()
    for _ in range(2):
        assert equal(stack.gradients(), expected)
        assert len(hosts(offload)) == 3


def test_backward_may_run_in_a_thread_of_its_own(expected: list[torch.Tensor]) -> None:
    stack = Stack()
    stack.offloaded()

    def backward(loss: torch.Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert equal(stack.gradients(backward), expected)


def test_backward_may_run_twice(expected: list[torch.Tensor]) -> None:
    stack = Stack()
    offload = stack.offloaded()

    def backward(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    assert equal(stack.gradients(backward), [2 * each for each in expected])
    assert len(hosts(offload)) == 3


def test_blocks_out_of_order_are_fetched_when_they_are_asked_for() -> None:
    """Two forwards before the first backward, the later one's last: no block is ahead of what it does not know."""
    stack = Stack()
    once = stack.gradients()
    stack.offloaded()

    def backward(loss: torch.Tensor) -> None:
        other = stack.forward()
        loss.backward()
        other.backward()

    assert equal(stack.gradients(backward), [2 * each for each in once])


def test_one_block_has_nothing_to_send() -> None:
    stack = Stack(blocks=1)
    stack.offloaded()
    with watched() as seen:
        stack.gradients()
    assert not seen["sent"]


def test_inputs_are_gone_a_block_after_they_left() -> None:
    stack = Stack()
    stack.offloaded()
    inputs: list[weakref.ref[Any]] = []
    alive: list[list[int]] = []

    def watch(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        alive.append([index for index, each in enumerate(inputs) if each() is not None])
        inputs.append(weakref.ref(args[0].untyped_storage()))

    for block in stack.blocks:
        block.register_forward_pre_hook(watch)
    loss = stack.forward()
    assert alive == [[], [0], [1], [2]]
    assert [index for index, each in enumerate(inputs) if each() is not None] == [3]
    loss.backward()


@pytest.mark.parametrize(
    ("mode", "refused"), [("none", True), ("selective", True), ("full", False), ("attention", False)]
)
def test_it_needs_blocks_that_compute_themselves_again(mode: str, refused: bool) -> None:
    steps = TrainingConfig(activation_checkpointing=mode, activation_offload=True)
    cell = Cell("cell", "suite", Config(llama(), HardwareConfig(), ParallelismConfig(), steps, world_size=1))
    why = f"activation_offload needs activation_checkpointing full or attention, here it is '{mode}'"
    assert BundledEngine().refuse(cell) == (why if mode in ("none", "selective") else None)


def test_no_graph_is_captured_around_it() -> None:
    steps = TrainingConfig(activation_checkpointing="full", activation_offload=True)
    assert graph_refusals(steps, ParallelismConfig(), "cuda") == [
        "cuda_graphs: under activation_offload blocks leave for host memory and come back"
    ]


def test_cells_of_before_keep_their_identity() -> None:
    cell = Cell("cell", "suite", Config(llama(), world_size=1)).to_dict()
    before = {key: value for key, value in cell["training"].items() if key != "activation_offload"}
    assert cell_id(cell) == cell_id({**cell, "training": before})
    assert cell_id(cell) != cell_id({**cell, "training": {**before, "activation_offload": True}})
