"""Peak memory: what is counted, once, and the same on every run."""

from __future__ import annotations

import torch

from ndbench.measure.memory import MemoryMeter, TrackedMemory, all_live_tensors

MIB = 2**20


def test_the_peak_of_known_allocations_is_exact() -> None:
    with TrackedMemory() as memory:
        a = torch.empty(MIB, dtype=torch.uint8)
        b = torch.empty(2 * MIB, dtype=torch.uint8)
        del a
        c = torch.empty(MIB // 2, dtype=torch.uint8)
        del b, c
    assert memory.peak == 3 * MIB
    assert memory.current == 0


def test_views_of_a_storage_are_counted_once() -> None:
    with TrackedMemory() as memory:
        a = torch.empty(MIB, dtype=torch.uint8)
        views = [a.view(1024, 1024), a[10:], a.view(torch.int32)]
    assert len(views) == 3
    assert memory.peak == MIB


def test_an_in_place_operation_allocates_nothing() -> None:
    with TrackedMemory() as memory:
        torch.zeros(MIB, dtype=torch.uint8).add_(1)
    assert memory.peak == MIB


def test_tensors_from_before_count_when_they_are_roots() -> None:
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 256)).sum().backward()
    optimizer.step()
    weights = (256 * 256 + 256) * 4
    with TrackedMemory(roots=[model, optimizer]) as memory:
        pass
    steps = 2 * 4  # AdamW's step count, one float a parameter
    assert memory.peak == 4 * weights + steps  # parameters, gradients and two moments


def test_an_engines_attributes_are_roots() -> None:
    class Loop:
        def __init__(self) -> None:
            self.parts = {"model": torch.nn.Linear(16, 16, bias=False)}
            self.again = self

    with TrackedMemory(roots=[Loop()]) as memory:
        pass
    assert memory.peak == 16 * 16 * 4


def test_a_leak_is_seen() -> None:
    kept: list[torch.Tensor] = []

    def peak(leak: bool) -> int:
        with TrackedMemory() as memory:
            for _ in range(4):
                step = torch.ones(MIB, dtype=torch.uint8)
                if leak:
                    kept.append(step)
                del step
        return memory.peak

    assert peak(leak=False) == MIB
    assert peak(leak=True) == 4 * MIB


def training_step_peak() -> int:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(32, 64)
    with TrackedMemory(roots=[model, optimizer, batch]) as memory:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return memory.peak


def test_the_same_step_gives_the_same_bytes() -> None:
    peaks = {training_step_peak() for _ in range(3)}
    assert len(peaks) == 1


def test_activation_checkpointing_lowers_the_peak() -> None:
    from torch.utils.checkpoint import checkpoint

    def peak(recompute: bool) -> int:
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(6)
        ]
        x = torch.randn(512, 64, requires_grad=True)
        with TrackedMemory(roots=[*blocks, x]) as memory:
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
            y.sum().backward()
        return memory.peak

    assert peak(recompute=True) < 0.6 * peak(recompute=False)


def test_a_storage_that_is_resized_is_followed() -> None:
    """FSDP2 frees a gathered parameter so, and the tensor stays."""
    with TrackedMemory() as memory:
        gathered = torch.empty(MIB, dtype=torch.uint8)
        gathered.untyped_storage().resize_(0)
        assert memory.current == 0
        other = torch.empty(MIB, dtype=torch.uint8)
        gathered.untyped_storage().resize_(3 * MIB)
    assert other.numel() == MIB
    assert memory.peak == 4 * MIB
    gathered.untyped_storage().resize_(0)  # the patch is gone


def test_live_tensors_can_be_found_without_a_list() -> None:
    marked = torch.zeros(3, 5)
    assert any(tensor is marked for tensor in all_live_tensors())


def test_the_cpu_has_a_resident_set_and_no_allocator_peak() -> None:
    meter = MemoryMeter("cpu")
    meter.reset()
    reading = meter.reading()
    assert reading["allocated"] is None
    assert reading["reserved"] is None
    assert reading["device_used"] is None
    assert reading["rss"] is not None
    assert reading["rss"] > MIB
