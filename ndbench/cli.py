"""The command line: verbs to functions (``verbs/``), errors to one readable line and an exit code. No logic of its own.

Nothing heavy is loaded here: each verb imports what it needs when it runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from ndbench.arguments import DEFAULT_VERB, help_text, parse, parser, split_verb
from ndbench.failures import USAGE, Terminated, exit_of, open_streams, signals_raise
from ndbench.report.plain import forgive
from ndbench.verbs import function_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises, and never ends the process by itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        forgive(stream)
    with signals_raise():
        try:
            code = _dispatch(arguments)
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt, Terminated, SystemExit) as error:
            return exit_of(error, arguments)


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["__complete"]:
        from ndbench.completion import answer

        print("\n".join(answer(*arguments[1:4])))
        return 0
    verb, rest = split_verb(arguments)
    if verb is None and not rest:
        print(help_text(), file=sys.stderr)
        return USAGE
    if verb is None and set(rest) & {"-h", "--help"}:
        print(help_text())
        return 0
    verb = verb or DEFAULT_VERB
    parsed = parse(verb, rest)
    if parsed.help:
        print(parser(verb).format_help().rstrip())
        return 0
    if parsed.version:
        return _version()
    parsed.argv = arguments
    return function_of(verb)(parsed)


def _version() -> int:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from ndbench import __version__

    parts = []
    for package in ("torch", "transformers", "hydra-core"):
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{package} {version(package)}")
    print(f"ndbench {__version__} ({', '.join([*parts, f'Python {platform.python_version()}'])})")
    return 0
