"""A file of another tool to the overrides of the same run: the one entry of this room is :func:`import_file`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ndbench.config import TrainingConfig
from ndbench.importing import accelerate, axolotl
from ndbench.importing.axolotl_training import BENCHMARK_STEPS
from ndbench.importing.findings import ASSUMED, LOST, UNDERSTOOD, Finding, Findings, words
from ndbench.importing.reading import NAMES, read_file
from ndbench.matrix.sources import GROUPS, SUITE_FOLDERS
from ndbench.parallel.config import ParallelismConfig

WHOLE_GROUPS = ("model", "parallelism")
"""A choice of the user's among these replaces every key of the group that the file gave."""

LEFT_OUT_AT_DEFAULT: dict[str, Any] = {
    **{f"parallelism.{axis}_size": 1 for axis in ("dp_replicate", "cp", "tp")},
    **{
        f"parallelism.{field.name}": field.default
        for field in dataclasses.fields(ParallelismConfig)
        if not field.name.endswith("_size")
    },
    **{
        f"training.{field.name}": field.default
        for field in dataclasses.fields(TrainingConfig)
        if field.name
        in (
            "activation_checkpointing",
            "activation_offload",
            "compile",
            "optimizer",
            "max_grad_norm",
            "min_learning_rate_ratio",
        )
    },
}
"""Keys that no file of ``conf`` sets for these runs: at the schema's default they need not stand on the line."""


_NO_DEFAULT = object()


@dataclass(frozen=True)
class Imported:
    """``findings`` in the order of the file, then what it leaves to its tool."""

    path: str
    tool: str
    overrides: tuple[str, ...]
    train_overrides: tuple[str, ...]
    """For ``ndbench train``, which reads more of the file; empty when there is nothing that it alone would take."""
    train_lacks: tuple[str, ...]
    """What the file says and those overrides do not, with what to add to them."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    missing_model: str | None
    settings: dict[str, Any]
    """The overrides as a suite's settings."""

    @property
    def command(self) -> str:
        return shlex.join(["ndbench", *self.overrides])

    @property
    def train_command(self) -> str:
        return shlex.join(["ndbench", "train", *self.train_overrides]) if self.train_overrides else ""


def import_file(path: str | Path, given: Sequence[str] = (), world_size: int | None = None) -> Imported:
    """Translate; ``given`` are overrides of the user's own, which win.

    ``world_size``: how many processes it is launched with, which an Axolotl configuration does not say. Raises
    ``ValueError``, one line, naming the file.
    """
    tool, values, twice = read_file(Path(path))
    found = Findings(str(path), values)
    found.notes += [f"{key} is given twice in the file: the last counts" for key in twice]
    if tool == "accelerate":
        if world_size is not None:
            found.values["num_processes"] = world_size
        accelerate.translate(found)
    else:
        axolotl.translate(found, world_size)
    own = dict(word.split("=", 1) for word in given)
    groups = set(WHOLE_GROUPS) & set(own)
    found.overrides = {key: value for key, value in found.overrides.items() if key.split(".")[0] not in groups}
    named = [key for key in ("model", "model.path", "model.target") if key in own]
    if named:
        found.missing_model = None
    elif tool == "accelerate":
        found.notes.append(accelerate.IN_THE_SCRIPT)
    overrides = {
        key: value
        for key, value in found.overrides.items()
        if key not in own and LEFT_OUT_AT_DEFAULT.get(key, _NO_DEFAULT) != value
    }
    ordered = dict(sorted(overrides.items(), key=lambda item: _place(item[0])))
    training = {key: value for key, value in found.train.items() if key not in own}
    order = {key: index for index, key in enumerate(values)}
    return Imported(
        path=str(path),
        tool=NAMES[tool],
        overrides=(*words(ordered), *given),
        train_overrides=(*words(ordered | training), *given) if training else (),
        train_lacks=tuple(_lacks(found.values, ordered | training, set(own))) if training else (),
        findings=tuple(
            _beside(finding, own, groups, named)
            for finding in sorted(found.found, key=lambda finding: order.get(finding.key, len(order)))
        ),
        notes=tuple(found.notes),
        missing_model=found.missing_model,
        settings=ordered | {key: yaml.safe_load(value) for key, value in own.items()},
    )


