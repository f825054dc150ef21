"""``ndbench wandb``: send a stored run or a baseline to Weights & Biases."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(args: argparse.Namespace) -> int:
    from ndbench.report.sending import send

    print(
        send(
            args.words[1],
            args.results_dir or Path("results"),
            project=args.project,
            entity=args.entity,
            offline=args.offline,
            timeout=args.timeout,
        )
    )
    return 0
