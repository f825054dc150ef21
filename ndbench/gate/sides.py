"""The parent's hold on one side of an A/B: a process with its own interpreter, code and fork server, kept alive.

Sends requests, hands back records. Knows nothing of pairs or of deciding.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndbench.config import Cell
from ndbench.gate.agent import PROTOCOL
from ndbench.gate.refs import Side
from ndbench.results.schema import Record, migrate
from ndbench.results.store import RunFolder
from ndbench.run.process import tail

START_SECONDS = 300.0
"""Importing torch and transformers in two interpreters on a loaded machine."""
END_SECONDS = 20.0


class SideProcess:
    """A running side. Use it as a context manager: its process and ranks end with the block."""

    def __init__(self, side: Side, run: str, folder: RunFolder) -> None:
        self.side = side
        self.facts: dict[str, Any] = {}
        self._run, self._folder = run, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder.path / "side.log"

    def __enter__(self) -> SideProcess:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self.side.python, "-m", "ndbench.gate.agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.side.cwd,
                env=self.side.environment,
                start_new_session=True,  # Ctrl-C reaches the parent only, which then ends this side in order
            )
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process is not None, "entered"
        assert process.stdin is not None, "a pipe was asked for"
        assert process.stdout is not None, "a pipe was asked for"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for number, wait in ((None, 2.0), (signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
                break
        process.stdout.close()

    def hello(self, cells: Sequence[Cell]) -> None:
        """Start the side's fork server. Raises ``ValueError`` when this side cannot measure, with what it said."""
        models = sorted({cell.config.model.model_type for cell in cells if cell.config.model.model_type})
        self._ask(
            {
                "do": "hello",
                "run": self._run,
                "folder": str(self._folder.path.resolve()),
                "model_types": models,
                "start_method": cells[0].config.launcher.start_method,
            }
        )
        self.facts = self._answer(START_SECONDS)
        if self.facts.get("protocol") != PROTOCOL:
            raise ValueError(
                f"{self.side.label} {self.side.ref}: its ndbench {self.facts.get('ndbench')} speaks protocol "
                f"{self.facts.get('protocol')}, this one {PROTOCOL}"
            )

    def start(self, cell: Cell, repeat: int, turns: Path | None = None) -> None:
        """Begin a repeat; :meth:`finish` waits for its record."""
        self._ask({"do": "measure", "cell": cell.to_dict(), "repeat": repeat, "turns": str(turns) if turns else None})

    def finish(self, timeout: float) -> Record:
        """The record of the repeat that was started. Raises ``ValueError`` when the side fails or is silent."""
        return migrate(self._answer(timeout)["record"], f"{self.side.label} {self.side.ref}")

    @property
    def watch(self) -> int:
        """A descriptor that becomes readable when the side has answered or ended."""
        assert self._process is not None, "entered"
        assert self._process.stdout is not None, "a pipe was asked for"
        return self._process.stdout.fileno()

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._process is not None, "entered"
        assert self._process.stdin is not None, "a pipe was asked for"
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ValueError(self._died()) from error

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self._process is not None, "entered"
        assert self._process.stdout is not None, "a pipe was asked for"
        if not select.select([self.watch], [], [], timeout)[0]:
            raise ValueError(f"{self.side.label} {self.side.ref} did not answer within {timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(self._died())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(f"{self.side.label} {self.side.ref}: {answer['error']}")
        return answer

    def _died(self) -> str:
        last = tail(self._log, lines=1) or "it said nothing"
        if "No module named" in last:
            last += "; an A/B needs an ndbench with this verb on both sides"
        return f"{self.side.label} {self.side.ref} ended: {last} (more in {self._log})"
