"""What a cell measured, in the few figures that a table shows, whether or not there is a baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from ndbench.compare.memory import peaks
from ndbench.compare.outcomes import cell_outcome
from ndbench.compare.result import Current
from ndbench.compare.statistics import mean_interval
from ndbench.compare.throughput import log_step_time
from ndbench.results.schema import Record


def summarise(records: Sequence[Record]) -> Current | None:
    """The figures of the repeats that are ok, or only the outcome where none is; null without any record."""
    if not records:
        return None
    outcome = cell_outcome(records)
    deciding = next(record for record in records if record["outcome"] == outcome)
    ok = [record for record in records if record["outcome"] == "ok"]
    world = records[0]["world"]
    peak = max(peaks(ok), default=None)
    times = [log_step_time(record) for record in ok]
    interval = mean_interval(times)
    tokens = ok[0]["tokens"]["per_step"] if ok else None
    loss = ok[-1]["steps"]["loss"][-1] if ok else None
    mfu = ok[0]["metrics"].get("mfu_causal", {}).get("value") if ok else None
    return Current(
        outcome=outcome,
        repeats=len(records),
        ok_repeats=len(ok),
        layout=world["layout"],
        world_size=world["size"],
        tokens_per_second=tokens / math.exp(fmean(times)) if tokens else None,
        tokens_low=tokens / math.exp(interval[1]) if tokens and interval else None,
        tokens_high=tokens / math.exp(interval[0]) if tokens and interval else None,
        step_seconds=math.exp(fmean(times)) if ok else None,
        peak_bytes=None if peak is None else int(peak),
        loss_last=loss,
        mfu=mfu,
        reason=deciding["reason"] if outcome != "ok" else None,
        log_tail=deciding["log_tail"] if outcome != "ok" else None,
        engine=records[0]["cell"].get("engine"),
    )
