"""``python -m ndbench.gate.agent``: one side of an A/B, in that side's interpreter and with that side's code.

Reads one JSON request a line from standard input and answers each with one line. Launches what it is told to and
decides nothing; it ends when its input does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from ndbench.run.process import die_with_parent

PROTOCOL = 1
"""Raised when a request changes its meaning; a side of another protocol is refused by name."""


def main() -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends this process itself
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints goes to the log, not between the answers
    serve(sys.stdin, answers)
    return 0


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer until the input ends. A request that fails is answered with what is wrong, in one line."""
    measurer: Any = None
    for line in requests:
        request = json.loads(line)
        try:
            if request["do"] == "hello":
                measurer = _measurer(request)
                answer = _facts()
            else:
                answer = {"record": _measure(measurer, request)}
        except (ValueError, OSError, ImportError) as error:
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _measurer(request: dict[str, Any]) -> Any:
    from ndbench.results.store import RunFolder
    from ndbench.run.launch import model_modules, start_fork_server
    from ndbench.run.repeat import Measurer

    start_fork_server(model_modules(request["model_types"]), request["start_method"])
    return Measurer(request["run"], RunFolder(Path(request["folder"])), Path.cwd())


def _facts() -> dict[str, Any]:
    import ndbench

    return {
        "protocol": PROTOCOL,
        "ndbench": ndbench.__version__,
        "package": str(Path(ndbench.__file__).parent),
        "python": sys.executable,
    }


def _measure(measurer: Any, request: dict[str, Any]) -> Any:
    from ndbench.config import cell_from_dict

    cell = cell_from_dict(request["cell"])
    turns = Path(request["turns"]) if request["turns"] else None
    return measurer.measure(cell, request["repeat"], note=_note, turns=turns)


def _note(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
