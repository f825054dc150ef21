"""``ndbench doctor``: what this machine is, and what will and will not run here."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(args: argparse.Namespace) -> int:
    from ndbench.matrix.reading import read_yaml
    from ndbench.matrix.sources import find_sources
    from ndbench.report.doctor import main as examine

    hardware = find_sources(args.config_dir).files["hardware"]
    return examine(
        args.results_dir or Path("results"),
        {name: read_yaml(path) for name, path in hardware.items()},
        as_json=args.json,
        yardstick=not args.quick,
    )
