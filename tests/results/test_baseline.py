from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import ndbench.results
from ndbench.results import writing
from ndbench.results.baseline import accept, describe, list_baselines, prune, show
from ndbench.results.checks import RecordError
from ndbench.results.sessions import Baseline, baseline_of_run, read_baseline
from ndbench.results.store import RunFolder, UnreadableFile, read_json, write_json
from ndbench.results.writing import locked
from tests.records import a_record, not_ok, repeats

START = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)


def a_run(results: Path, day: int = 0, cells: tuple[str, ...] = ("fsdp8", "ddp8"), **fields: object) -> RunFolder:
    run = f"202611{day + 1:02d}-120000-abcdef"
    folder = RunFolder.create(results, run)
    for cell in cells:
        for record in repeats(cell, run=run, **fields):
            folder.write_record(record)
    return folder


def accepted(results: Path, day: int = 0, verdicts: dict[str, str] | None = None, **fields: object) -> Path:
    options = {key: fields.pop(key) for key in ("cells", "force") if key in fields}
    run = a_run(results, day, **fields)
    done = accept(
        run, f"day {day}", results_dir=results, verdicts=verdicts, now=START + timedelta(days=day), by="me", **options
    )
    return done.folder


def the_baseline(results: Path) -> Baseline:
    return read_baseline(None, hardware="cpu_x8", suite="hsdp_tp", results_dir=results)


