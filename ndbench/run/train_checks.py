"""What ``ndbench train`` refuses of a configuration, beyond what a measurement refuses.

Asked before anything is loaded, and by ``ndbench import`` of the line that it prints.
"""

from __future__ import annotations

from ndbench.config import Config


def train_refusal(config: Config) -> str | None:
    """Why this configuration cannot be trained, in one line; None when it can."""
    checkpoint, evaluation = config.checkpoint, config.evaluation
    if config.engine.name != "ndbench":
        return f"train is the bundled engine's: engine={config.engine.name} has a loop of its own"
    if evaluation.every is not None and evaluation.fraction == 0:
        return f"evaluation.every={evaluation.every} needs evaluation.fraction above 0: nothing is held out"
    if checkpoint.dir is None:
        for key, value in (("resume", config.resume), ("checkpoint.every", checkpoint.every)):
            if value is not None:
                return f"{key}={value} needs checkpoint.dir=FOLDER"
    return None
