"""Verbs and flags of the command line as data, and the parsing of an argument list into them.

Overrides (``KEY=VALUE``) pass through as text: what they mean is the business of ``matrix``. Both the parser and tab
completion read the tables here, so neither can know a flag that the other lacks. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


class UsageError(ValueError):
    """The command line itself is wrong."""


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    """Null for a switch."""
    kind: Callable[[str], Any] = str


@dataclass(frozen=True)
class Verb:
    summary: str
    usage: str
    flags: tuple[Flag, ...]
    details: str
    words: tuple[int, int | None] = (0, None)
    """Least and greatest number of words beside the flags."""
    choices: tuple[str, ...] = ()
    """What the first word may be."""


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is expected, not '{text}'")
    return int(text)


DEBUG = Flag(("--debug",), "on an error, show the whole traceback")
HELP = Flag(("-h", "--help"), "show this help")
VERSION = Flag(("--version",), "show the versions of ndbench and what it runs on")
EVERYWHERE = (DEBUG, HELP, VERSION)
CONFIG_DIR = Flag(("--config-dir",), "a folder of your own models, machines and suites (model/x.yaml, …)", "DIR", Path)
MULTIRUN = Flag(("-m", "--multirun"), "KEY=a,b,c is a sweep: one cell a value, all in one plan")
JSON = Flag(("--json",), "print JSON")
RESULTS_DIR = Flag(("--results-dir",), "where runs and baselines are (default: results)", "DIR", Path)

LISTS = (
    *("models", "suites", "hardware", "parallelism", "engines", "training", "data"),
    *("measure", "gate", "launcher", "tracker", "checkpoint", "evaluation"),
)
"""What ``ndbench list`` lists: every group of the configuration."""

VERBS: dict[str, Verb] = {
    "run": Verb(
        "measure a matrix, compare it with the baseline, answer with an exit code (the default verb)",
        "ndbench [run] [KEY=VALUE …] [flags]",
        (
            CONFIG_DIR,
            MULTIRUN,
            Flag(("--resume",), "go on with a run that was ended in the middle, with the plan it had", "RUN"),
            Flag(("--max-failures",), "stop after this many repeats that did not end well", "N", _count),
        ),
        "Examples:\n"
        "  ndbench suite=hsdp_tp                                    the suite, on this machine\n"
        "  ndbench suite=hsdp_tp cells='hsdp*' measure.repeats=5    some of its cells\n"
        "  ndbench model=llama_tiny parallelism.tp_size=1,2,4 parallelism.dp_shard_size=-1 -m\n"
        "  ndbench suite=hsdp_tp gate.mode=require                  no baseline is an error: for CI\n"
        "  ndbench --resume latest\n\n"
        "KEY is a group (ndbench list models, …) or a key of the configuration; press TAB to see them\n"
        "(ndbench completion -h).\n\n"
        "Exit codes: 0 nothing to object; 1 regressed; 2 usage or configuration; 3 invalid or missing cells;\n"
        "4 nothing comparable; 5 inconclusive (with gate.fail_on_inconclusive=true); 70 a fault of ndbench itself.",
    ),
    "show": Verb(
        "the cells of a matrix, what they need, and why others are left out; runs nothing",
        "ndbench show [KEY=VALUE …] [flags]",
        (CONFIG_DIR, MULTIRUN, JSON),
        "Examples:\n"
        "  ndbench show suite=hsdp_tp\n"
        "  ndbench show suite=hsdp_tp hardware=h100_x8      another machine's cells, seen from a laptop\n\n"
        "Memory is an estimate from the shapes. Time comes from stored repeats of the same cell on the same kind of\n"
        "machine where there are any, else from FLOPs and the peak, else (~) from a rule of thumb.",
    ),
    "baseline": Verb(
        "accept a run as the reference; list, show, tabulate or prune what is stored",
        "ndbench baseline accept RUN --reason TEXT | list | show [FOLDER] | table [FILE] | prune FOLDER --keep N",
        (
            RESULTS_DIR,
            Flag(("--reason",), "accept: why this run is the reference now", "TEXT"),
            Flag(("--cells",), "accept: only these cells (patterns, comma separated)", "NAMES"),
            Flag(("--force",), "accept: take regressed cells too, without naming them"),
            Flag(("--by",), "accept: who accepts (default: git's user name)", "NAME"),
            Flag(("--into",), "accept: the baseline's folder, when it is not under the results folder", "DIR", Path),
            Flag(("--session",), "show: a session's name or its beginning (default: the latest)", "NAME"),
            Flag(("--keep",), "prune: the number of latest sessions of each cell to keep", "N", _count),
            JSON,
        ),
        "RUN is a run's name or its beginning, 'latest', or a folder (an unpacked CI artifact, say).\n"
        "FOLDER is a baseline's folder, or HARDWARE/SUITE as 'ndbench baseline list' names it.\n"
        "FILE is a Markdown file whose performance blocks are filled anew from the stored baselines.\n\n"
        "Examples:\n"
        "  ndbench baseline accept latest --reason 'first reference of this machine'\n"
        "  ndbench baseline accept latest --cells fsdp8 --reason 'fp32 reduction costs 4 %, wanted'\n"
        "  ndbench baseline show cpu_x8/hsdp_tp\n"
        "  ndbench baseline table README.md                       its performance table, from the records\n"
        "  ndbench baseline prune cpu_x8/hsdp_tp --keep 8",
        (1, 2),
        ("accept", "list", "show", "table", "prune"),
    ),
    "compare": Verb(
        "compare two runs, or a run with the baseline as it stands now",
        "ndbench compare RUN_A RUN_B | ndbench compare RUN [--baseline SOURCE]",
        (
            RESULTS_DIR,
            Flag(("--baseline",), "a folder or git:REF (default: the stored baseline of the run's machine)", "SOURCE"),
            JSON,
        ),
        "RUN_A is the reference, RUN_B is judged. RUN_A may be a file of pytest-benchmark (speed only).\n"
        "Exit codes as of 'ndbench run'.",
        (1, 2),
    ),
    "ab": Verb(
        "measure two sides next to each other on this machine: two commits, two environments or two settings",
        "ndbench ab [KEY=VALUE …] --base REF [--head REF] [flags]",
        (
            CONFIG_DIR,
            MULTIRUN,
            Flag(("--base",), "the side to compare with", "REF"),
            Flag(("--head",), "the side that is judged (default: here, the code and interpreter as they are)", "REF"),
            Flag(("--setup",), "run this in each worktree first, for packages that need building", "COMMAND"),
        ),
        "REF is one of\n"
        "  git:REV           your repository at REV: a worktree, put first on PYTHONPATH\n"
        "  python:PATH       another interpreter or venv, ndbench installed in it: another torch, say\n"
        "  set:'KEY=VALUE …' overrides for this side only\n"
        "  here              this code and interpreter\n\n"
        "Examples:\n"
        "  ndbench ab suite=hsdp_tp cells=hsdp2x4 --base git:main\n"
        "  ndbench ab suite=hsdp_tp --base python:/venvs/torch211 --head python:/venvs/torch213\n"
        "  ndbench ab model=llama_1b --base here --head set:'training.compile=true'\n\n"
        "Pairs are interleaved (ABBA). On a GPU 10 to 20 pairs of launches decide; on a CPU both sides' ranks are\n"
        "there at once and take turns of one step, and 6 to 12 residencies of gate.residency seconds decide.\n"
        "Exit codes as of 'ndbench run'.",
    ),
    "train": Verb(
        "train a model with the engine: log, evaluation, checkpoints, resume",
        "ndbench train [KEY=VALUE …] [flags]",
        (CONFIG_DIR,),
        "Examples:\n"
        "  ndbench train model=llama_tiny data=source parallelism=hsdp_tp training.steps=600 checkpoint.dir=runs/tiny\n"
        "  ndbench train … checkpoint.dir=runs/tiny resume=auto          go on after whatever ended it\n"
        "  ndbench train data=dataset data.dataset=FOLDER_OR_ID data.tokenizer=FOLDER_OR_ID …\n"
        "  ndbench generate runs/tiny prompt='def '                      text from the newest checkpoint\n\n"
        "checkpoint.dir=DIR keeps checkpoints (every checkpoint.every steps, at the end, and when it is stopped), and\n"
        "log.jsonl beside them: a line a step. SIGTERM and SIGINT stop after the step in flight and a checkpoint.\n"
        "Exit codes: 0 trained to the end; 143, 130 stopped by a signal; 2 usage or configuration; 3 a rank failed.",
    ),
    "generate": Verb(
        "print text that a trained model writes",
        "ndbench generate CHECKPOINT [prompt=TEXT] [max_tokens=200] [temperature=0.8] [top_k=50] [seed=0]",
        (),
        "CHECKPOINT is a checkpoint, or the folder of a training run, whose newest one is taken.\n"
        "temperature=0 takes the likeliest token each time. Example: ndbench generate runs/tiny prompt='def '",
        (1, None),
    ),
    "report": Verb(
        "show the verdict of a stored run again, or write it as Markdown, HTML or pictures",
        "ndbench report RUN [--markdown FILE] [--html FILE] [--png DIR]",
        (
            RESULTS_DIR,
            Flag(("--markdown",), "write the report to this file ('-': print it)", "FILE"),
            Flag(
                ("--html",),
                "write one page with tables and figures that opens anywhere, without a network",
                "FILE",
                Path,
            ),
            Flag(("--benchmark-json",), "write the step times in pytest-benchmark's format", "FILE", Path),
            Flag(("--png",), "write the figures that compare layouts into this folder", "DIR", Path),
            Flag(
                ("--baseline",),
                "where the history comes from (default: what the run was compared with)",
                "SOURCE",
            ),
        ),
        "The verdict is the one the run ended with; 'ndbench compare RUN' decides anew.",
        (1, 1),
    ),
    "wandb": Verb(
        "send a stored run, or a baseline with its reasons, to Weights & Biases",
        "ndbench wandb push RUN | FOLDER [flags]",
        (
            RESULTS_DIR,
            Flag(("--project",), "the project (default: tracker.project of the run, else ndbench)", "NAME"),
            Flag(("--entity",), "the user or team (default: tracker.entity of the run, else your own)", "NAME"),
            Flag(("--offline",), "write files for 'wandb sync' and send nothing"),
            Flag(("--timeout",), "seconds that sending may take (default 600)", "SECONDS", _count),
        ),
        "RUN as for 'ndbench report'; FOLDER is a baseline's folder, or HARDWARE/SUITE as 'ndbench baseline list' has\n"
        "it. Sending again sends what is new and makes no duplicates. Without a key it is as with --offline.",
        (2, 2),
        ("push",),
    ),
    "list": Verb(
        "what there is to choose from",
        "ndbench list [models | suites | hardware | parallelism | engines | training | data | …]",
        (CONFIG_DIR, JSON),
        "Without a word: the groups. With --config-dir also your own.",
        (0, 1),
        LISTS,
    ),
    "import": Verb(
        "translate an Accelerate or Axolotl configuration into a run of ndbench",
        "ndbench import FILE [KEY=VALUE …] [flags]",
        (
            CONFIG_DIR,
            Flag(("--output",), "write a suite: FOLDER/suites/NAME.yaml, or FOLDER for --config-dir", "PATH", Path),
            Flag(
                ("--world-size",),
                "how many processes the run is launched with (Axolotl's file does not say)",
                "N",
                _count,
            ),
            JSON,
        ),
        "Every key of the file is listed as translated, understood (nothing to set) or not carried over, with why;\n"
        "then the command lines that measure it, plan it and train with it. KEY=VALUE are overrides of your own,\n"
        "which win: model=FOLDER, say, where the file's model is not known here.\n\n"
        "Examples:\n"
        "  ndbench import axolotl.yaml\n"
        "  ndbench import default_config.yaml model=llama_8b training.micro_batch_size=1\n"
        "  ndbench import axolotl.yaml --output mine && ndbench suite=axolotl --config-dir mine",
        (1, None),
    ),
    "doctor": Verb(
        "what this machine is, and what will and will not run here",
        "ndbench doctor [flags]",
        (RESULTS_DIR, CONFIG_DIR, Flag(("--quick",), "leave out the yardstick, the only check that computes"), JSON),
        "The yardstick is compared with the stored ones of this kind of machine: is this node slow? Exit code 3 when\n"
        "something must be mended before anything sound can be measured here.",
        (0, 0),
    ),
    "selftest": Verb(
        "plant faults on this machine and check that the gate turns red for each",
        "ndbench selftest [KEY=VALUE …]",
        (JSON,),
        "Slowdowns of 3, 10 and 30 %, a memory leak, doubled gradients, a loss shifted by 1e-3, a NaN, a missing\n"
        "step, a missing cell, an extra all-gather, a wrong token count. Takes a few minutes. Exit code 1 when one\n"
        "that must be caught was not; on a CPU 3 and 10 % are reported only.",
    ),
    "completion": Verb(
        "print the script that teaches your shell to complete ndbench commands",
        "ndbench completion bash | zsh",
        (),
        'Add to ~/.bashrc:  eval "$(ndbench completion bash)"\nor to ~/.zshrc:    eval "$(ndbench completion zsh)"',
        (1, 1),
        ("bash", "zsh"),
    ),
}

DEFAULT_VERB = "run"


def flags_of(verb: str) -> tuple[Flag, ...]:
    return (*VERBS[verb].flags, *EVERYWHERE)


def takes_value(name: str) -> bool:
    """Whether the flag of this name is followed by a value, whatever the verb."""
    return any(name in flag.names and flag.metavar for verb in VERBS.values() for flag in verb.flags)


def is_override(word: str) -> bool:
    return "=" in word or word.startswith("~")


def split_verb(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The verb and what is left without it; the verb is null when the first word is an override or there is none.

    Flags may stand before the verb. Raises :class:`UsageError` when the first word is neither.
    """
    skip = False
    for index, word in enumerate(argv):
        if skip:
            skip = False
        elif word.startswith("-") and word != "-":
            skip = takes_value(word)
        elif word in VERBS:
            return word, [*argv[:index], *argv[index + 1 :]]
        elif is_override(word):
            return None, list(argv)
        else:
            told = f"there is no verb '{word}'{_close(word, VERBS)}; verbs: {', '.join(VERBS)}"
            raise UsageError(f"{told}; everything else is KEY=VALUE (suite={word}, say)")
    return None, list(argv)


