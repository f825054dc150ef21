"""An object by its dotted path, for the keys that name code of the user's own. No torch."""

from __future__ import annotations

import importlib
from typing import Any


def load(path: str, key: str, kind: str) -> Any:
    """``package.module.name`` or ``package.module:name``; ``kind`` is what it should be, for the message.

    Raises ``ValueError`` naming ``key`` when there is no such thing, or when its module ends the process.
    """
    module, separator, attribute = path.replace(":", ".").rpartition(".")
    if not separator:
        raise ValueError(f"{key} '{path}' is not a dotted path (package.module.{kind})")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        how = "its folder must be on PYTHONPATH, or installed (PYTHONPATH=. for the current folder)"
        raise ValueError(f"{key} '{path}' cannot be imported: {error}; {how}") from error
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key} '{path}' cannot be imported: {error}") from error
    except SystemExit as error:
        how = "put what it runs below if __name__ == '__main__'"
        raise ValueError(f"{key} '{path}' cannot be imported: it calls sys.exit({error.code!r}); {how}") from error
