"""One module a verb, each with ``main(args) -> exit code`` and no logic of its own: from flags to a call of a room.

Whatever a verb needs it imports inside its function, so that ``--version``, completion, ``list`` and ``show`` start
fast and never load torch. A new verb is an entry in ``arguments.VERBS`` and a module of its name here.
"""

from __future__ import annotations

import importlib
import keyword
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def function_of(verb: str) -> Callable[[argparse.Namespace], int]:
    """The function behind a verb; only that verb's module is loaded (``import_.py`` for ``import``)."""
    module = importlib.import_module(f"{__name__}.{verb}{'_' if keyword.iskeyword(verb) else ''}")
    return cast("Callable[[argparse.Namespace], int]", module.main)
