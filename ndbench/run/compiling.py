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


KEPT_COMPILATIONS = 100_000
"""torch keeps the metrics of the last 64 by itself; a model of many blocks that recompiles has more."""


def keep_count(compiled: bool) -> None:
    """Call before anything is compiled: afterwards recompiles are counted from the metrics of every compilation."""
    if compiled:
        import torch._dynamo.utils as dynamo

        dynamo.set_compilation_metrics_limit(KEPT_COMPILATIONS)  # type: ignore[no-untyped-call]


def compile_time(compiled: bool) -> tuple[float | None, str]:
    """Seconds spent compiling so far; the on-disk cache was ``cold`` or ``warm``, or ``off`` when not compiled."""
    dynamo = _dynamo()
    if not compiled or dynamo is None:
        return None, "off"
    # forward graphs when they are met, backward graphs at the first backward; the list of metrics keeps the last few
    # compilations only, this sum keeps all
    seconds = float(dynamo.calculate_time_spent()["total_wall_time"])
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
