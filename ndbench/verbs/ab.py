"""``ndbench ab``: two sides measured next to each other on this machine."""

from __future__ import annotations

import argparse
import os

from ndbench.arguments import UsageError
from ndbench.verbs.output import console


def main(args: argparse.Namespace) -> int:
    from ndbench.gate.ab import run_ab
    from ndbench.run.outer_world import refuse_outer_world

    refuse_outer_world(os.environ, args.argv)
    if not args.base:
        raise UsageError("ab: --base REF is needed: git:REV, python:PATH, set:'KEY=VALUE …' or here")
    return run_ab(
        args.words,
        args.base,
        args.head or "here",
        setup=args.setup,
        config_dir=args.config_dir,
        sweep=args.multirun,
        console=console(),
    )
