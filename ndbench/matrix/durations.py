"""Lengths of time as a user writes them (``20m``)."""

from __future__ import annotations

import re

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(key: str, text: str) -> float:
    """Seconds in ``90``, ``45s``, ``20m``, ``1.5h`` or ``2d``; raises ``ValueError`` for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|min|h|d)?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{key}={text} is not a duration; write 90s, 20m or 1h")
    return float(match[1]) * UNITS[match[2] or ""]
