"""``ndbench run``: measure a matrix, or go on with a run that was ended in the middle."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from ndbench.arguments import UsageError
from ndbench.failures import Terminated, say
from ndbench.verbs.output import console


def main(args: argparse.Namespace) -> int:
    from ndbench.run.launch import Interrupted
    from ndbench.run.outer_world import refuse_outer_world

    refuse_outer_world(os.environ, args.argv)
    try:
        if args.resume is not None:
            from ndbench.run.runner import resume_run

            results_dir = _resume_from(args)
            return resume_run(args.resume, results_dir, max_failures=args.max_failures, console=console())
        from ndbench.matrix.expand import expand
        from ndbench.run.start import run_matrix

        matrix = expand(args.words, args.config_dir, sweep=args.multirun)
        return run_matrix(matrix, max_failures=args.max_failures, console=console())
    except Interrupted as error:
        if error.signum == signal.SIGINT:
            raise KeyboardInterrupt from error
        if error.signum == signal.SIGTERM:
            raise Terminated from error
        return say(f"ended by {signal.Signals(error.signum).name}", 128 + error.signum)


def _resume_from(args: argparse.Namespace) -> Path:
    """The results folder for ``--resume``, which takes no other override: the plan is the run's own."""
    folder = "results"
    for word in args.words:
        key, _, value = word.partition("=")
        if key != "results.dir":
            raise UsageError(f"--resume goes on with the plan of the run: '{word}' cannot change it (results.dir= may)")
        folder = value.strip("'\"")
    for flag, given in (("--config-dir", args.config_dir), ("--multirun", args.multirun)):
        if given:
            raise UsageError(f"--resume goes on with the plan of the run: {flag} cannot change it")
    return Path(folder)
