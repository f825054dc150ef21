"""What is said of memory is said in one unit."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_line_of_ours_prints_memory_in_decimal_gigabytes() -> None:
    """GB stays for rates (GB/s), as datasheets have them, and for the option of a library that counts so."""
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in [*(ROOT / "ndbench").rglob("*.py"), *(ROOT / "suites").glob("*.yaml")]
        for line in path.read_text().splitlines()
        if re.search(r"\bGB\b(?!/s)", line)
    ]
    assert wrong == []
