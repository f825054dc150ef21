"""The parent's side of a tracker: sends a run that has ended, in a process of its own with a time limit.

Whatever happens there comes back as one line of warning. It changes no number and no exit code, and no secret is in it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import netrc
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil

from ndbench.compare.result import Comparison
from ndbench.config import TrackerConfig
from ndbench.counted import counted
from ndbench.report.wandb_runs import without_secrets
from ndbench.results.store import RunFolder

PUBLIC_SERVER = "https://api.wandb.ai"
GRACE_SECONDS = 10.0
"""For wandb to end its service (it does as its process exits) after it has answered; then both are ended."""


class TrackerError(ValueError):
    """Sending or fetching did not work: one line, without secrets."""


def check(tracker: TrackerConfig) -> None:
    """Raises ``ValueError`` for a tracker that does not exist or a mode or time limit that makes no sense."""
    if tracker.name not in ("none", "wandb"):
        raise ValueError(f"tracker.name={tracker.name}: none or wandb is expected")
    if tracker.mode not in ("auto", "online", "offline"):
        raise ValueError(f"tracker.mode={tracker.mode}: auto, online or offline is expected")
    if not tracker.timeout > 0:
        raise ValueError(f"tracker.timeout={tracker.timeout}: seconds above 0 are expected")


def track(run: RunFolder, comparison: Comparison, tracker: TrackerConfig) -> tuple[str | None, str | None]:
    """Send a run after its verdict: (what was done, warning). Never raises for a fault of the tracker."""
    if tracker.name == "none":
        return None, None
    try:
        return push_run(run, comparison, tracker), None
    except (ValueError, OSError) as error:  # an answer that is no answer is a ValueError too
        return None, f"tracker: {error}; the run itself is whole. Send it later with: ndbench wandb push {run.path}"


def push_run(run: RunFolder, comparison: Comparison, tracker: TrackerConfig) -> str:
    """Send a stored run and say what was sent. Raises :class:`TrackerError`."""
    folder = str(run.path.resolve())
    return _push({"folder": folder, "home": folder, "comparison": comparison.to_json()}, tracker)


def track_training(folder: Path, tracker: TrackerConfig) -> tuple[str | None, str | None]:
    """Send the log of a training run that has ended: (what was done, warning)."""
    if tracker.name == "none":
        return None, None
    place = str(folder.resolve())
    try:
        return _push({"folder": place, "home": place, "training": True}, tracker), None
    except (TrackerError, OSError) as error:
        return None, f"tracker: {error}; the run itself is whole"


def push_baseline(folder: Path, tracker: TrackerConfig) -> str:
    """Send the accepted sessions of one suite's baseline folder, and the folder as an artifact.

    wandb's own files go to ``<results.dir>/wandb/``, not between what is committed.
    """
    folder = folder.resolve()
    results = folder.parents[2] if folder.parents[1].name == "baselines" else folder.parent
    home = results / "wandb" / f"{folder.parent.name}-{folder.name}"
    return _push({"folder": str(folder), "home": str(home), "baseline": True}, tracker)


def fetch_artifact(reference: str, into: Path, timeout: float = 120.0) -> None:
    """Download ``ENTITY/PROJECT/NAME:ALIAS`` into a folder. Raises :class:`TrackerError`."""
    _call({"fetch": reference, "into": str(into)}, timeout, online=True, scratch=into.parent)


def _push(job: dict[str, Any], tracker: TrackerConfig) -> str:
    check(tracker)
    mode = tracker.mode
    if mode == "auto":
        asked = os.environ.get("WANDB_MODE")
        mode = asked if asked in ("online", "offline") else ("online" if known_secrets() else "offline")
    job |= {"mode": mode, "project": tracker.project, "entity": tracker.entity, "tags": list(tracker.tags)}
    answer = _call(job | {"hide": known_secrets()}, tracker.timeout, online=mode == "online", scratch=Path(job["home"]))
    folder = Path(job["home"]) / "wandb"
    done = f"wandb: {counted(int(answer['sent']), 'run')} {'sent' if answer['online'] else 'written'}"
    if answer["unchanged"]:
        done += f", {answer['unchanged']} were there already"
    where = f" to project {tracker.project}" if answer["online"] else ""
    sync = "" if answer["online"] else f"; to send them: wandb sync {folder}/offline-run-*"
    return done + where + sync


def _call(job: dict[str, Any], timeout: float, *, online: bool, scratch: Path) -> dict[str, Any]:
    """One job in a process of its own. Raises :class:`TrackerError` when it fails, hangs or dies."""
    if find_spec("wandb") is None:
        raise TrackerError("wandb is not installed: pip install 'ndbench[wandb]'")
    environment = dict(os.environ)
    place = scratch / "wandb"
    # staged files stay beside the run: the home folder may be read-only, or full
    for name, sub in (("WANDB_DATA_DIR", "data"), ("WANDB_CACHE_DIR", "cache"), ("WANDB_CONFIG_DIR", "config")):
        environment.setdefault(name, str(place / sub))
    for name in ("WANDB_RUN_ID", "WANDB_RUN_GROUP", "WANDB_RESUME", "WANDB_NAME", "WANDB_NOTES", "WANDB_TAGS"):
        environment.pop(name, None)  # they mean one run, and there are many here
    if not online:
        environment.pop("WANDB_API_KEY", None)
    read, write = os.pipe()
    with tempfile.TemporaryFile() as said, os.fdopen(read, "rb") as answers:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(write)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(write)
        try:
            text = _converse(process, json.dumps(job).encode(), answers, timeout)
            if text:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
        finally:
            _end(process)
        said.seek(0)
        last = " ".join(said.read()[-300:].decode(errors="replace").split())
    if text is None:
        raise TrackerError(f"wandb did not finish within {timeout:g} s")
    answer: dict[str, Any] = json.loads(text) if text else {"error": f"wandb's process died: {last}"}
    if "error" in answer:
        raise TrackerError(without_secrets(f"wandb: {answer['error']}", known_secrets()))
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all it started: what goes on working (wandb's service has a session of its own) would disturb
    the next measurement."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.wait()


_CHILD = "import sys; from ndbench.report import wandb_push as p; p.PROTOCOL_OUT = int(sys.argv[1]); sys.exit(p.main())"


def _converse(process: subprocess.Popen[bytes], job: bytes, answers: Any, timeout: float) -> str | None:
    """The answer, empty when the process ended without one, null when the time was up."""
    end = time.monotonic() + timeout
    assert process.stdin is not None, "asked for above"
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(job)
        process.stdin.close()
    found = b""
    while True:
        ready, _, _ = select.select([answers], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        piece = os.read(answers.fileno(), 65536)
        found += piece
        # helpers of wandb may hold the pipe open: a whole answer is enough
        if not piece or found.endswith(b"}"):
            return found.decode()


def known_secrets() -> list[str]:
    """The keys wandb would use here: from the environment, or from ``~/.netrc``."""
    host = urlparse(os.environ.get("WANDB_BASE_URL", PUBLIC_SERVER)).hostname or ""
    found = [
        os.environ.get("WANDB_API_KEY", ""),
        *_netrc_keys(host, os.environ.get("NETRC") or "~/.netrc", os.environ.get("HOME")),
    ]
    return [key for key in found if key]


@functools.lru_cache(maxsize=8)
def _netrc_keys(host: str, path: str, _home: str | None) -> tuple[str, ...]:
    """Read once a process (and home): reports ask for every piece of text they show."""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        known = netrc.netrc(str(Path(path).expanduser())).authenticators(host)
        return (known[2],) if known else ()
    return ()
