"""What torch.compile did in this process: seconds spent, cache hits, graph breaks, recompiles.

The only module that reads torch._dynamo's metrics, which are private; a test names the torch versions it was tried
with.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch


def _dynamo() -> Any:
    """torch._dynamo.utils when something was compiled; importing it takes seconds and would disturb an eager run."""
    return sys.modules.get("torch._dynamo.utils")


def compile_time(compiled: bool) -> tuple[float | None, str]:
    """Seconds spent compiling so far; the on-disk cache was ``cold`` or ``warm``, or ``off`` when not compiled."""
    dynamo = _dynamo()
    if not compiled or dynamo is None:
        return None, "off"
    seconds = sum(float(entry.entire_frame_compile_time_s or 0.0) for entry in dynamo.get_compilation_metrics())
    return seconds, "warm" if dynamo.counters["inductor"].get("fxgraph_cache_hit", 0) else "cold"


def counters() -> dict[str, int]:
    """Graph breaks and recompiles in this process so far; zero when nothing was compiled."""
    dynamo = _dynamo()
    if dynamo is None:
        return {"graph_breaks": 0, "recompiles": 0}
    return {
        "graph_breaks": sum(dynamo.counters.get("graph_break", {}).values()),
        "recompiles": sum(1 for entry in dynamo.get_compilation_metrics() if entry.recompile_reason is not None),
    }


def eager_step() -> AbstractContextManager[object]:
    """Run compiled functions as the Python they were made from, so that dispatch modes see every operation."""
    if _dynamo() is None:
        return contextlib.nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
