"""``ndbench completion``: the script that teaches a shell to complete our commands."""

from __future__ import annotations

import argparse


def main(args: argparse.Namespace) -> int:
    from ndbench.completion import script

    print(script(args.words[0]))
    return 0
