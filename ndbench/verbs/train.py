"""``ndbench train``: the engine by itself, an end-to-end training run."""

from __future__ import annotations

import argparse
import os

from ndbench.verbs.output import console


def main(args: argparse.Namespace) -> int:
    from ndbench.run.outer_world import refuse_outer_world
    from ndbench.run.train import train

    refuse_outer_world(os.environ, args.argv)
    return train(args.words, args.config_dir, console())
