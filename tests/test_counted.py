"""Numbers and their nouns agree."""

from __future__ import annotations

import re
from pathlib import Path

from ndbench.counted import counted, were

PACKAGE = Path(__file__).parents[1] / "ndbench"


def test_one_is_singular_and_every_other_number_plural() -> None:
    assert [counted(n, "rank") for n in (0, 1, 2, 1200)] == ["0 ranks", "1 rank", "2 ranks", "1,200 ranks"]
    assert counted(2, "launch", "launches") == "2 launches"
    assert [were(n) for n in (0, 1, 2)] == ["were", "was", "were"]


def test_no_module_makes_its_own_plurals() -> None:
    """Where a plural is made by hand, the next line that forgets to make one is not far."""
    own = re.compile(r"'s' \* \(|\"s\" \* \(|plural = ")
    found = [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")) if own.search(path.read_text())]
    assert found == []
