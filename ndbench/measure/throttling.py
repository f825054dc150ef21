"""For how long a device was slowed down while a repeat ran: for its temperature, or by a power brake.

Read in the parent before and after a launch, from the driver's own counters, never inside it. A power limit is no
throttling: a GPU at its limit is the product, and the limit stands in the fingerprint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ndbench.measure.devices import number, nvidia_query

COUNTERS = ("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
"""Of nvidia-smi's ``clocks_event_reasons_counters``, in microseconds since the driver was loaded."""
CPU_COUNTERS = "devices/system/cpu/cpu*/thermal_throttle/package_throttle_total_time_ms"

Reading = Mapping[str, float]
"""Seconds by device so far; empty where nothing counts them."""


def gpu_reading() -> Reading:
    """Every NVIDIA GPU's seconds of slowdown, by UUID; empty for drivers that do not count them."""
    fields = [f"clocks_event_reasons_counters.{name}" for name in COUNTERS]
    found: dict[str, float] = {}
    for row in nvidia_query("uuid", *fields):
        counted = [number(row[field]) for field in fields]
        if any(value is not None for value in counted):
            found[row["uuid"]] = max(value or 0 for value in counted) / 1e6
    return found


def cpu_reading(root: Path = Path("/sys")) -> Reading:
    """Every CPU's seconds of its package's slowdown; empty in virtual machines and on ARM."""
    found: dict[str, float] = {}
    for path in root.glob(CPU_COUNTERS):
        try:
            found[path.parent.parent.name] = int(path.read_text()) / 1e3
        except (OSError, ValueError):
            continue
    return found


class ThrottleMeter:
    """Share of the time since its making during which the worst device was slowed down.

    ``names``: the GPUs that count, by UUID; on a CPU all do.
    """

    def __init__(self, device: str, names: Collection[str] = (), read: Callable[[], Reading] | None = None) -> None:
        self._read = read or (cpu_reading if device == "cpu" else gpu_reading)
        self._names = None if device == "cpu" else set(names)
        self._before = self._read()
        self._began = time.monotonic()

    def share(self) -> float | None:
        """Between 0 and 1; null where nothing counts it."""
        seconds = time.monotonic() - self._began
        after = self._read()
        counted = [name for name in self._before if name in after and (self._names is None or name in self._names)]
        grown = [after[name] - self._before[name] for name in counted]
        return min(1.0, max(0.0, *grown, 0.0) / seconds) if grown and seconds > 0 else None