def _beside(finding: Finding, own: Mapping[str, str], groups: set[str], named: Sequence[str]) -> Finding:
    """A finding without what the user's own overrides replace, which it then names.

    ``groups``: chosen whole by the user; ``named``: the user's keys that say what the model is.
    """
    keys = [word.partition("=")[0] for word in finding.overrides]
    lost = {key: key if key in own else key.split(".")[0] for key in keys if key in own or key.split(".")[0] in groups}
    winners = list(dict.fromkeys(lost.values())) or (list(named) if finding.key == "base_model" else [])
    if not winners:
        return finding
    yours = f"yours wins: {', '.join(f'{key}={own[key]}' for key in winners)}"
    left = tuple(word for word, key in zip(finding.overrides, keys, strict=True) if key not in lost)
    if finding.key != "base_model" and (left or finding.status == LOST):
        return dataclasses.replace(finding, overrides=left, why="; ".join(filter(None, (finding.why, yours))))
    status = ASSUMED if finding.status == ASSUMED else UNDERSTOOD
    return dataclasses.replace(finding, overrides=left, status=status, why=yours)


def _lacks(values: Mapping[str, Any], overrides: Mapping[str, Any], own: set[str]) -> Iterator[str]:
    """What a training run needs of the file that is not translated: its data and its number of steps."""
    text = [key for key in ("datasets", "pretraining_dataset") if values.get(key)]
    text += sorted({key.split(".")[0] for key in values if key.startswith(("datasets.", "pretraining_dataset."))})
    if text and not any(key == "data" or key.startswith("data.") for key in own):
        yield (
            f"{text[0]} is not translated, the line trains on synthetic tokens: add data=dataset "
            "data.dataset=FOLDER_OR_ID data.tokenizer=FOLDER, or data=text data.files=[FILE,FOLDER]"
        )
    if "training.steps" in overrides or "training.steps" in own:
        return
    warmup = overrides.get("training.warmup_steps", 0)
    rising = ", all of them warm-up" if warmup >= BENCHMARK_STEPS else f", {warmup} of them warm-up" if warmup else ""
    epochs = f"num_epochs ({values['num_epochs']}) is not translated" if values.get("num_epochs") else "no max_steps"
    yield f"{epochs}, the line takes {BENCHMARK_STEPS} steps{rising}: add training.steps=N"


def _place(key: str) -> tuple[int, int]:
    """Groups before single keys, in the order of the schema."""
    group = key.split(".")[0]
    return ("." in key or group == "world_size", GROUPS.index(group) if group in GROUPS else 2)


def suite_file(imported: Imported, target: Path) -> tuple[Path, str]:
    """(path, content) of a suite of one cell with the imported settings, and every key that was lost as a comment.

    ``target`` is a folder for ``--config-dir``, or a YAML file in its ``suites``. Raises ``ValueError`` otherwise, and
    for a file that is there already.
    """
    path = target if target.suffix in (".yaml", ".yml") else target / "suites" / f"{Path(imported.path).stem}.yaml"
    if path.suffix != ".yaml" or path.parent.name not in SUITE_FOLDERS:
        raise ValueError(f"--output {target}: a suite is found as FOLDER/suites/NAME.yaml; name that, or FOLDER alone")
    if path.exists():
        raise ValueError(f"--output {path} is there already: it is not replaced")
    lost = [finding for finding in imported.findings if finding.status == LOST]
    comments = [f"# {imported.tool} configuration {Path(imported.path).name}, imported.", "# Not carried over:"]
    comments += [f"#   {finding.key}: {finding.why}" for finding in lost] or ["#   nothing"]
    suite = {
        "description": f"imported from {Path(imported.path).name} ({imported.tool})",
        "settings": {"all": imported.settings},
    }
    return path, "\n".join(comments) + "\n" + yaml.safe_dump(suite, sort_keys=False, width=120)
