"""The README's performance table: made of the stored records, and equal to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ndbench.report import performance
from ndbench.results.baseline import accept
from ndbench.results.schema import Record
from ndbench.results.store import RunFolder
from tests.records import not_ok, repeats
from tests.report.test_peers import OURS, THEIRS, by

ROOT = Path(__file__).parents[2]
LATER = "20260102-000000-bbbbbb"
TEXT = "# A page\n\n<!-- performance: * -->\nold\n<!-- /performance -->\n\nits end\n"


def stored(results: Path, *records: Record) -> Path:
    """The baselines' folder after the records were accepted."""
    folder = RunFolder.create(results, records[0]["run"])
    for record in records:
        folder.write_record(record)
    accept(folder, "a reason", results_dir=results)
    return results / "baselines"


def test_the_readme_has_the_table_that_the_committed_records_make() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert performance.rewrite(text, ROOT / "results" / "baselines") == text, "ndbench baseline table README.md"


def test_a_row_is_a_cell_beside_its_better_peer(tmp_path: Path) -> None:
    slower = [2 * second for second in THEIRS]
    root = stored(tmp_path, *by("ndbench", OURS), *by("accelerate", THEIRS), *by("torchtitan", slower))
    (row,) = [line for line in performance.table(root).splitlines() if line.startswith("| fsdp8")]
    assert "| fsdp8-ndbench |" in row
    ratio = row.split("|")[6].strip()
    assert ratio.startswith("1.106 (")
    assert "of accelerate, 100.00 MiB" in ratio
    assert "`ndbench suite=hsdp_tp cells='fsdp8-*'`" in row
    assert row.endswith("3 launches |")


def test_a_peer_of_another_run_counts_and_is_told(tmp_path: Path) -> None:
    """The better peer is not left out because it ran an hour later; one of the same run stands for itself."""
    slower = [2 * second for second in THEIRS]
    stored(tmp_path, *by("ndbench", OURS), *by("torchtitan", slower))
    later = [record | {"run": LATER, "session": LATER} for record in by("accelerate", THEIRS)]
    root = stored(tmp_path, *later)
    rows = [line for line in performance.table(root).splitlines() if line.startswith("| fsdp8")]
    assert len(rows) == 1, "the peer's own row says nothing new"
    assert "of accelerate, 100.00 MiB, another run" in rows[0]
    elsewhere = later[0]["fingerprint"] | {"hardware": later[0]["fingerprint"]["hardware"] | {"name": "another"}}
    for file in root.glob(f"*/*/{LATER}/*accelerate.json"):
        held = json.loads(file.read_text())
        file.write_text(json.dumps(held | {"fingerprint": elsewhere}))
    (row, other) = (line for line in performance.table(root).splitlines() if line.startswith("| fsdp8"))
    assert "of torchtitan, 100.00 MiB |" in row
    assert "| fsdp8-accelerate |" in other


def test_the_latest_run_of_a_peer_on_this_machine_counts_not_a_later_one_elsewhere(tmp_path: Path) -> None:
    stored(tmp_path, *by("ndbench", OURS))
    stored(tmp_path, *[record | {"run": LATER, "session": LATER} for record in by("accelerate", THEIRS)])
    last = "20260103-000000-cccccc"
    root = stored(tmp_path, *[record | {"run": last, "session": last} for record in by("accelerate", OURS)])
    (file,) = root.glob(f"*/*/{last}/*accelerate.json")
    held = json.loads(file.read_text())
    held["fingerprint"]["hardware"]["name"] = "another"
    file.write_text(json.dumps(held))
    rows = [line for line in performance.table(root).splitlines() if line.startswith("| fsdp8-ndbench")]
    assert "1.106 of accelerate, 100.00 MiB, another run" in rows[0], "without an interval: runs drift"


def test_how_a_peer_finds_room_is_its_own_business_and_told(tmp_path: Path) -> None:
    theirs = by("torchtitan", THEIRS)
    for record in theirs:
        recomputes = record["cell"]["training"] | {"activation_checkpointing": "full"}
        del recomputes["activation_offload"]  # as in records from before there was such a key
        record["cell"] = record["cell"] | {"training": recomputes}
    root = stored(tmp_path, *by("ndbench", OURS), *theirs)
    (row,) = [line for line in performance.table(root).splitlines() if line.startswith("| fsdp8")]
    assert "of torchtitan, 100.00 MiB, activation_checkpointing=full |" in row
    offloaded = [{**record, "cell": json.loads(json.dumps(record["cell"]))} for record in by("ndbench", OURS)]
    for record in offloaded:
        record["cell"]["training"] |= {"activation_offload": True}
    root = stored(tmp_path / "offloaded", *offloaded, *theirs)
    (row,) = [line for line in performance.table(root).splitlines() if line.startswith("| fsdp8")]
    assert "100.00 MiB, activation_checkpointing=full, activation_offload=false |" in row


def test_a_changed_record_changes_the_table(tmp_path: Path) -> None:
    root = stored(tmp_path, *by("ndbench", OURS), *by("accelerate", THEIRS))
    text = performance.rewrite(TEXT, root)
    assert text.startswith("# A page\n")
    assert text.endswith("\n\nits end\n")
    assert "old" not in text
    assert performance.rewrite(text, root) == text
    (file,) = root.glob("*/*/*/fsdp8-ndbench.json")
    held = json.loads(file.read_text())
    held["repeats"][1]["metrics"]["tokens_per_second"]["value"] *= 1.5
    held["repeats"][2]["metrics"]["tokens_per_second"]["value"] *= 1.5
    file.write_text(json.dumps(held))
    assert performance.rewrite(text, root) != text


def test_utilisation_is_of_the_peak_and_of_the_matmul_measured_beside_the_cell(tmp_path: Path) -> None:
    (record,) = repeats("fsdp8", 1)
    hardware = record["cell"]["hardware"] | {"device": "cuda", "peak_flops": {"fp32": 100e12}}
    record["cell"] = record["cell"] | {"hardware": hardware}
    record["metrics"]["mfu_causal"] = {"value": 0.5, "unit": "1", "direction": "higher"}
    side = {"matmul_seconds": 2 * 8192**3 / 80e12, "copy_seconds": 1.0, "all_reduce_seconds": None}
    record["yardstick"] = {"before": side, "after": side}
    (row,) = [line for line in performance.table(stored(tmp_path, record)).splitlines() if "| fsdp8 |" in line]
    assert row.split("|")[3:5] == [" 50.0% ", " 62.5% "]


def test_a_peer_that_failed_is_told_and_no_record_too(tmp_path: Path) -> None:
    assert performance.table(tmp_path) == performance.NONE_YET
    broken = by("torchtitan", THEIRS)[:1]
    lost = not_ok("oom", broken[0]["cell"]["name"], "too large", run=broken[0]["run"])
    lost["cell"], lost["cell_id"] = broken[0]["cell"], broken[0]["cell_id"]
    root = stored(tmp_path, *by("ndbench", OURS), lost)
    assert "fsdp8-torchtitan" not in performance.table(root)


def test_a_page_without_a_place_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no block"):
        performance.rewrite("# A page", ROOT)
