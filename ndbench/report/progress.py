"""The live view of a run: cells done, the one running, its step rate, the time left. Plain lines without a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ndbench.counted import counted
from ndbench.results.schema import Record

REFRESH_SECONDS = 0.5
"""How often the line is drawn: rarely enough that drawing costs a measured run nothing that can be seen."""


def duration(seconds: float) -> str:
    """``47 s``, ``3 min 20 s``, ``1 h 05 min``, ``3 days 04 h``, ``41 days``, ``27 years``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    days, rest = divmod(whole, 86400)
    if days == 0:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if days < 10:
        return f"{counted(days, 'day')} {rest // 3600:02d} h"
    return f"{days} days" if days < 2 * 365 else f"{days // 365:,} years"


class Progress:
    """Told by the runner what happens; asks ``current_step`` how far the running repeat is."""

    def __init__(self, console: Console, total: int, done: int = 0) -> None:
        self._console = console
        self._total, self._done, self._done_here = total, done, 0
        self._began = time.monotonic()
        self._running: tuple[str, int, int] | None = None
        self._running_since = 0.0
        self._current_step: Callable[[], int] = lambda: -1
        self._stop = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(self._line(), console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            self._thread = threading.Thread(target=self._draw, daemon=True, name="ndbench-progress")
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.stop()

    def started(self, cell: str, repeat: int, steps: int, current_step: Callable[[], int]) -> None:
        self._current_step = current_step
        self._running_since = time.monotonic()
        self._running = (cell, repeat, steps)

    def finished(self, record: Record) -> None:
        self._running = None
        self._done += 1
        self._done_here += 1
        took = time.monotonic() - self._running_since
        name = f"{record['cell']['name']}  repeat {record['repeat']}"
        rate = record["metrics"].get("tokens_per_second", {}).get("value")
        if record["outcome"] == "ok" and rate is not None:
            told = f"{rate:,.0f} tokens/s"
        elif record["outcome"] == "ok":
            told = f"{record['metrics']['step_seconds']['value']:.4g} s a step"
        else:
            told = f"{record['outcome']}: {record['reason']}"
        line = f"[{self._done}/{self._total}] {name}  {told}  ({duration(took)})"
        self._console.print(Text(line), style="" if record["outcome"] == "ok" else "yellow", soft_wrap=True)

    def note(self, line: str) -> None:
        self._console.print(Text(line), style="yellow", soft_wrap=True)

    def _draw(self) -> None:
        assert self._live is not None, "only drawn on a terminal"
        while not self._stop.wait(REFRESH_SECONDS):
            self._live.update(self._line(), refresh=True)

    def _line(self) -> Text:
        elapsed = time.monotonic() - self._began
        left = ""
        if self._done_here:
            left = f"  {duration(elapsed / self._done_here * (self._total - self._done))} left"
        line = f"{self._done}/{counted(self._total, 'repeat')}  {duration(elapsed)}{left}"
        running = self._running
        if running is not None:
            cell, repeat, steps = running
            step = self._current_step() + 1
            rate = step / max(time.monotonic() - self._running_since, 1e-9)
            line += f"  |  {cell} repeat {repeat}: step {step}/{steps}, {rate:.1f} steps/s"
        return Text(line, no_wrap=True, overflow="ellipsis")
