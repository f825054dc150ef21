"""Persistent ranks for tests: one pool of processes a world size, reused by every test that needs that many ranks.

Importing torch and transformers takes seconds a process, so a launch a test would make the suite unusable. A task is a
module-level function; every rank runs it and its results come back in rank order. Nothing here knows what is tested.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torch._dynamo",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.mistral.modeling_mistral",
]
GRACE_S = 10.0
"""How long ranks may go on after one of them has failed, before all are killed."""

_pools: dict[int, Pool] = {}


class Pool:
    """``world_size`` ranks with a gloo process group. Use :func:`pool`, which starts each size once."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.broken: str | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="ndbench-pool-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._ranks: list[tuple[Any, multiprocessing.connection.Connection]] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, str(self._folder), there), daemon=True, name=f"rank{rank}"
            )
            process.start()
            there.close()
            self._ranks.append((process, here))

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``fn(*args)`` on every rank; results in rank order.

        ``fn`` must be importable by name. Raises ``RuntimeError`` with the first rank's traceback when one fails, dies
        or does not answer within ``timeout`` seconds; in the last two cases the pool is gone and the next
        :func:`pool` call starts a new one.
        """
        assert self.broken is None, f"this pool is gone: {self.broken}"
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                pipe.send((sys.path, fn.__module__, fn.__qualname__, args))
            except (BrokenPipeError, ConnectionResetError):
                self._fail(f"rank {rank} of {self.world_size} is dead before {fn.__qualname__}")
        return self._collect(fn.__qualname__, time.monotonic() + timeout, timeout)

    def _collect(self, what: str, deadline: float, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if errors:
                    break
                stuck = sorted(waiting.values())
                self._fail(f"ranks {stuck} of {self.world_size} did not finish {what} in {timeout:g} s", stacks=True)
            for pipe in ready:
                assert isinstance(pipe, multiprocessing.connection.Connection)
                rank = waiting.pop(pipe)
                try:
                    ok, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self._ranks[rank][0]
                    process.join(5)
                    self._fail(f"rank {rank} of {self.world_size} died in {what}, exit code {process.exitcode}")
                (results if ok else errors)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            rank = min(errors)
            message = f"{what}: rank {rank} of {self.world_size} failed\n{errors[rank]}"
            if waiting:
                self._fail(message)
            raise RuntimeError(message)
        return [results[rank] for rank in range(self.world_size)]

    def _fail(self, message: str, stacks: bool = False) -> None:
        if stacks:
            for process, _ in self._ranks:
                os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            for file in sorted(self._folder.glob("stack*")):
                message += f"\n--- {file.name}\n{file.read_text()[-3000:]}"
        self.broken = message.splitlines()[0]
        self.close()
        raise RuntimeError(message)

    @property
    def threads(self) -> int:
        """Of the first rank: two or three a process group, which wake up a hundred times a second while it lives."""
        return len(list(Path(f"/proc/{self._ranks[0][0].pid}/task").glob("*")))

    def close(self) -> None:
        """Kill every rank and remove what the pool wrote."""
        _pools.pop(self.world_size, None)
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join(5)
        shutil.rmtree(self._folder, ignore_errors=True)


def pool(world_size: int) -> Pool:
    """The pool of that many ranks, started on first use and kept until the interpreter ends."""
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    return _pools[world_size]


def close_crowded(threads: int) -> None:
    """Kill the ranks of every pool with more than that many threads a rank.

    A layout's groups live as long as the rank: those of all layouts together would keep two cores busy by themselves.
    """
    for each in list(_pools.values()):
        if each.threads > threads:
            each.close()


@atexit.register
def close_all() -> None:
    """Kill the ranks of every pool."""
    for each in list(_pools.values()):
        each.close()


def _serve(rank: int, world_size: int, folder: str, pipe: multiprocessing.connection.Connection) -> None:
    import torch
    import torch.distributed as dist

    stack = Path(folder, f"stack{rank}").open("w")  # noqa: SIM115  kept open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=100))
    while True:
        try:
            path, module, name, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            sys.path[:] = path
            target: Any = importlib.import_module(module)
            for part in name.split("."):
                target = getattr(target, part)
            answer = (True, target(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