def parse(verb: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Flags by name and ``words``, in whatever order they came. Raises :class:`UsageError` in one line."""
    parsed = parser(verb).parse_intermixed_args(list(arguments))
    if parsed.help or parsed.version:
        return parsed
    if RESULTS_DIR in VERBS[verb].flags:
        _take_results_dir(verb, parsed)
    words, known = parsed.words, VERBS[verb]
    least, most = known.words
    if known.choices and (words or least > 0) and (not words or words[0] not in known.choices):
        given = f"'{words[0]}' is not one of" if words else "one is needed of"
        close = _close(words[0], known.choices) if words else ""
        raise UsageError(f"{verb}: {given} {', '.join(known.choices)}{close}")
    if len(words) < least or (most is not None and len(words) > most):
        raise UsageError(f"{verb}: {_words(len(words))} given; usage: {known.usage}")
    if verb == "import" and all(is_override(word) for word in words):
        raise UsageError("import: FILE is needed: ndbench import FILE [KEY=VALUE …]")
    if verb in ("run", "show", "ab", "selftest", "train"):
        for word in words:
            if not is_override(word):
                hint = f"the verb comes first: ndbench {word} …" if word in VERBS else f"suite={word}, perhaps?"
                raise UsageError(f"'{word}' is not KEY=VALUE ({hint})")
    return parsed


def _take_results_dir(verb: str, parsed: argparse.Namespace) -> None:
    """``results.dir=DIR``, as the measuring verbs say it, is ``--results-dir DIR`` here."""
    key = "results.dir="
    folders = [word.removeprefix(key).strip("'\"") for word in parsed.words if word.startswith(key)]
    parsed.words = [word for word in parsed.words if not word.startswith(key)]
    named = {str(parsed.results_dir), *folders} if parsed.results_dir is not None else set(folders)
    if len(named) > 1:
        raise UsageError(
            f"{verb}: --results-dir and results.dir= name {len(named)} folders: {', '.join(sorted(named))}"
        )
    if "" in named:
        raise UsageError(f"{verb}: results.dir= names no folder")
    if folders:
        parsed.results_dir = Path(folders[0])


def parser(verb: str) -> argparse.ArgumentParser:
    known = VERBS[verb]
    made = _Parser(
        prog=f"ndbench {verb}",
        usage=known.usage,
        description=known.summary[0].upper() + known.summary[1:] + ".",
        epilog=known.details or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    made.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    for flag in flags_of(verb):
        if flag.metavar is None:
            made.add_argument(*flag.names, action="store_true", help=flag.help)
        else:
            made.add_argument(*flag.names, metavar=flag.metavar, type=flag.kind, help=flag.help)
    return made


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            unknown = message.removeprefix("unrecognized arguments: ").split()[0]
            known = [name for flag in flags_of(self.prog.split()[-1]) for name in flag.names]
            meant = " (results.dir=DIR says it here)" if unknown.startswith("--results-dir") else _close(unknown, known)
            message = f"there is no flag {unknown}{meant}; flags: {', '.join(sorted(known))}"
        raise UsageError(f"{self.prog.removeprefix('ndbench ')}: {message}")


def help_text() -> str:
    """``ndbench -h``."""
    width = max(len(verb) for verb in VERBS)
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return (
        "usage: ndbench [VERB] [KEY=VALUE …] [flags]\n\n"
        "Benchmarks and regression tests for N-dimensional parallel training: is it still right, still fast, and\n"
        "does it still fit?\n\n"
        f"verbs:\n{verbs}\n\n"
        "start here:\n"
        "  ndbench doctor                       what this machine can run\n"
        "  ndbench show suite=hsdp_tp           what would be measured\n"
        "  ndbench suite=hsdp_tp                measure it, compare, exit code\n"
        "  ndbench baseline accept latest --reason '…'\n\n"
        "'ndbench VERB -h' says more about each; --debug shows the traceback of an error; --version the versions."
    )


def _close(word: str, known: Sequence[str] | dict[str, Verb]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def _words(count: int) -> str:
    return f"{count} word" if count == 1 else f"{count} words"
