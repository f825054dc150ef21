"""Python starts its fork server as ``python -c``, which looks in the current folder first: another copy of a package
that lies there would run in the ranks, and not in the process that starts them.

Imported by the server before anything else that is not Python's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLES = ("PYTHONPATH", "PYTHONSAFEPATH")
KEPT = "NDBENCH_ENVIRONMENT"


@contextmanager
def own_path() -> Iterator[None]:
    """A Python started inside has this one's ``sys.path``; importing this module there gives the variables back."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ[KEPT] = json.dumps(before)
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        give_back()


def give_back() -> None:
    """The environment is as it was: what ranks start is to find what the user's shell would."""
    for name, value in json.loads(os.environ.pop(KEPT, "{}")).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


give_back()
