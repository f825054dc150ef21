"""Records on disk: the schema, atomic files, frames, baselines."""

from __future__ import annotations

from ndbench.results.frame import load, to_parquet

__all__ = ["load", "to_parquet"]
