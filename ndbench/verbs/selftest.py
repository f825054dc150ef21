"""``ndbench selftest``: plant faults and check that the gate turns red for each."""

from __future__ import annotations

import argparse
import os

from ndbench.verbs.output import console, print_json


def main(args: argparse.Namespace) -> int:
    import dataclasses

    from ndbench.gate.selftest import run_selftest
    from ndbench.report.selftest import print_selftest
    from ndbench.run.outer_world import refuse_outer_world

    refuse_outer_world(os.environ, args.argv)
    screen = console()

    def tell(line: str) -> None:
        if not args.json:
            screen.print(line, markup=False, soft_wrap=True)

    found = run_selftest(tell, tuple(args.words))
    print_json(dataclasses.asdict(found) | {"passed": found.passed}) if args.json else print_selftest(found, screen)
    return 0 if found.passed else 1
