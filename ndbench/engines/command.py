"""``engine=command``: measure a user's own training script, unchanged but for one JSON line a step.

Each rank starts the script as a process of its own with torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT) and reads its standard output. A line is a step when it is a JSON object with a ``loss``;
every other line goes to the rank's log. Keys: ``loss`` (required), ``grad_norm`` and ``tokens`` (loss-bearing tokens of
the global batch). The script runs freely; a step ends when its line arrives, by the harness's clock. Rank 0's lines
are enough: another rank may print none.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndbench.engines.protocol import Batch, StepResult
from ndbench.run.process import descendants, end_descendants

if TYPE_CHECKING:
    from ndbench.config import Cell
    from ndbench.parallel.mesh import Mesh

CLOSING_SECONDS = 60.0
"""How long a script may take to end after its last step: to save, say."""
AT_ONCE_SECONDS = 1e-4
"""A line that takes less to arrive was written before it was asked for; no step is that short."""
LAST_WORDS_SECONDS = 2.0
"""How long the end of the error output of a script that ended is waited for: another process may hold it open."""


_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""What torch puts before the lines of a traceback once there is a process group."""


class ScriptError(RuntimeError):
    """The script ended when it should not have. What it said itself is in the rank's log already."""

    in_log = True

    def __init__(self, told: str, failed_at: float | None = None) -> None:
        super().__init__(told)
        self.failed_at = failed_at
        """``time.time()`` of the script's first word on it; the process itself may take a second to end."""


