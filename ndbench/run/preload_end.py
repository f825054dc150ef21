"""Imported by the fork server last: ranks may load what the server must not."""

import sys

if sys.modules.get("torchao", ...) is None:
    del sys.modules["torchao"]
