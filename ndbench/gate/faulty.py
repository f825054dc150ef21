"""The bundled engine with one planted fault, named in a file: what ``ndbench selftest`` measures.

The file's path is part of the cell's identity and its content is not, so that a faulty cell is compared with a sound
one as the same cell, like a change of code would be.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndbench.engines.bundled import BundledEngine
from ndbench.engines.protocol import Batch, StepResult

if TYPE_CHECKING:
    from ndbench.config import Cell
    from ndbench.parallel.mesh import Mesh

NONE = "none"
FAULTS = ("memory leak", "gradient x2", "loss shift", "nan", "all-gather", "token count")
LEAK_BYTES = 4 * 2**20
LOSS_SHIFT = 1e-3
NAN_AT_STEP = 3


class FaultyEngine(BundledEngine):
    """``plan`` is a file that holds one of :data:`FAULTS`, or ``none``."""

    def __init__(self, plan: str, **options: Any) -> None:
        super().__init__(**options)
        self._plan = Path(plan)
        self._fault = NONE
        self._steps = 0
        self.leaked: list[Any] = []

    def setup(self, cell: Cell, mesh: Mesh) -> None:
        self._fault = self._plan.read_text(encoding="utf-8").strip()
        if self._fault not in (NONE, *FAULTS):
            raise ValueError(f"{self._plan} names the fault '{self._fault}'; known: {', '.join((NONE, *FAULTS))}")
        super().setup(cell, mesh)
        if self._fault == "gradient x2":
            self._double_gradients()
        if self._fault == "all-gather":
            self._gather_in_last_layer(mesh)

    def step(self, batch: Batch) -> StepResult:
        import torch

        if self._fault == "memory leak":
            self.leaked.append(torch.zeros(LEAK_BYTES, dtype=torch.uint8, device=batch.input_ids.device))
        result = super().step(batch)
        loss: Any = result.loss
        if self._fault == "loss shift":
            result.loss = loss * (1 + LOSS_SHIFT)
        if self._fault == "nan" and self._steps >= NAN_AT_STEP:
            result.loss = loss * float("nan")
        if self._fault == "token count" and result.tokens is not None:
            result.tokens = result.tokens + 1
        self._steps += 1
        return result

    def _double_gradients(self) -> None:
        assert self._step is not None, "set up"
        gradients = self._step.gradients
        norm = gradients.norm

        def doubled(*also: Any) -> Any:
            for parameter in gradients.parameters:
                gradient = gradients.held.of(parameter)
                if gradient is not None:
                    gradient.mul_(2)
            return norm(*also)

        gradients.norm = doubled  # type: ignore[method-assign]

    def _gather_in_last_layer(self, mesh: Mesh) -> None:
        import torch
        import torch.distributed as dist

        assert self.model is not None, "set up"
        group = mesh.fsdp.get_group()

        def gather(_module: Any, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            mine = hidden.detach().reshape(-1)[:64].contiguous()
            gathered = torch.empty(len(mine) * dist.get_world_size(group), dtype=mine.dtype, device=mine.device)
            dist.all_gather_into_tensor(gathered, mine, group=group)

        layers = [module for name, module in self.model.named_modules() if name.endswith("layers")]
        layers[0][-1].mlp.register_forward_hook(gather)  # type: ignore[index, operator]
