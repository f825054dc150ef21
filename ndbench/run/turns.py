"""Taking turns: the ranks of two launches are there at once, and only one of them steps at a time.

Each rank waits in the kernel for its turn (a read from a named pipe), so a side that is not on turn costs nothing. The
parent's half is :class:`Turns`; the rank's half is :class:`TurnTaker`. Neither knows which side is which.
"""

from __future__ import annotations

import os
import select
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from ndbench.counted import counted

_TOKEN = struct.Struct("<d")
_DONE = struct.Struct("<iidd")
_READY, _STEP = 0, 1
STOP = -1.0


@dataclass(frozen=True)
class Turn:
    """One step of one side."""

    seconds: float
    """Of the slowest rank."""
    cpu_seconds: float
    """Of all threads of all ranks together: blind to waiting, but hardly moved by what else the machine does."""


class Lost(Exception):
    """The side's launch ended or hangs: its record says why."""


class Turns:
    """The parent's half, for one side. ``folder`` is what :class:`~ndbench.run.task.Task` is given as ``turns``."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._size = world_size
        for name in ("done", *(f"go.{rank}" for rank in range(world_size))):
            os.mkfifo(folder / name)
        # opened for both directions, so that neither side waits for the other to open its end
        self._go = [os.open(folder / f"go.{rank}", os.O_RDWR | os.O_CLOEXEC) for rank in range(world_size)]
        self._done = os.open(folder / "done", os.O_RDWR | os.O_CLOEXEC)

    def wait_ready(self, timeout: float, watch: int) -> None:
        """Until every rank has built its model. ``watch`` becomes readable when the side's launch has ended."""
        self._collect(_READY, timeout, watch)

    def take(self, handicap: float, timeout: float, watch: int) -> Turn:
        """One step, each rank burning ``handicap`` times its own time after it. Raises :class:`Lost`."""
        for pipe in self._go:
            os.write(pipe, _TOKEN.pack(handicap))
        done = self._collect(_STEP, timeout, watch)
        return Turn(max(seconds for seconds, _ in done), sum(cpu for _, cpu in done))

    def stop(self) -> None:
        """Let the ranks finish what is left to do after the steps, and end."""
        for pipe in self._go:
            os.write(pipe, _TOKEN.pack(STOP))

    def close(self) -> None:
        for pipe in (*self._go, self._done):
            os.close(pipe)

    def _collect(self, kind: int, timeout: float, watch: int) -> list[tuple[float, float]]:
        deadline = time.monotonic() + timeout
        found: list[tuple[float, float]] = []
        while len(found) < self._size:
            ready, _, _ = select.select([self._done, watch], [], [], max(0.0, deadline - time.monotonic()))
            if self._done in ready:
                _, told, seconds, cpu = _DONE.unpack(os.read(self._done, _DONE.size))
                assert told == kind, f"a rank answered {told} where {kind} was asked"
                found.append((seconds, cpu))
            elif ready:
                raise Lost("its launch ended")
            else:
                raise Lost(
                    f"{self._size - len(found)} of {counted(self._size, 'rank')} did not answer within {timeout:g} s"
                )
        return found


class TurnTaker:
    """The rank's half."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._go = os.open(folder / f"go.{rank}", os.O_RDONLY | os.O_CLOEXEC)
        self._done = os.open(folder / "done", os.O_WRONLY | os.O_CLOEXEC)

    def ready(self) -> None:
        os.write(self._done, _DONE.pack(self._rank, _READY, 0.0, 0.0))

    def wait(self) -> float | None:
        """The handicap of the next turn, or null when there is none."""
        data = os.read(self._go, _TOKEN.size)
        (handicap,) = _TOKEN.unpack(data) if data else (STOP,)
        return None if handicap < 0 else float(handicap)

    def done(self, seconds: float, cpu_seconds: float) -> None:
        os.write(self._done, _DONE.pack(self._rank, _STEP, seconds, cpu_seconds))
