"""Layout names to degrees: the inverse of ``ParallelismConfig.layout``; and the keys that make a layout."""

from __future__ import annotations

import re

from ndbench.parallel.config import AXES

DEGREES = tuple(f"parallelism.{axis}_size" for axis in AXES)
LAYOUT_KEYS = ("world_size", "parallelism", *DEGREES)
"""Keys that the layout's own name already says."""

_LAYOUT = re.compile(
    r"(?:(?P<kind>ddp|fsdp)(?P<size>\d+)|hsdp(?P<replicate>\d+)x(?P<shard>\d+))?"
    r"(?:(?:^|(?<=.)_)cp(?P<cp>\d+))?(?:(?:^|(?<=.)_)tp(?P<tp>\d+))?"
)


def parse_layout(name: object) -> dict[str, int]:
    """Degree by axis of ``ddp8``, ``fsdp8``, ``hsdp2x4``, ``fsdp2_cp2_tp2``, ``tp4``, ``single``.

    Raises ``ValueError`` for anything else.
    """
    if name == "single":
        return {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}
    found = _LAYOUT.fullmatch(str(name)) if name else None
    if found is None:
        raise ValueError(f"'{name}' is not a layout such as ddp8, fsdp4_tp2, hsdp2x4, ddp2_cp2_tp2, tp4 or single")
    size = int(found["size"] or 1)
    degrees = {
        "dp_replicate": int(found["replicate"] or (size if found["kind"] == "ddp" else 1)),
        "dp_shard": int(found["shard"] or (size if found["kind"] == "fsdp" else 1)),
        "cp": int(found["cp"] or 1),
        "tp": int(found["tp"] or 1),
    }
    if min(degrees.values()) < 1:
        raise ValueError(f"layout '{name}' has a degree of 0")
    return degrees
