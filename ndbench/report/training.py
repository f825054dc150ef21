"""What a person sees of a training run: its header, its progress as the log grows, and how it ended.

Reads the log's lines; a live line on a terminal, one line every few seconds elsewhere.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ndbench.config import Cell
from ndbench.counted import counted
from ndbench.report.progress import duration

PRINT_SECONDS = 10.0
"""Between two lines where there is no terminal."""

REFRESH_SECONDS = 0.5


class TrainingView:
    """Told by the runner what happens; ``update`` reads what the log has new."""

    def __init__(self, console: Console, cell: Cell, folder: Path) -> None:
        self._console, self._cell, self._folder = console, cell, folder
        self._path = folder / "log.jsonl"
        self._old = {hash(line) for line in self._path.read_bytes().splitlines()} if self._path.is_file() else set()
        self._inode, self._offset = (self._path.stat().st_ino, self._path.stat().st_size) if self._old else (0, 0)
        self._last: dict[str, Any] | None = None
        self._shown: dict[str, Any] | None = None
        """The line that was printed last."""
        self._here: list[float] = []
        """Seconds of each step so far with what came after it (evaluation, checkpoint)."""
        self._since: list[tuple[float, float]] = []
        """(tokens, seconds) of each step since the last line; of a live line, of the last ``PRINT_SECONDS``."""
        self._printed = time.monotonic()
        self._drawn = 0.0
        self._live: Live | None = None

    def __enter__(self) -> TrainingView:
        if self._console.is_terminal:
            self._live = Live(Text(""), console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def began(
        self, text: tuple[int, int, bool] | None, start: tuple[Path, int] | None, changes: Sequence[str] = ()
    ) -> None:
        """The header; ``text`` is (tokens, documents, whether there was more) of what was read, ``start`` the
        checkpoint that is gone on from and its step."""
        config = self._cell.config
        training, model = config.training, config.model
        on, steps = counted(self._cell.world_size, "rank"), counted(training.steps, "step")
        self._say(
            f"{model.name} on {on} ({config.parallelism.layout}), {steps} of "
            f"{training.global_batch_size} x {training.sequence_length} tokens, {training.precision}"
        )
        if text is not None:
            tokens, documents, cut = text
            more = f", cut at data.max_bytes {config.data.max_bytes:,}" if cut else ""
            trained_on = max(tokens * (1 - config.evaluation.fraction), 1)
            passes = training.steps * training.global_batch_size * training.sequence_length / trained_on
            read = f"{tokens:,} tokens, {counted(documents, 'document')}{more}"
            self._say(f"data={config.data.name}: {read}; {passes:.1f} passes")
        elif config.data.name == "markov":
            self._say("data=markov: synthetic tokens; your text: data=text data.files=[FILE,FOLDER] or data=dataset")
        if start is not None:
            path, step = start
            if step >= training.steps:
                self._say(f"nothing to do: {path} is at step {step}, training.steps is {training.steps}", style="bold")
                return
            self._say(f"going on from {path}, step {step}")
            if changes:
                self._say(f"changed since the checkpoint: {', '.join(changes)}", style="yellow")
        self._say(f"log: {self._path}")

    def update(self) -> None:
        """Read the log's new lines and show where the run is."""
        for line in self._new_lines():
            between = line.get("validation_seconds", 0.0) + line.get("checkpoint_seconds", 0.0)
            self._here.append(line["seconds"] + between)
            self._since.append((line["tokens_per_second"] * line["seconds"], line["seconds"]))
            if self._live is not None:
                while len(self._since) > 1 and sum(seconds for _, seconds in self._since) > PRINT_SECONDS:
                    del self._since[0]
            self._last = line
            if "validation_loss" in line:
                self._print(line)
        if self._last is None:
            return
        now = time.monotonic()
        if self._live is not None:
            if now - self._drawn > REFRESH_SECONDS:
                self._drawn = now
                self._live.update(Text(self._line(self._last), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif now - self._printed > PRINT_SECONDS and self._last is not self._shown:
            self._print(self._last)

    def note(self, line: str) -> None:
        self._say(line, style="yellow")

    def stopping(self, number: int) -> None:
        name = signal.Signals(number).name
        then = "a checkpoint follows" if self._cell.config.checkpoint.dir else "without checkpoint.dir nothing is kept"
        self._say(f"{name}: stopping after the step in flight, {then}; once more ends it at once", style="yellow")

    def tracked(self, done: str | None, warning: str | None) -> None:
        if done or warning:
            self._say(warning or done or "", style="yellow" if warning else "")

    def killed(self, number: int) -> int:
        """The second signal; returns the exit code."""
        self._say("ended at once: the newest whole checkpoint is what there is", style="yellow")
        return 128 + number

    def failed(self, outcome: str, reason: str, log_tail: str, advice: str | None = None) -> None:
        """``advice``: what to do about it, where more is known than to try again."""
        for line in log_tail.splitlines():
            self._say(f"  | {line}")
        self._say(f"{outcome}: {reason}", style="bold red")
        if advice is not None:
            self._say(advice)
        elif self._cell.config.checkpoint.dir is not None:
            self._say("no checkpoint was written whole: once mended, begin anew")

    def ended(self, outcome: dict[str, Any]) -> None:
        if self._last is not None and self._last is not self._shown:
            self._print(self._last)
        word = f"stopped by {signal.Signals(outcome['stopped']).name}" if outcome["stopped"] else "done"
        parts = [f"{word} after step {outcome['step']} of {self._cell.config.training.steps}"]
        if outcome["validation_loss"] is not None:
            parts.append(f"validation loss {outcome['validation_loss']:.4f}")
        parts.append(f"checkpoint {outcome['checkpoint']}" if outcome["checkpoint"] else "no checkpoint")
        self._say(", ".join(parts), style="bold")

    def _new_lines(self) -> list[dict[str, Any]]:
        """Whole lines that were appended; a resumed run first replaces the file, which keeps some of the old ones."""
        try:
            found = self._path.stat()
        except OSError:
            return []
        if found.st_ino != self._inode:
            self._inode, self._offset = found.st_ino, 0
        if found.st_size <= self._offset:
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            text = stream.read()
        whole, newline, _ = text.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if hash(line) not in self._old]

    def _print(self, line: dict[str, Any]) -> None:
        self._printed, self._shown = time.monotonic(), line
        self._say(self._line(line))
        self._since = []

    def _line(self, line: dict[str, Any]) -> str:
        steps = self._cell.config.training.steps
        # the first step compiles and warms up: it says nothing of those to come, where there are others
        here = self._here[1:] or self._here
        each = sum(here) / len(here)
        own = self._since[1:] if len(self._since) == len(self._here) > 1 else self._since
        rate = sum(tokens for tokens, _ in own) / sum(seconds for _, seconds in own)
        parts = [f"step {line['step']}/{steps}", f"loss {_number(line['loss'], '.4f')}"]
        if line.get("grad_norm") is not None:
            parts.append(f"norm {line['grad_norm']:.3g}")
        parts.append(f"{rate:,.0f} tokens/s")
        parts.append(f"{line['memory_bytes'] / 2**20:,.0f} MiB a rank")
        if "validation_loss" in line:
            parts.append(f"validation loss {_number(line['validation_loss'], '.4f')}")
        if line["step"] < steps:
            parts.append(f"{duration(each * (steps - line['step']))} left")
        return "  ".join(parts)

    def _say(self, line: str, style: str = "") -> None:
        self._console.print(Text(line), style=style, soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return "nan" if value is None else format(value, form)
