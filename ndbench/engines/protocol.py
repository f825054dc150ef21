"""The seam between the harness and the code it measures.

An engine is found by name (entry point group ``ndbench.engines``) or by a dotted path (``engine.target``). Timing,
memory, data and records belong to the harness; the engine only builds a model and takes steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ndbench import dotted

if TYPE_CHECKING:
    import torch

    from ndbench.config import Cell
    from ndbench.parallel.mesh import Mesh


@dataclass
class Batch:
    """One optimizer step's data of one batch rank: the whole sequence, the same on every rank of a tp x cp group.

    All tensors are [sequences, sequence_length] int64 on the rank's device, ``sequences`` being the global batch
    size over the number of batch ranks. An engine that accumulates splits them into micro-batches itself.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    """Already shifted: ``labels[i]`` is the token after ``input_ids[i]``; -100 where no loss is taken."""
    position_ids: torch.Tensor
    document_ids: torch.Tensor | None = None
    """Packed documents: attention stays within equal ids; null where a sequence is one document."""


@dataclass
class StepResult:
    """What one optimizer step did. Tensors are left on the device, so that no step waits for a copy to the host."""

    loss: torch.Tensor | float
    """Sum over valid tokens of the global batch / number of those tokens; equal on every rank."""
    grad_norm: torch.Tensor | float | None
    """Norm of the global gradient before clipping; equal on every rank; null when the engine does not say."""
    tokens: torch.Tensor | int | None
    """Valid (loss-bearing) tokens of the global batch, each counted once; the harness checks it against the data."""


@runtime_checkable
class Engine(Protocol):
    def refuse(self, cell: Cell) -> str | None:
        """One line with the numbers when this engine cannot run ``cell``, else None. Called in the parent process."""

    def setup(self, cell: Cell, mesh: Mesh) -> None:
        """Build model and optimizer on this rank. The process group exists, the device is set."""

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step."""

    def close(self) -> None:
        """Release what ``setup`` took. The process group is destroyed by the harness."""

    # Optional: ``refuse_plan(cell) -> str | None``: refusals that need the model's code; asked when a run is about to
    # start, not by ``show``.
    # Optional: ``model`` (an nn.Module) lets the harness name the module a collective is issued from.
    # Optional: ``training_state() -> (model, optimizer, parameters)`` lets ``measure.checkpoint`` save and load it; the
    # parameters are the model's, in the order of the optimizer's.
    # Optional: ``info() -> dict[str, Any]`` adds facts to the record (attention kernel, graph breaks).


@contextmanager
def asking(cell: Cell) -> Iterator[None]:
    """Around questions to an engine before a launch: one that cannot be asked is the user's to mend (ValueError)."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError):
            raise ValueError(str(error)) from error
        named = cell.config.engine
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"engine {named.target or named.name} could not be asked about {cell.name}: {told}") from error


def load_engine(name: str, target: str | None = None, **options: Any) -> Engine:
    """The engine of a cell: ``target`` when given, else the entry point ``name``.

    Raises ``ValueError`` naming the known engines when there is none of that name, or an option that it does not have.
    """
    from importlib.metadata import entry_points

    if target is None:
        found = {entry.name: entry for entry in entry_points(group="ndbench.engines")}
        if name not in found:
            raise ValueError(f"engine '{name}' is not known; known engines: {', '.join(sorted(found))}")
        factory = found[name].load()
    else:
        factory = dotted.load(target, "engine.target", "Class")
    _refuse_unknown_options(factory, target or name, options)
    engine: Engine = factory(**options)
    return engine


class UnknownOptionError(ValueError):
    """An engine has no option of a name in ``engine.options``."""


def _refuse_unknown_options(factory: Any, engine: str, options: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # made by other means than Python: it tells itself what it lacks
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY]
    for option in options:
        if option not in known:
            told = f"its options: {', '.join(known)}" if known else "it has none"
            raise UnknownOptionError(f"engine {engine} has no option '{option}' (engine.options.{option}); {told}")
