"""Tab completion: the candidates for the word under the cursor, and the scripts that ask for them.

Works on the text of the command line up to the cursor, with and without a verb. Imports neither torch nor Hydra nor
pandas: every press of TAB starts a Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ndbench.arguments import DEFAULT_VERB, VERBS, flags_of, takes_value

FOLDERS = (
    "model.path",
    "data.tokenizer",
    "data.dataset",
    "results.dir",
    "checkpoint.dir",
    "checkpoint.weights",
    "baseline",
    "resume",
)
"""Keys whose value may be a folder."""


def answer(shell: str = "zsh", line: str = "", breaks: str = "=:") -> list[str]:
    """Candidates for the last word of ``line``; a blank after those that are whole words.

    For bash only what follows the last ``=`` or ``:``, where bash cuts words (``breaks``, its ``COMP_WORDBREAKS``).
    Never fails: whatever is wrong on the line is said when the command runs.
    """
    try:
        words = split(line)
        found = sorted({found for found in candidates(words[1:]) if found.startswith(words[-1])})
    except (ValueError, OSError):
        return []
    cut = 0
    if shell == "bash":
        cut = max((words[-1].rfind(mark) + 1 for mark in "=:" if mark in breaks), default=0)
    return [candidate[cut:] + ("" if candidate[-1] in "=./" else " ") for candidate in found]


_PIECE = re.compile(r"\\(.)|(['\"])|(\s+)|([^\\'\"\s]+)|\\$")


def split(line: str) -> list[str]:
    """The words of an unfinished command line, quotes taken off: the command's name, …, the word being typed."""
    words, quote = [""], ""
    for match in _PIECE.finditer(line):
        escaped, mark, blank, text = match.groups()
        if blank is not None and not quote:
            words.append("")
        elif mark is not None and quote in ("", mark):
            quote = "" if quote else mark
        else:
            words[-1] += escaped or mark or blank or text or ""
    return words if len(words) > 1 else [*words, ""]


def candidates(words: list[str]) -> Iterator[str]:
    """Everything that could stand where the last of ``words`` (those after the command's name) stands."""
    *before, word = words
    if before and takes_value(before[-1]):
        yield from _values_of_flag(before[-1], word, before)
        return
    positionals = list(_positionals(before))
    verb = positionals.pop(0) if positionals and positionals[0] in VERBS else None
    if word.startswith("-"):
        for flag in flags_of(verb or DEFAULT_VERB):
            yield from flag.names
        return
    if verb is None and not positionals:
        yield from VERBS
    if verb == "import" and not positionals:
        yield from _folders(word)
        yield from _files(word)
    elif verb in (None, "run", "show", "ab", "train", "import"):
        yield from _overrides(word, _config_dir(before))
    elif not positionals:
        yield from VERBS[verb].choices
    if (verb == "compare" and len(positionals) < 2) or (verb, positionals) in (
        ("report", []),
        ("baseline", ["accept"]),
    ):
        yield from _runs(before)
    if verb == "baseline" and positionals in (["show"], ["prune"]):
        yield from _baselines(before)


def _positionals(words: Iterable[str]) -> Iterator[str]:
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = takes_value(word)
        else:
            yield word


def _overrides(word: str, config_dir: Path | None) -> Iterator[str]:
    """Groups and keys; after ``=`` their values, also after a comma (``-m`` sweeps)."""
    from ndbench.matrix.keys import all_keys
    from ndbench.matrix.sources import GROUPS

    key, equals, typed = word.partition("=")
    if equals:
        head = f"{key}={typed[: typed.rfind(',') + 1]}"
        yield from (f"{head}{value}" for value in _values_of_key(key, typed, config_dir))
        return
    yield from (f"{group}=" for group in GROUPS)
    depth = key.count(".") + 1
    for known in all_keys():
        parts = known.split(".")
        yield f"{known}=" if len(parts) <= depth else ".".join(parts[:depth]) + "."


def _values_of_key(key: str, typed: str, config_dir: Path | None) -> Iterator[str]:
    from ndbench.matrix.keys import type_of
    from ndbench.matrix.ranges import VALUES
    from ndbench.matrix.sources import GROUPS, find_sources

    if key in FOLDERS or (key == "model" and typed[:1] in (".", "/")):
        yield from _folders(typed)
    elif key in GROUPS:
        yield from find_sources(config_dir).names(key)
        yield from ["auto"] if key == "hardware" else []
    elif key in VALUES:
        yield from VALUES[key]
    elif type_of(key) is bool:
        yield from ("true", "false")


def _values_of_flag(flag: str, typed: str, before: list[str]) -> Iterator[str]:
    if flag == "--resume":
        yield from _runs(before)
    elif flag in ("--config-dir", "--results-dir", "--into", "--baseline", "--markdown", "--output"):
        yield from _folders(typed)


def _folders(typed: str) -> Iterator[str]:
    """Folders that begin with ``typed``, and a ``/`` after each."""
    above, slash, _ = typed.rpartition("/")
    for path in (Path(above or "/") if slash else Path()).iterdir():
        if path.is_dir() and not path.name.startswith("."):
            yield f"{above}{slash}{path.name}/"


def _files(typed: str) -> Iterator[str]:
    """YAML files that begin with ``typed``."""
    above, slash, _ = typed.rpartition("/")
    for path in (Path(above or "/") if slash else Path()).iterdir():
        if path.suffix in (".yaml", ".yml") and path.is_file():
            yield f"{above}{slash}{path.name}"


def _config_dir(before: list[str]) -> Path | None:
    found = _value_after(before, "--config-dir")
    return Path(found) if found else None


def _results_dir(before: list[str]) -> Path:
    overridden = [word.partition("=")[2] for word in before if word.startswith("results.dir=")]
    return Path(_value_after(before, "--results-dir") or (overridden[-1] if overridden else "results"))


def _value_after(words: list[str], flag: str) -> str | None:
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _runs(before: list[str]) -> Iterator[str]:
    yield "latest"
    folder = _results_dir(before) / "runs"
    if folder.is_dir():
        yield from (run.name for run in folder.iterdir() if run.is_dir())


def _baselines(before: list[str]) -> Iterator[str]:
    root = _results_dir(before) / "baselines"
    yield from sorted({path.parent.parent.relative_to(root).as_posix() for path in root.glob("*/*/*/session.json")})


def script(shell: str) -> str:
    """What the shell must evaluate once: bash or zsh."""
    return _BASH if shell == "bash" else _ZSH


# A blank ends the candidates that are whole words, so that the shell itself must add none.
_BASH = r"""_ndbench() {
    local IFS=$'\n'
    COMPREPLY=($("$1" __complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null))
}
complete -o nospace -F _ndbench ndbench"""

_ZSH = r"""_ndbench() {
    local -a found whole open
    found=("${(@f)$("${words[1]}" __complete zsh "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    whole=("${(@)${(@M)found:#* }% }")
    open=("${(@)found:#* }")
    (( ${#whole} )) && compadd -Q -- "${whole[@]}"
    [[ -n "${open[1]}" ]] && compadd -Q -S '' -- "${open[@]}"
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _ndbench ndbench"""
