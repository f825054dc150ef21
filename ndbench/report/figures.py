"""Figures of a run as plain Plotly descriptions (``data`` and ``layout``), for the page, static pictures and wandb.

Pure functions of records and verdicts. Knows no page, no theme (the reader's browser has one) and imports no Plotly.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ndbench.report import facts
from ndbench.report.cells import SCRIPT
from ndbench.results.schema import Record

Figure = dict[str, Any]

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
"""Okabe and Ito's colours, told apart with any colour vision; the yellow is left out, it is too pale on white."""
MOST_POINTS = 400
"""Points of one curve: a longer one is thinned evenly, its last point kept."""


@dataclass(frozen=True)
class Measured:
    """One cell as it is drawn: its description, its repeats and its verdict's word."""

    name: str
    verdict: str
    cell: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if record["outcome"] == "ok" and record["steps"]]

    def values(self, metric: str) -> list[float]:
        found = (record["metrics"].get(metric, {}).get("value") for record in self.good)
        return [float(value) for value in found if value is not None and math.isfinite(value)]

    def mean(self, metric: str) -> float | None:
        values = self.values(metric)
        return fmean(values) if values else None

    @property
    def world(self) -> int:
        return int(self.records[0]["world"]["size"]) if self.records else int(self.cell.get("world_size") or 1)

    @property
    def layout(self) -> str:
        return str(self.records[0]["world"]["layout"]) if self.records else self.name

    @property
    def per_device(self) -> float | None:
        """Tokens/s of one device."""
        speed = self.mean("tokens_per_second")
        return None if speed is None else speed / self.world


def text(value: Any) -> str:
    """Text as Plotly shows it letter by letter: it reads a little HTML in names and labels."""
    return html.escape(facts.printable(str(value)))


def workload(cell: Mapping[str, Any], batch: bool = True) -> tuple[str, str]:
    """(key, title) of what must be equal for the tokens/s of two cells to answer "which layout?".

    Without ``batch`` the global batch may differ, as it does in weak scaling.
    """
    training = dict(cell.get("training") or {})
    training.pop("micro_batch_size", None)  # follows from the layout
    if not batch:
        training.pop("global_batch_size", None)
    key = json.dumps([_of(cell, "model"), training, cell.get("data"), cell.get("engine_config")], sort_keys=True)
    if (cell.get("engine_config") or {}).get("command"):
        return key, SCRIPT
    said = [(cell.get("model") or {}).get("name", "?"), f"{training.get('sequence_length', '?')} tokens"]
    if batch and training.get("global_batch_size"):
        said.append(f"batch {training['global_batch_size']}")
    return key, ", ".join([*said, str(training.get("precision", ""))]).rstrip(", ")


def _of(cell: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {key: value for key, value in (cell.get(part) or {}).items() if key != "kwargs"}


def table_of(cell: Measured) -> list[dict[str, Any]] | None:
    """The collectives of the cell's instrumented step; null when none was instrumented."""
    structures = (record["structure"] for record in cell.records if record["structure"])
    found = next(structures, None)
    return None if found is None else list(found["collectives"] or [])


def axes(x: str, y: str) -> dict[str, Any]:
    return {
        "xaxis": axis_of(x),
        "yaxis": axis_of(y),
        "margin": {"l": 70, "r": 16, "t": 28, "b": 48},
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top", "maxheight": 90},
        "hovermode": "closest",
        "height": 380,
    }


def axis_of(title: str) -> dict[str, Any]:
    # a standoff lets the margin grow by the title, which a narrow screen cuts off otherwise
    return {"title": {"text": title, "standoff": 8}, "automargin": True, "zeroline": False}


def thinned(count: int) -> list[int]:
    stride = max(1, math.ceil(count / MOST_POINTS))
    kept = list(range(0, count, stride))
    return kept if not kept or kept[-1] == count - 1 else [*kept, count - 1]


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def minus(value: float | None, base: float | None) -> float | None:
    a, b = finite(value), finite(base)
    return None if a is None or b is None else a - b


def short(value: float | None, digits: int = 5) -> float | None:
    """Enough digits to draw; the record has them all."""
    return None if value is None else float(f"{value:.{digits}g}")


def groups(cells: Iterable[Measured], batch: bool = True) -> dict[str, list[Measured]]:
    """Cells by :func:`workload`, under a title that no other workload has."""
    found: dict[str, list[Measured]] = {}
    titles: dict[str, str] = {}
    for cell in cells:
        key, title = workload(cell.cell, batch)
        found.setdefault(key, []).append(cell)
        titles[key] = title
    seen: dict[str, int] = {}
    named: dict[str, list[Measured]] = {}
    for key, some in found.items():
        title = titles[key]
        seen[title] = seen.get(title, 0) + 1
        named[title if seen[title] == 1 else f"{title} ({seen[title]})"] = some
    return named
