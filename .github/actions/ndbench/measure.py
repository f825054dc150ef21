"""The action's one step: inputs from the environment to a command line, ndbench's answer to outputs and an exit code.

Inputs never pass through a shell. A run without a verdict is an error, whatever its exit code.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

FAILS_ON = {"regressed": 1, "invalid": 3, "nothing-comparable": 4, "inconclusive": 5}


def command(inputs: dict[str, str]) -> list[str]:
    """The command line. Raises ``ValueError`` for an input that cannot be meant."""
    unknown = [word for word in fail_on(inputs) if word not in FAILS_ON]
    if unknown:
        raise ValueError(f"fail-on has '{unknown[0]}'; known: {', '.join(FAILS_ON)}")
    words = [f"suite={inputs['SUITE']}", f"results.dir={inputs['RESULTS_DIR']}"]
    for key, name in (("gate.min_effect", "MIN_EFFECT"), ("measure.repeats", "REPEATS")):
        if inputs.get(name):
            words.append(f"{key}={inputs[name]}")
    if "inconclusive" in fail_on(inputs):
        words.append("gate.fail_on_inconclusive=true")
    flags = ["--config-dir", inputs["CONFIG_DIR"]] if inputs.get("CONFIG_DIR") else []
    if inputs.get("AB_BASE"):
        base = inputs["AB_BASE"]
        flags += ["--base", base if base.startswith(("git:", "python:", "set:")) else f"git:{base}"]
        flags += ["--setup", inputs["SETUP"]] if inputs.get("SETUP") else []
        verb = "ab"
    else:
        words.append(f"gate.mode='{inputs['MODE']}'")
        words += [f"baseline={inputs['BASELINE']}"] if inputs.get("BASELINE") else []
        verb = "run"
    return [sys.executable, "-m", "ndbench", verb, *words, *shlex.split(inputs.get("OVERRIDES", "")), *flags]


def fail_on(inputs: dict[str, str]) -> list[str]:
    return [word.strip() for word in inputs.get("FAIL_ON", "").split(",") if word.strip()]


def newest(results: Path, before: set[Path]) -> Path | None:
    """The folder that this command made."""
    made = sorted(set(runs(results)) - before, key=lambda path: path.name)
    return made[-1] if made else None


def runs(results: Path) -> list[Path]:
    return [path for kind in ("runs", "ab") for path in (results / kind).glob("*") if path.is_dir()]


def main() -> int:
    inputs = {key.removeprefix("NDBENCH_"): value for key, value in os.environ.items() if key.startswith("NDBENCH_")}
    os.chdir(inputs.get("WORKING_DIRECTORY") or ".")
    try:
        words = command(inputs)
    except ValueError as error:
        print(f"::error title=ndbench::{error}")
        return 2
    results = Path(inputs["RESULTS_DIR"])
    before = set(runs(results))
    print(shlex.join(words), flush=True)
    code = subprocess.run(words, check=False).returncode
    folder = newest(results, before)
    outputs = {"exit-code": str(code)}
    verdict: dict[str, object] = {}
    if folder is not None:
        outputs["run-path"] = str(folder.resolve())
        if (folder / "verdict.json").is_file():
            verdict = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
            outputs |= {
                "verdict": str(verdict["verdict"]),
                "counts": json.dumps(verdict["counts"]),
                "report-path": str((folder / "summary.md").resolve()),
                "json-path": str((folder / "verdict.json").resolve()),
                "junit-path": str((folder / "junit.xml").resolve()),
            }
    with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as stream:
        stream.writelines(f"{key}={value}\n" for key, value in outputs.items())
    if not verdict:
        print(f"::error title=ndbench::there is no verdict (exit code {code}): the run did not come to its end")
        return code or 70
    tolerated = {FAILS_ON[word] for word in FAILS_ON if word not in fail_on(inputs)}
    return 0 if code in tolerated else code


if __name__ == "__main__":
    sys.exit(main())
