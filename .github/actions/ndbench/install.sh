#!/usr/bin/env bash
# Install ndbench from the checkout this action is in, unless that is what the interpreter imports already. Editable, so
# that records name the commit that was measured.
set -euo pipefail
root=$(cd "$GITHUB_ACTION_PATH/../../.." && pwd)
installed=$(cd / && "$NDBENCH_PYTHON" -c 'import ndbench; print(ndbench.__path__[0])' 2>/dev/null || true)
if [ "$installed" = "$root/ndbench" ]; then
  echo "ndbench is installed from $root already"
else
  "$NDBENCH_PYTHON" -m pip install --disable-pip-version-check --editable "$root" -c "$root/constraints.txt"
fi