def test_an_accepted_run_reads_back_to_the_bit(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    done = accept(run, "first", results_dir=tmp_path, by="me")
    assert done.folder == tmp_path / "baselines/cpu_x8/hsdp_tp/20261101-120000-abcdef"
    assert (done.cells, done.exit_code) == (["ddp8", "fsdp8"], 0)
    assert sorted(path.name for path in done.folder.iterdir()) == ["ddp8.json", "fsdp8.json", "session.json"]
    session = the_baseline(tmp_path).sessions[0]
    assert session.cells["fsdp8"] == [record for record in run.records() if record["cell"]["name"] == "fsdp8"]
    assert (session.by, session.reason, session.commit) == ("me", "first", "a" * 40)
    assert len(ndbench.results.load(done.folder)) == len(ndbench.results.load(tmp_path / "baselines")) == 6


def test_a_reason_is_required(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    for empty in ("", "  \n"):
        with pytest.raises(ValueError, match="a reason is needed"):
            accept(run, empty, results_dir=tmp_path)


def test_sessions_accumulate_in_the_order_of_acceptance_and_the_latest_eight_count(tmp_path: Path) -> None:
    for day in range(10):
        accepted(tmp_path, day)
    baseline = the_baseline(tmp_path)
    assert [session.reason for session in baseline.sessions] == [f"day {day}" for day in range(10)]
    assert [session.reason for session in baseline.segment("fsdp8")] == [f"day {day}" for day in range(2, 10)]
    assert round(baseline.sessions[0].age_days(START + timedelta(days=3)), 6) == 3


def test_accepting_the_same_run_twice_changes_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    first = accept(run, "first", results_dir=tmp_path)
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    second = accept(run, "again", results_dir=tmp_path)
    assert second.already == ["ddp8", "fsdp8"]
    assert second.cells == []
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == before


def test_cells_of_one_run_can_be_accepted_one_after_the_other(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    accept(run, "first", cells="fsdp*", results_dir=tmp_path)
    assert list(the_baseline(tmp_path).cells) == ["fsdp8"]
    accept(run, "second", cells="ddp8", results_dir=tmp_path)
    session = the_baseline(tmp_path).sessions[0]
    assert sorted(session.cells) == ["ddp8", "fsdp8"]
    assert session.reason == "first; ddp8: second"


def test_other_measurements_never_overwrite_a_session(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    accept(run, "first", results_dir=tmp_path)
    run.write_record(a_record("fsdp8", run=run.path.name, repeat=1, seconds=0.3))
    with pytest.raises(ValueError, match="not overwritten"):
        accept(run, "again", results_dir=tmp_path)


def test_a_pattern_that_matches_nothing_names_the_cells(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with pytest.raises(ValueError, match=r"matches tp\*; its cells: ddp8, fsdp8"):
        accept(run, "x", cells="fsdp8,tp*", results_dir=tmp_path)


@pytest.mark.parametrize("outcome", ["failed", "timeout", "invalid"])
def test_a_cell_that_did_not_run_well_is_refused_and_the_rest_taken(tmp_path: Path, outcome: str) -> None:
    run = a_run(tmp_path)
    run.write_record(not_ok(outcome, "fsdp8", run=run.path.name, repeat=2, reason="rank 3 was killed"))
    done = accept(run, "x", results_dir=tmp_path)
    assert done.cells == ["ddp8"]
    assert done.refused == {"fsdp8": f"1 of 3 repeats {outcome}: rank 3 was killed"}
    assert done.exit_code == 3
    with pytest.raises(ValueError, match=r"nothing .* was accepted: fsdp8: 1 of 3 repeats"):
        accept(run, "x", results_dir=tmp_path, cells="fsdp8", force=True)


def test_a_cell_out_of_memory_is_a_reference_too(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "20261101-120000-abcdef")
    for repeat in range(3):
        run.write_record(not_ok("oom", "fsdp8", run=run.path.name, repeat=repeat))
    assert accept(run, "it never fitted", results_dir=tmp_path).cells == ["fsdp8"]


def test_a_nonfinite_step_is_never_a_reference(tmp_path: Path) -> None:
    run = a_run(tmp_path, cells=("fsdp8",), loss=[5.0] * 11 + [None])
    with pytest.raises(ValueError, match="step 11 of repeat 0 is not finite"):
        accept(run, "x", results_dir=tmp_path, force=True)


def test_repeats_from_different_machines_are_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path, cells=("fsdp8",))
    run.write_record(a_record("fsdp8", run=run.path.name, repeat=1, hardware={"model": "other"}))
    with pytest.raises(ValueError, match="measured on different hardware"):
        accept(run, "x", results_dir=tmp_path)


def test_a_regressed_cell_is_held_back_unless_it_is_named(tmp_path: Path) -> None:
    accepted(tmp_path, 0)
    run = a_run(tmp_path, 1, seconds=0.3)
    verdicts = {"fsdp8": "regressed", "ddp8": "pass"}
    done = accept(run, "weekly", results_dir=tmp_path, verdicts=verdicts)
    assert (done.cells, done.exit_code) == (["ddp8"], 1)
    assert "--cells fsdp8" in done.refused["fsdp8"]
    held = accept(run, "weekly", results_dir=tmp_path, verdicts=verdicts, cells="ddp8,fsdp*")
    assert "fsdp8" in held.refused
    named = accept(run, "recomputes on purpose", results_dir=tmp_path, verdicts=verdicts, cells="fsdp8")
    assert (named.cells, named.restarted, named.exit_code) == (["fsdp8"], ["fsdp8"], 0)


def test_the_verdict_in_the_run_folder_counts_when_none_is_handed_in(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    write_json(run.verdict_path, {"cells": [{"name": "fsdp8", "verdict": "regressed"}]})
    assert list(accept(run, "x", results_dir=tmp_path).refused) == ["fsdp8"]
    assert accept(run, "x", results_dir=tmp_path, force=True).restarted == ["fsdp8"]


def test_an_accepted_change_starts_a_new_level_and_can_be_followed_by_another(tmp_path: Path) -> None:
    for day in range(3):
        accepted(tmp_path, day)
    accepted(tmp_path, 3, {"fsdp8": "regressed"}, cells="fsdp8")
    accepted(tmp_path, 4)
    baseline = the_baseline(tmp_path)
    assert [session.reason for session in baseline.segment("fsdp8")] == ["day 3", "day 4"]
    assert len(baseline.segment("ddp8")) == 4
    assert len(baseline.history("fsdp8")) == 5
    accepted(tmp_path, 5, {"fsdp8": "regressed"}, cells="fsdp8")
    assert [session.reason for session in the_baseline(tmp_path).segment("fsdp8")] == ["day 5"]


def test_one_improved_session_is_averaged_two_start_a_new_level(tmp_path: Path) -> None:
    for day in range(3):
        accepted(tmp_path, day)
    accepted(tmp_path, 3, {"fsdp8": "improved"})
    assert len(the_baseline(tmp_path).segment("fsdp8")) == 4
    accepted(tmp_path, 4, {"fsdp8": "improved"})
    assert [session.reason for session in the_baseline(tmp_path).segment("fsdp8")] == ["day 3", "day 4"]


def test_a_cell_that_left_the_suite_is_retired_only_by_name_and_may_come_back(tmp_path: Path) -> None:
    accepted(tmp_path, 0)
    run = a_run(tmp_path, 1, cells=("ddp8",))
    accept(run, "weekly", results_dir=tmp_path, verdicts={"fsdp8": "missing"}, now=START + timedelta(days=1))
    assert set(the_baseline(tmp_path).cells) == {"fsdp8", "ddp8"}
    done = accept(run, "dropped", results_dir=tmp_path, verdicts={"fsdp8": "missing"}, cells="fsdp8")
    assert done.retired == ["fsdp8"]
    assert set(the_baseline(tmp_path).cells) == {"ddp8"}
    assert the_baseline(tmp_path).segment("fsdp8") == []
    accepted(tmp_path, 2, cells="fsdp8")
    assert set(the_baseline(tmp_path).cells) == {"fsdp8", "ddp8"}


def test_a_downloaded_artifact_is_accepted_from_anywhere(tmp_path: Path) -> None:
    run = a_run(tmp_path / "ci")
    artifact = tmp_path / "downloads" / "ndbench-results"
    artifact.parent.mkdir()
    (tmp_path / "downloads" / "other").mkdir()
    run.path.rename(artifact)
    write_json(artifact / "plan.json", {"cells": []})
    done = accept(tmp_path / "downloads", "from CI", results_dir=tmp_path / "mine")
    assert done.folder.is_relative_to(tmp_path / "mine")


def test_no_baseline_yet_is_not_an_error_but_a_named_one_that_is_absent_is(tmp_path: Path) -> None:
    assert the_baseline(tmp_path).sessions == []
    with pytest.raises(ValueError, match="is not a folder"):
        read_baseline(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no session was ever accepted"):
        read_baseline(tmp_path)


@pytest.mark.parametrize("name", ["fsdp8.json", "session.json"])
@pytest.mark.parametrize("keep", [0, 30, -2])
def test_a_truncated_baseline_file_is_an_error_naming_it(tmp_path: Path, name: str, keep: int) -> None:
    folder = accepted(tmp_path)
    text = (folder / name).read_text()
    (folder / name).write_text(text[:keep].rstrip())
    with pytest.raises(UnreadableFile, match=name):
        the_baseline(tmp_path)


def test_a_listed_cell_without_its_file_is_an_error(tmp_path: Path) -> None:
    folder = accepted(tmp_path)
    (folder / "fsdp8.json").unlink()
    with pytest.raises(UnreadableFile, match=r"fsdp8\.json: session\.json lists the cell"):
        the_baseline(tmp_path)


def test_a_newer_baseline_is_refused_naming_both_versions(tmp_path: Path) -> None:
    folder = accepted(tmp_path)
    for name in ("fsdp8.json", "session.json"):
        write_json(folder / name, read_json(folder / name) | {"schema_version": 7})
        with pytest.raises(RecordError, match=rf"{name}.*has schema 7, this ndbench reads up to 1"):
            the_baseline(tmp_path)


def test_an_interrupted_acceptance_is_not_read(tmp_path: Path) -> None:
    accepted(tmp_path)
    staged = tmp_path / "baselines/cpu_x8/hsdp_tp/.20261105-000000-aaaaaa.1.tmp"
    staged.mkdir()
    (staged / "fsdp8.json").write_text('{"half')
    (staged / "session.json").write_text("")
    assert len(the_baseline(tmp_path).sessions) == 1
    assert len(list_baselines(tmp_path)[0]["sessions"]) == 1


def test_a_baseline_is_read_from_any_level_of_a_shared_folder(tmp_path: Path) -> None:
    folder = accepted(tmp_path)
    for level in (tmp_path / "baselines", folder.parent.parent, folder.parent, folder):
        assert len(read_baseline(level, hardware="cpu_x8", suite="hsdp_tp").sessions) == 1
    other = a_run(tmp_path, 1, suite="smoke")
    accept(other, "x", results_dir=tmp_path)
    assert len(read_baseline(tmp_path / "baselines", hardware="cpu_x8", suite="smoke").sessions) == 1
    with pytest.raises(ValueError, match=r"several baselines \(.*, cpu_x8/smoke\) but none for h200_x2/smoke"):
        read_baseline(tmp_path / "baselines", hardware="h200_x2", suite="smoke")


def test_a_baseline_is_read_as_it_was_committed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    (tmp_path / "results").mkdir()
    (tmp_path / "README").write_text("x")
    git("add", "README")
    git("commit", "-m", "empty")
    git("tag", "before")
    accepted(tmp_path / "results")
    git("add", "results/baselines")
    git("commit", "-m", "baseline")
    accepted(tmp_path / "results", 1)
    options = {"hardware": "cpu_x8", "suite": "hsdp_tp", "cwd": tmp_path}
    assert len(read_baseline("git:main", **options).sessions) == 1
    assert len(read_baseline("git:main:results/baselines", **options).sessions) == 1
    assert read_baseline("git:before", **options).sessions == []
    with pytest.raises(ValueError, match="no folder elsewhere"):
        read_baseline("git:main:elsewhere", **options)
    with pytest.raises(ValueError, match="knows no commit 'nowhere'"):
        read_baseline("git:nowhere", **options)
    with pytest.raises(ValueError, match="names no revision"):
        read_baseline("git:--upload-pack=x", **options)


def test_a_run_serves_as_a_baseline_of_one_session(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    baseline = baseline_of_run(run)
    assert [len(session.cells) for session in baseline.sessions] == [2]
    write_json(run.plan_path, {"cells": []})
    assert read_baseline(run.path).sessions[0].cells == baseline.sessions[0].cells


def test_pruning_keeps_the_oldest_the_latest_and_where_a_level_began(tmp_path: Path) -> None:
    for day in range(8):
        verdicts = {"fsdp8": "regressed"} if day == 3 else {}
        accepted(tmp_path, day, verdicts, force=True)
    folder = tmp_path / "baselines/cpu_x8/hsdp_tp"
    before = [session.reason for session in the_baseline(tmp_path).segment("fsdp8")]
    removed = prune(folder, keep=2)
    assert [name[6:8] for name in removed] == ["02", "03", "05", "06"]
    assert [session.reason for session in the_baseline(tmp_path).sessions] == ["day 0", "day 3", "day 6", "day 7"]
    assert [session.reason for session in the_baseline(tmp_path).segment("fsdp8")] == [before[0], *before[-2:]]
    assert prune(folder, keep=2) == []
    with pytest.raises(ValueError, match="keep=0"):
        prune(folder, keep=0)


def test_pruning_never_removes_the_only_session_of_a_cell(tmp_path: Path) -> None:
    accepted(tmp_path, 0)
    run = a_run(tmp_path, 1, cells=("rare",))
    accept(run, "rare", results_dir=tmp_path, now=START + timedelta(days=1))
    for day in range(2, 6):
        accepted(tmp_path, day)
    prune(tmp_path / "baselines/cpu_x8/hsdp_tp", keep=1)
    assert "rare" in the_baseline(tmp_path).cells


def test_listing_and_showing_name_who_when_why_and_the_metrics(tmp_path: Path) -> None:
    accepted(tmp_path, 0)
    accepted(tmp_path, 1)
    listed = list_baselines(tmp_path)
    assert [(entry["hardware"], entry["suite"], len(entry["sessions"])) for entry in listed] == [
        ("cpu_x8", "hsdp_tp", 2)
    ]
    shown = show(the_baseline(tmp_path), "20261101")
    assert (shown["reason"], shown["by"], shown["cells"]) == ("day 0", "me", {"ddp8": 3, "fsdp8": 3})
    assert shown["metrics"]["fsdp8"]["tokens_per_second"] == [20480.0] * 3
    assert show(the_baseline(tmp_path))["reason"] == "day 1"
    assert describe(the_baseline(tmp_path).sessions[0])["software"]["torch"] == "2.13.0"
    with pytest.raises(ValueError, match=r"match '1999'; there are: 20261101-120000-abcdef"):
        show(the_baseline(tmp_path), "1999")


def _accept_one(results: str, run: str, cell: str) -> None:
    accept(RunFolder(Path(run)), "at once", results_dir=results, cells=cell)


def test_two_acceptances_at_once_lose_nothing(tmp_path: Path) -> None:
    cells = tuple(f"cell{number}" for number in range(6))
    run = a_run(tmp_path, cells=cells)
    workers = [multiprocessing.Process(target=_accept_one, args=(str(tmp_path), str(run.path), cell)) for cell in cells]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert sorted(the_baseline(tmp_path).sessions[0].cells) == sorted(cells)


def test_without_locks_in_the_file_system_a_file_stands_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks available")

    monkeypatch.setattr(writing.fcntl, "flock", unsupported)
    monkeypatch.setattr(writing, "LOCK_SECONDS", 0.2)
    with locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        with (
            pytest.raises(ValueError, match=rf"\.lock is held by process {os.getpid()} on .*remove the file"),
            locked(tmp_path),
        ):
            pass
    assert list(tmp_path.iterdir()) == []
    accepted(tmp_path)
    assert len(the_baseline(tmp_path).sessions) == 1


def test_a_writer_that_does_not_end_is_named_after_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LOCK_SECONDS", 0.1)
    with locked(tmp_path), pytest.raises(ValueError, match="is being written by another process"), locked(tmp_path):
        pass


def test_a_session_that_lost_its_manifest_is_an_error_and_never_no_baseline(tmp_path: Path) -> None:
    folder = accepted(tmp_path)
    (folder / "session.json").unlink()
    with pytest.raises(UnreadableFile, match=r"20261101-120000-abcdef holds .*ddp8.json but no session.json"):
        the_baseline(tmp_path)
    accepted(tmp_path, 1)
    with pytest.raises(UnreadableFile, match=r"no session.json"):
        read_baseline(tmp_path / "baselines", hardware="cpu_x8", suite="hsdp_tp")


def test_a_session_without_its_head_is_the_same_error_for_every_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ndbench import cli
    from tests.report.test_accepting import stored

    run = stored(tmp_path, repeats())
    words = ["accept", run.path.name, "--reason", "x"]
    assert cli.main(["baseline", *words, "--results-dir", str(tmp_path)]) == 0
    (head,) = tmp_path.rglob("session.json")
    head.unlink()
    text = "fsdp8.json but no session.json"
    for verb in (["baseline", "list"], ["baseline", "show"], ["baseline", "table"], ["baseline", *words]):
        capsys.readouterr()
        assert cli.main([*verb, "--results-dir", str(tmp_path)]) == 2, verb
        assert text in capsys.readouterr().err, verb