class CommandEngine:
    """One child process a rank; see the module's docstring for what it prints."""

    in_process = False
    """The harness cannot record collectives or plant a slowdown inside another process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._words: list[str] = []
        self._environment: dict[str, str] = {}
        self._at_once = 0
        """Steps whose line was there when it was asked for."""
        self._steps = 0
        self._expected = 0
        self._rank = 0
        self.silent = False
        """This rank's script printed no step and ended well: rank 0 speaks for it."""
        self._stepping = False
        self._told = False
        """A step has said already how the script ended."""
        self._spoke = 0.0
        """``time.monotonic()`` of the start or of the last step's line."""
        self._errors = deque[str](maxlen=200)
        """Last lines of the script's error output. The script may be ahead of its reader: no step clears them."""
        self._failed_at: float | None = None
        self._listener: threading.Thread | None = None
        self._others: list[Any] = []
        """Processes below this rank that were there before the script."""

    def refuse(self, cell: Cell) -> str | None:
        command = cell.config.engine.command
        if not command or not command.strip():
            return "engine=command needs engine.command='python my_script.py …'"
        try:
            words = shlex.split(command)
        except ValueError as error:
            return f"engine.command {command!r} cannot be split into words: {error}"
        if shutil.which(words[0]) is None:
            return f"engine.command: there is no program '{words[0]}' on the PATH"
        script = next((word for word in words[1:] if word.endswith(".py")), None)
        if script is not None and not Path(script).exists():
            return f"engine.command: there is no file '{script}' in {Path.cwd()}"
        if cell.config.measure.handicap:
            return f"measure.handicap={cell.config.measure.handicap} cannot slow down another process"
        if cell.config.measure.profile:
            return "measure.profile=true cannot look into another process"
        return None

    def setup(self, cell: Cell, mesh: Mesh) -> None:
        del mesh  # the script builds its own
        command = cell.config.engine.command
        assert command is not None, "refused before start otherwise"
        words = shlex.split(command)
        if words[0] in ("python", "python3"):
            words[0] = sys.executable  # the interpreter whose packages are measured
        training = cell.config.training
        self._environment = dict(os.environ) | {
            "PYTHONUNBUFFERED": "1",
            "NDBENCH_STEPS": str(training.steps),
            "NDBENCH_GLOBAL_BATCH_SIZE": str(training.global_batch_size),
            "NDBENCH_SEQUENCE_LENGTH": str(training.sequence_length),
        }
        self._expected, self._rank = training.steps, int(self._environment.get("RANK", "0"))
        # a child dies with its rank, whatever ends the rank
        self._words = [sys.executable, "-m", "ndbench.run.child", *words]

    def _start(self) -> subprocess.Popen[str]:
        """With the first step, not before: nothing is measured beside the script, and no line is there early."""
        self._others = descendants()
        self._process = subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,  # a group of its own may not read the terminal
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # the rank's log gets it line by line; a failure is told with its end
            encoding="utf-8",
            errors="replace",
            env=self._environment,
            process_group=0,
        )
        self._spoke = time.monotonic()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="ndbench-script-stderr")
        self._listener.start()
        return self._process

    def _listen(self) -> None:
        assert self._process is not None, "started"
        assert self._process.stderr is not None, "opened as a pipe"
        for line in self._process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            line = _PREFIX.sub("", line)
            if line.startswith("Traceback "):
                self._failed_at = time.time()
            self._errors.append(line.rstrip())

    def step(self, batch: Batch) -> StepResult:
        del batch  # the script reads its own data
        assert self._words, "setup comes first"
        process = self._process or self._start()
        assert process.stdout is not None, "opened as a pipe"
        if self.silent:
            return StepResult(math.nan, None, None)
        self._stepping = True
        asked = time.perf_counter()
        for line in process.stdout:
            values = _step_line(line)
            if values is None:
                sys.stderr.write(line)
                continue
            self._steps += 1
            self._at_once += time.perf_counter() - asked < AT_ONCE_SECONDS
            if self._steps == self._expected and 2 * self._at_once > self._expected:
                self._told = True
                raise ScriptError(
                    f"{self._at_once} of the {self._expected} step lines were there at once: print and flush each line "
                    "when its step ends, or the time of a step cannot be told"
                )
            self._spoke, self._stepping = time.monotonic(), False
            return StepResult(values["loss"], values.get("grad_norm"), values.get("tokens"))
        code = process.wait()
        self._stepping = False
        self._told = not (code == 0 and self._rank != 0 and self._steps == 0)
        if not self._told:
            self.silent = True
            return StepResult(math.nan, None, None)
        raise self._ended(code)

    def _ended(self, code: int) -> ScriptError:
        """What a script that ended before its last step did, in a line."""
        if self._steps == 0:
            where = "before its first step line"
        else:
            where = f"after step {self._steps - 1} ({self._steps} of {self._expected} step lines)"
        if code == -signal.SIGUSR1:  # the run's limit: ranks and scripts are asked for their stacks
            silence = time.monotonic() - self._spoke
            return ScriptError(f"the script printed nothing for {silence:.0f} s {where} and was ended")
        if code == 0:
            return ScriptError(
                f"the script ended with exit code 0 {where}; rank 0 must print one JSON object with a 'loss' for each "
                "of NDBENCH_STEPS steps, other ranks as many or none"
            )
        return ScriptError(f"the script ended with {_code(code)} {where}{self._last_words()}", self._failed_at)

    def _last_words(self) -> str:
        """The exception in the script's error output, or its last lines."""
        if self._listener is not None:
            self._listener.join(LAST_WORDS_SECONDS)
        said = [line for line in list(self._errors) if line.strip()]
        traced = [index for index, line in enumerate(said) if line.startswith("Traceback ")]
        ends = [line for line in said[traced[-1] + 1 :] if not line[0].isspace()] if traced else []
        words = [line.strip() for line in ends[:1] or said[-3:]]
        return f": {' | '.join(words)}" if words else "; it said nothing about it"

    def info(self) -> dict[str, Any]:
        return {"command": self._words, "step_lines": self._steps}

    def _drain(self) -> None:
        """Read on to the end in a thread of its own: a script that still prints must not block on a full pipe.

        The thread owns the pipe from here on and is never waited for: who else holds the other end is not known.
        """
        stream = self._process.stdout if self._process is not None else None
        if stream is not None:
            threading.Thread(target=lambda: [sys.stderr.write(line) for line in stream], daemon=True).start()

    def close(self) -> None:
        if self._process is None:
            return
        killed = False
        if self._stepping:  # what a step raised ends the run: nothing is waited for
            self._process.kill()
        try:
            self._drain()
            self._process.wait(timeout=CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            killed = True
            self._process.kill()
            self._process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # its data loaders, say, that it did not end itself
                os.killpg(self._process.pid, signal.SIGKILL)
            end_descendants(self._others)  # those in a session of their own, which a rank adopts
        if self._told:
            return
        if killed:
            raise ScriptError(f"the script did not end within {CLOSING_SECONDS:.0f} s of its last step")
        if self._process.returncode == -signal.SIGABRT:
            # torch's gloo threads may abort a script at the interpreter's end, about once in 30 ends of a DDP script on
            # a busy CPU (torch 2.13): the steps are complete, and a gate must not be red for it by chance.
            sys.stderr.write("ndbench: the script aborted (SIGABRT) after its last step; its steps count\n")
        elif self._process.returncode == -signal.SIGUSR1:
            silence = time.monotonic() - self._spoke
            raise ScriptError(f"the script did not end for {silence:.0f} s after its last step and was ended")
        elif self._process.returncode:
            code = _code(self._process.returncode)
            raise ScriptError(f"the script ended with {code} after its last step{self._last_words()}", self._failed_at)


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"exit code {code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


def _step_line(line: str) -> dict[str, Any] | None:
    """The step in a line of output, or None. Raises ``ValueError`` for a step whose numbers are not numbers."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(values, dict) or "loss" not in values:
        return None
    for key in ("loss", "grad_norm", "tokens"):
        value = values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"the script's step line has {key} = {value!r}, which is not a number")
    return values
