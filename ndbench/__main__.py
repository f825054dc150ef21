"""``python -m ndbench``: the same as the ``ndbench`` command."""

from __future__ import annotations

import sys

from ndbench.cli import main

if __name__ == "__main__":
    sys.exit(main())
