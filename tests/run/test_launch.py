"""What becomes of a repeat: every way of going wrong is an outcome of its own, with a line, and leaves no process."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ndbench.config import Cell, Config, EngineConfig, HardwareConfig
from ndbench.parallel.config import ParallelismConfig
from ndbench.results.schema import Record
from ndbench.run import launch as launching
from ndbench.run.progress import StepCounter
from ndbench.run.record import build_record
from ndbench.run.task import Task

ENGINE = "tests.run.engines.SmallEngine"


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    launching.start_fork_server(launching.model_modules(["llama"]), "forkserver")


def make_cell(ranks: int = 2, timeout: float = 60.0, warmup: int | None = None, **options: object) -> Cell:
    config = Config(world_size=ranks)
    config.model.vocab_size, config.model.hidden_size = 32, 16
    config.hardware = HardwareConfig(name="cpu", device="cpu", device_count=ranks)
    config.parallelism = ParallelismConfig(dp_replicate_size=ranks)
    config.training.global_batch_size, config.training.sequence_length, config.training.steps = 4, 16, 6
    config.engine = EngineConfig(name="small", target=ENGINE, options=dict(options))
    config.measure.timeout, config.measure.warmup = timeout, warmup
    return Cell("ddp", "test", config)


def run(cell: Cell, folder: Path, structure: bool = False, handicap: float = 0.0) -> tuple[Record, Task]:
    folder.mkdir(exist_ok=True)
    task = Task(cell, 0, 0, structure, handicap, folder, os.getpid(), started=time.time())
    task.save()
    StepCounter(task.counter_path, create=True)
    result = launching.launch(task, cell.world_size, cell.config.measure.timeout, "forkserver")
    record = build_record(
        cell=cell,
        result=result,
        run="r",
        repeat=0,
        seed=0,
        start="2026-01-01T00:00:00+00:00",
        end="2026-01-01T00:00:10+00:00",
        cell_version="v",
        code={"commit": None, "dirty": None},
        fingerprint={"hardware": {}, "software": {}, "informational": {}},
    )
    return record, task


@pytest.mark.timeout(120)
def test_a_good_repeat_is_ok_and_whole(tmp_path: Path) -> None:
    record, task = run(make_cell(), tmp_path, structure=True)
    assert record["outcome"] == "ok", record["reason"]
    assert len(record["steps"]["loss"]) == len(record["steps"]["seconds"]) == 6
    assert record["steps"]["loss"][-1] < record["steps"]["loss"][0]
    assert record["tokens"] == {"per_step": 64, "valid": [64] * 6}
    assert record["engine"] == {"steps": 7}, "the structure step is one more, after the timed ones"
    seconds = record["metrics"]["step_seconds"]["value"]
    assert record["metrics"]["tokens_per_second"]["value"] == pytest.approx(64 / seconds)
    reduced = {(row["op"], row["axis"]): row for row in record["structure"]["collectives"]}
    assert reduced["all_reduce", "dp_replicate"]["count"] == 4, "three gradients and the loss"
    assert record["structure"]["flops"] > 0
    assert record["metrics"]["peak_allocated_bytes"]["value"] == record["structure"]["tracked_peak_bytes"] > 0
    assert StepCounter(task.counter_path).get() == 5


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [
        ("raise", "failed", "rank 1: RuntimeError: loss scale 0 at step 2"),
        ("setup", "failed", r"rank [01]: ValueError: the 3 weights do not fit 4 ranks"),
        ("nothing", "failed", r"rank [01]: TypeError: the engine's loss at step 0 is a NoneType without it, not a"),
        ("text", "failed", r"rank [01]: TypeError: the engine's loss at step 0 is 'x', not a number"),
        ("oom", "oom", "rank 1: Tried to allocate 3.00 GiB"),
        ("killed", "failed", "rank 1 was killed by SIGKILL"),
        ("exit", "failed", "rank 1 ended with exit code 7"),
        ("nonfinite", "invalid", "loss is not finite at step 2"),
        ("disagree", "invalid", "ranks 0 and 1 disagree about loss at step 2"),
        ("tokens", "invalid", "the engine counted 71 tokens at step 2, the data has 64"),
    ],
)
def test_every_fault_is_an_outcome_with_its_line(tmp_path: Path, fault: str, outcome: str, reason: str) -> None:
    others = frozenset(process.pid for process in launching.ranks_of_this_process())
    began = time.monotonic()
    record, _ = run(make_cell(fault=fault), tmp_path)
    assert record["outcome"] == outcome, record
    assert re.match(reason, record["reason"]), record["reason"]
    assert time.monotonic() - began < 30, "the other rank waits in a collective and must not hold the launch up"
    assert not launching.ranks_of_this_process(others)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "on_rank", "reason"),
    [
        ("exit 0", None, "rank [01] ended with exit code 0 before its report"),
        ("exit 0", 1, "rank 1 ended with exit code 0 before its report"),
        ("sys.exit", None, "rank [01]: SystemExit: 0"),
        ("interrupt", None, "rank [01]: KeyboardInterrupt"),
    ],
)
def test_a_rank_that_ends_as_if_all_were_well_has_failed(
    tmp_path: Path, fault: str, on_rank: int | None, reason: str
) -> None:
    """Elastic waits without end for the return value of a rank that has ended with status 0."""
    record, _ = run(make_cell(fault=fault, on_rank=on_rank), tmp_path)
    assert record["outcome"] == "failed", record
    assert re.fullmatch(reason, record["reason"]), record["reason"]


def test_too_few_open_files_are_refused() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = psutil.Process().num_fds() + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        with pytest.raises(
            ValueError, match=rf"^{few} files may be open at once, a launch of 2 ranks needs \d+: raise the"
        ):
            launching._refuse_few_files(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    launching._refuse_few_files(2)


@pytest.mark.timeout(30)
def test_a_launch_that_goes_on_without_ranks_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "STACKS_WAIT", 0.1)
    monkeypatch.setattr(launching, "LAST_WAIT", 0.2)
    others = frozenset(process.pid for process in launching.ranks_of_this_process())
    end = time.monotonic() + 20
    with pytest.raises(launching._Stuck), launching._Watchdog(0.1, others) as watchdog:  # noqa: PT012
        while time.monotonic() < end:
            time.sleep(0.02)
    assert watchdog.expired


@pytest.mark.timeout(120)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_helpers_of_a_launch_outlive_a_signal_to_the_group(tmp_path: Path, signum: signal.Signals) -> None:
    """Sent while they start, before any line of theirs has run, and once more when they serve."""
    script = tmp_path / "server.py"
    script.write_text(
        "import multiprocessing, os, signal, sys\n"
        "from ndbench.run import launch\n"
        "if __name__ == '__main__':\n"
        "    number = int(sys.argv[1])\n"
        "    signal.signal(number, lambda *_: print('heard', flush=True))\n"
        "    launch.start_fork_server([], 'forkserver')\n"
        "    os.killpg(0, number)\n"
        "    context = multiprocessing.get_context('forkserver')\n"
        "    lock = context.Lock()\n"
        "    for _ in range(2):\n"
        "        rank = context.Process(target=int)\n"
        "        rank.start()\n"
        "        rank.join(50)\n"
        "        print('ended', rank.exitcode, flush=True)\n"
        "        os.killpg(0, number)\n"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.run(
        [sys.executable, str(script), str(int(signum))],
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert process.stderr == ""
    assert process.stdout.split("\n") == ["heard", "ended 0", "heard", "ended 0", "heard", ""]


@pytest.mark.timeout(120)
def test_a_hung_rank_ends_in_a_timeout_with_every_ranks_stack_in_its_log(tmp_path: Path) -> None:
    others = frozenset(process.pid for process in launching.ranks_of_this_process())
    began = time.monotonic()
    record, task = run(make_cell(fault="hang", timeout=6.0), tmp_path)
    assert record["outcome"] == "timeout"
    assert "6 s" in record["reason"]
    assert time.monotonic() - began < 25
    assert "_go_wrong" in task.log_path(1).read_text(), "the hung rank shows where it sleeps"
    assert "all_reduce" in task.log_path(0).read_text(), "the other one shows what it waits in"
    assert not launching.ranks_of_this_process(others)


@pytest.mark.timeout(120)
def test_a_handicap_makes_each_step_longer_by_its_factor(tmp_path: Path) -> None:
    plain, _ = run(make_cell(seconds=0.05, warmup=1), tmp_path / "a")
    slow, _ = run(make_cell(seconds=0.05, warmup=1), tmp_path / "b", handicap=2.0)
    ratio = slow["metrics"]["step_seconds"]["value"] / plain["metrics"]["step_seconds"]["value"]
    assert 2.5 < ratio < 3.6
    assert slow["steps"]["loss"] == plain["steps"]["loss"]


def test_ranks_die_with_the_run(tmp_path: Path) -> None:
    """``kill -9`` of a run takes every rank along, hung ones too, and with them the fork server."""
    script = tmp_path / "hang.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.run.test_launch import make_cell, run\n"
        "from ndbench.run import launch\n"
        "if __name__ == '__main__':\n"
        "    launch.start_fork_server([], 'forkserver')\n"
        "    run(make_cell(fault='hang', timeout=100.0), Path(sys.argv[2]))\n"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, str(script), root, str(tmp_path / "task")], cwd=root)
    try:
        counter = tmp_path / "task" / "step"
        deadline = time.monotonic() + 60
        while not (counter.is_file() and StepCounter(counter).get() >= 1):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        family: list[psutil.Process] = []
        while not any(child.name() == "sleep" for child in family):
            assert time.monotonic() < deadline
            family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4, "a fork server, two ranks and what one of them started in a session of its own"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_ranks_are_found_and_ended_whatever_the_start_method(method: str) -> None:
    others = frozenset(process.pid for process in launching.ranks_of_this_process())
    rank = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,), daemon=True)
    rank.start()
    deadline = time.monotonic() + 10
    while rank.pid not in {process.pid for process in launching.ranks_of_this_process()}:
        assert time.monotonic() < deadline, "it has started, but may not be what it will be yet"
        time.sleep(0.05)
    launching.kill_ranks(others)
    rank.join(5)
    assert rank.exitcode not in (None, 0)


def test_the_fork_server_has_the_model_and_nothing_that_asks_a_gpu(tmp_path: Path) -> None:
    """A CUDA context in the server breaks every rank; torchao, which transformers imports, would make one.

    In a process of its own: there is one server a process, and another test may have started it for other ranks.
    """
    told = tmp_path / "modules"
    code = f"from tests.run.test_launch import _ask_the_server; _ask_the_server({str(told)!r})"
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=True, timeout=150)
    loaded = json.loads(told.read_text())
    assert loaded == {"model": True, "torchao": "absent", "asks": "1"}


def _ask_the_server(path: str) -> None:
    launching.start_fork_server(["transformers.models.llama.modeling_llama"], "forkserver")
    rank = multiprocessing.get_context("forkserver").Process(target=_tell_modules, args=(Path(path),))
    rank.start()
    rank.join(120)


def _tell_modules(path: Path) -> None:
    loaded = {
        "model": "transformers.models.llama.modeling_llama" in sys.modules,
        "torchao": "loaded or barred" if "torchao" in sys.modules else "absent",
        "asks": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"),
    }
    path.write_text(json.dumps(loaded))


def test_what_the_ranks_of_a_plan_would_import_is_loaded_once() -> None:
    plain, compiled = make_cell(), make_cell()
    compiled.config.training.compile, compiled.config.engine.name = True, "torchtitan"
    plain.config.model.model_type = compiled.config.model.model_type = "llama"
    assert launching.preloaded([plain]) == ["transformers.models.llama.modeling_llama"]
    both = launching.preloaded([plain, compiled])
    assert both == [*launching.preloaded([plain]), *launching.COMPILER, *launching.TORCHTITAN]


def test_a_gradient_norm_at_some_steps_only_is_refused(tmp_path: Path) -> None:
    record, _ = run(make_cell(norm_every=2), tmp_path / "task")
    assert record["outcome"] == "failed"
    assert "no gradient norm at step 1" in record["reason"]


def test_ranks_that_end_without_a_report_have_failed(tmp_path: Path) -> None:
    task = Task(make_cell(), 0, 0, False, 0.0, tmp_path, os.getpid(), started=time.time())
    watchdog = launching._Watchdog(60.0, frozenset())
    result = launching._result(task, 2, watchdog, None, [])  # an engine that calls sys.exit(0)
    assert (result.outcome, result.reason) == ("failed", "2 of 2 ranks ended with exit code 0 before their report")
