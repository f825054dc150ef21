"""FSDP's all-gather by copies between GPUs: each rank's shards lie where the others fetch them.

A shard is published in the dtype that computes, once a step: by the optimizer as it writes the parameter, or by a cast.
To gather a unit is then nothing but copies, each to where the parameter is used: no kernel takes part, and no rank
waits for another. It knows nothing of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ndbench.parallel._fsdp_private import Root, ShardedParameter, Unit
from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.copies import Copies
from ndbench.parallel.peer_memory import GATHER, Lane, Offsets, PeerMemory, Switch, mark, wait

SLOTS = 2
"""Units that are freed after forward share this much memory: one computes while the next is fetched."""


class Slot:
    """Memory for one unit at a time, by parameter."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        plan = Offsets()
        starts = [plan.add(size, dtype) for size in sizes]
        memory = torch.empty(plan.size, dtype=torch.uint8, device=device).untyped_storage()
        self.tensors = [
            torch.empty(0, dtype=dtype, device=device).set_(memory[start:], 0, (size,))  # type: ignore[call-overload]
            for start, size in zip(starts, sizes, strict=True)
        ]
        self.units = 0
        self.forget()

    def forget(self) -> None:
        self.holds: Published | None = None
        """The unit that is fetched or computed with."""
        self.left: torch.cuda.Event | None = None


class Published:
    """One unit: this rank's shards for the others, theirs for this one. ``slot`` None: it has memory of its own."""

    def __init__(self, unit: Unit, slot: Slot | None, dtype: torch.dtype) -> None:
        self.unit, self.slot, self.dtype = unit, slot, dtype
        self.shards: list[torch.Tensor] = []
        """This rank's part of each parameter, where the others look."""
        self.fetch: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(here, there) of everything that gathering the unit copies."""
        self.arrived: torch.cuda.Event | None = None
        self.fetched = False
        """A unit with memory of its own is fetched once a step."""
        self._starts: list[int] = []
        self._end = 0

    def plan(self, plan: Offsets, world: int) -> None:
        """Ask for the memory that others see: of all shards where it is the unit's own, else of this rank's."""
        ranks = world if self.slot is None else 1
        self._starts = [plan.add(ranks * each.padded, self.dtype) for each in self.unit.parameters]
        self._end = plan.size

    def place(self, memory: PeerMemory) -> list[torch.nn.Parameter]:
        """Take the memory; returns the whole parameters, on which backward leaves gradients."""
        leaves = []
        for index, (each, start) in enumerate(zip(self.unit.parameters, self._starts, strict=True)):
            if self.slot is None:
                # Each in a storage of its own, as FSDP needs it, that reaches to the end of the unit: parameters that
                # follow each other without a gap can be used as one (``joined.py``).
                rest = memory.of(memory.rank, start, (self._end - start) // self.dtype.itemsize, self.dtype)
                whole = rest[: memory.world * each.padded]
            else:
                whole = self.slot.tensors[index]
            for step in range(memory.world):
                rank = (memory.rank + step) % memory.world
                first, count = each.rows_of(rank)
                there = memory.of(rank, start + self._offset(rank, each), count, self.dtype)
                if step == 0:
                    self.shards.append(there)
                if count and (step or self.slot is not None):
                    self.fetch.append((whole.narrow(0, first, count), there))
            # ``data``: what is copied there later does not count as a change of what backward has kept of it.
            leaves.append(each.keep_in(whole.data))
        return leaves

    def _offset(self, rank: int, each: ShardedParameter) -> int:
        return rank * each.padded * self.dtype.itemsize if self.slot is None else 0


class PeerShards(Copies):
    """The shards of ``units``, published to the ranks of ``group``, and who fetches them while ``switch`` is on."""

    def __init__(
        self,
        root: Root,
        units: Sequence[Unit],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        switch: Switch,
        memory: type[PeerMemory],
    ) -> None:
        self._root, self._device, self.lane, plan = root, device, Lane(device), Offsets()
        self._slots: list[Slot] = []
        self._begun = False
        self._units = [Published(unit, self._slot_for(unit, group.size(), dtype), dtype) for unit in units]
        for each in self._units:
            each.plan(plan, group.size())
        self._memory = memory(plan.size, group, device)
        self.leaves = [each.place(self._memory) for each in self._units]
        originals = [parameter.parameter for unit in units for parameter in unit.parameters]
        shards = [shard for each in self._units for shard in each.shards]
        super().__init__((p, shard.view_as(local_tensor(p))) for p, shard in zip(originals, shards, strict=True))
        self.refresh(force=True)
        for each in self._units:
            self._gather_by_copies(each, switch)

    def start(self) -> None:
        """Before a step that gathers by copies, on all ranks: shards are those of the parameters as they are now."""
        self.refresh()
        with self.lane.after_current():
            self._memory.barrier(GATHER)
        wait(self.lane.mark())

    def forget(self) -> None:
        """Between steps: nothing is fetched, whatever a step that broke off, or a capture, has left of itself."""
        self._root.reset()
        self._begun = False
        for slot in self._slots:
            slot.forget()
        for each in self._units:
            each.arrived, each.fetched = None, False

    def join(self) -> None:
        """The current stream goes on after FSDP's."""
        self._root.join()

    def _slot_for(self, unit: Unit, world: int, dtype: torch.dtype) -> Slot | None:
        if not unit.freed_after_forward:
            return None
        sizes = [world * each.padded for each in unit.parameters]
        alike = [slot for slot in self._slots if [x.numel() for x in slot.tensors] == sizes]
        if len(alike) < SLOTS:
            alike.append(Slot(sizes, dtype, self._device))
            self._slots.append(alike[-1])
        # The least used: neighbours take turns.
        found = min(alike, key=lambda slot: slot.units)
        found.units += 1
        return found

    def _gather_by_copies(self, published: Published, switch: Switch) -> None:
        slot = published.slot

        def claim() -> None:
            if slot is None or slot.holds is published:
                return
            if slot.holds is not None and not slot.holds.unit.drop():
                raise RuntimeError(
                    "data_collectives=copy_engine needs blocks that compute one after another, each once:"
                    " a block is asked for while the one before the last still computes; take nccl"
                )
            slot.holds = published

        def start() -> torch.cuda.Event | None:
            if not published.fetched:
                # The first of a step comes after what was before the step, whatever it is: a CUDA graph begins there.
                after = mark(self._device) if not self._begun else None if slot is None else slot.left
                self._begun = True
                with torch.no_grad(), self.lane.after(after):
                    for here, there in published.fetch:
                        here.copy_(there)
                    published.arrived = mark(self._device)
                published.fetched = slot is None
            return published.arrived

        def release() -> None:
            if slot is not None and slot.holds is published:
                slot.holds, slot.left = None, mark(self._device)

        published.unit.gather_by(lambda: switch.on, start, wait, claim, release)
