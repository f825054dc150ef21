"""``python -m ndbench.run.child COMMAND …``: become COMMAND, but be killed when the parent is.

A rank that is killed cannot end the script it started, so the script's process asks the system for that itself before
it turns into the script.
"""

from __future__ import annotations

import os
import sys

from ndbench.run.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
