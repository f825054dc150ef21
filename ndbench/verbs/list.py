"""``ndbench list``: what there is to choose from."""

from __future__ import annotations

import argparse

from ndbench.verbs.output import console, print_json


def main(args: argparse.Namespace) -> int:
    from ndbench.report.catalog import entries, groups, print_entries, print_groups

    if not args.words:
        listed = groups(args.config_dir)
        print_json(listed) if args.json else print_groups(listed, console())
        return 0
    found = entries(args.words[0], args.config_dir)
    print_json(found) if args.json else print_entries(args.words[0], found, console())
    return 0
