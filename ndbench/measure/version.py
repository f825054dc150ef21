"""The version of the measurement itself: a changed definition makes records incomparable, not a regression."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

MEASUREMENT_SOURCES = (
    "measure/timing.py",
    "measure/memory.py",
    "measure/flops.py",
    "measure/shape.py",
    "measure/attention_flops.py",
    "measure/throttling.py",
    "measure/collectives.py",
    "measure/modules.py",
    "measure/yardstick.py",
    "run/checkpointing.py",
    "run/compiling.py",
    "run/record.py",
    "training/corpus.py",
    "training/data.py",
    "training/sources.py",
)
"""The modules that define what a measurement means; a change there makes records incomparable, not slower."""

NOT_DEFINING = {
    "measure/__init__.py": "empty",
    "measure/_torch_private.py": "how torch is called; what is asked of it stands in the modules above",
    "measure/devices.py": "which devices there are: stands in the fingerprint",
    "measure/doctor.py": "judges a machine, stores nothing",
    "measure/fingerprint.py": "compared by its own values",
    "measure/code.py": "names the code, changes no figure",
    "measure/pace.py": "judges a machine, stores nothing",
    "measure/profile.py": "explains where a step's time went, decides nothing",
    "measure/validity.py": "says which repeats count, not what they measured",
    "measure/version.py": "this list",
}
"""Modules beside them that define no metric, and why."""


def measurement_version() -> str:
    """12 hex digits: a hash of the code (comments and docstrings stripped) that defines the measurement."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for name in MEASUREMENT_SOURCES:
        digest.update(f"{name}\n{stripped_source((package / name).read_text())}\n".encode())
    return digest.hexdigest()[:12]


def stripped_source(source: str) -> str:
    """Canonical text of a module without comments, docstrings and formatting."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [
                child
                for child in body
                if not (
                    isinstance(child, ast.Expr)
                    and isinstance(child.value, ast.Constant)
                    and isinstance(child.value.value, str)
                )
            ]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)
