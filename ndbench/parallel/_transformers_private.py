"""What transformers has no public spelling for; ``tests/training/test_fp8.py`` holds it to what is said here."""

from __future__ import annotations

import sys


def leave_torchao_alone() -> None:
    """Ask for it before transformers' models: they import torchao wherever it is installed, which costs every process
    seconds and asks the GPU. Whether it is installed is asked once and remembered, so it is asked while hidden."""
    if "torchao" in sys.modules:
        return
    sys.modules["torchao"] = None  # type: ignore[assignment]
    try:
        from transformers.utils.import_utils import is_torchao_available

        is_torchao_available()
    finally:
        del sys.modules["torchao"]
