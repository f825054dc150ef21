"""Where torch elastic would wait for ever: its own privates, in this one place.

Elastic takes a rank that ends with status 0 for one that will still hand over its return value, so that a rank that
calls ``os._exit(0)`` holds the launch up without end.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


@functools.cache
def fail_on_early_ends() -> None:
    """From now on, in this process, a rank that ends before its function has returned has failed, with status 0 too."""
    polled = MultiprocessContext._poll

    def poll(self: Any) -> RunProcsResult | None:
        result = polled(self)
        # a rank whose function has returned stays until it is told to end, which is after the last of them
        if result is not None or len(self._pc.sentinels) == self.nprocs:
            return result
        running = set(self._pc.sentinels.values())
        ended = [rank for rank in range(self.nprocs) if rank not in running]
        processes = self._pc.processes
        failures = {
            rank: ProcessFailure(rank, processes[rank].pid, processes[rank].exitcode, self.error_files[rank])
            for rank in ended
        }
        self.close()
        return RunProcsResult(failures=failures, stdouts=self.stdouts, stderrs=self.stderrs)

    MultiprocessContext._poll = poll  # type: ignore[method-assign]
