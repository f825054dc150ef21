"""From whatever ends a command to one readable line on stderr and an exit code.

The user's mistakes are 2, ours 70 with the traceback kept; signals unwind the stack first, so that ranks are ended and
locks given back.
"""

from __future__ import annotations

import contextlib
import dis
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType

USAGE, INTERNAL, INTERRUPTED, OUTPUT_CLOSED = 2, 70, 130, 141


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. Not an Exception, so that nothing on the way swallows it; ``finally`` blocks run."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM, and SIGHUP where it is not ignored (nohup), unwind the stack like Ctrl-C does."""

    def raise_terminated(number: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated(number)

    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, raise_terminated)
    except ValueError:  # not the main thread: whoever started us there has its own handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_of(error: BaseException, arguments: Sequence[str]) -> int:
    """Say what ended the command, and return its exit code."""
    if isinstance(error, KeyboardInterrupt):
        return say("interrupted", INTERRUPTED)
    if isinstance(error, Terminated):
        said = "terminated" if error.number == signal.SIGTERM else f"ended by {error.number.name}"
        return say(said, 128 + error.number)
    if isinstance(error, SystemExit):  # of code that is not ours: with its 0 a gate would be green without measuring
        return say(f"code of the user's own called sys.exit({error.code!r}) instead of returning", USAGE)
    if isinstance(error, BrokenPipeError) and _output_closed():
        # what is still buffered goes nowhere, and must not fail a second time when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    debug = "--debug" in arguments
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if _is_usage(error):
        return say(str(error), USAGE)
    told = " ".join(f"{type(error).__name__}: {error}".split())
    where = "" if debug else f" (traceback {_save(error, arguments)})"
    return say(f"internal error: {told}{where}", INTERNAL)


def say(message: str, code: int) -> int:
    try:
        sys.stderr.write(f"ndbench: {message}\n")
        sys.stderr.flush()
    except OSError:  # a full disk, a reader that has gone: the exit code still tells, and Python must not change it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return code


def open_streams() -> None:
    """Give standard streams that were closed (``>&-``) to nobody, so that no file of ours is opened in their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _is_usage(error: BaseException) -> bool:
    """Whether the user can mend it: the system refused a file, or code of ours raised a ``ValueError`` on purpose."""
    if isinstance(error, OSError):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, ValueError):
        return False
    code = last.tb_frame.f_code
    ours = Path(code.co_filename).is_relative_to(Path(__file__).parent)
    # int("x") in a line of ours is a slip of ours, not a message for the user
    return ours and dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _save(error: BaseException, arguments: Sequence[str]) -> str:
    try:
        handle, path = tempfile.mkstemp(prefix="ndbench-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(f"ndbench {' '.join(arguments)}\nPython {sys.version}\n\n")
            stream.writelines(traceback.format_exception(error))
    except OSError as full:
        return f"not kept: {full}; --debug shows it"
    return f"in {path}"


def _output_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
