"""Where gradients are when GPUs of one host sum them by copies: with who owns them, or where NCCL leaves them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ndbench.parallel._torch_private import placed_like
from ndbench.parallel.held import Held
from ndbench.parallel.peer_gather import PeerShards
from ndbench.parallel.peer_scatter import Reducer


class HeldByOwners(Held):
    """Gradients in ``reducer`` after a step that it took, else where ``otherwise`` has them.

    ``units`` are its parameters, in its order. ``shards`` is what the step computes with, if others fetch it.
    """

    def __init__(
        self,
        model: nn.Module,
        otherwise: Held,
        reducer: Reducer,
        units: Sequence[Sequence[nn.Parameter]],
        shards: PeerShards | None = None,
    ) -> None:
        super().__init__(model)
        self._otherwise, self._shards = otherwise, shards
        self._reducer, self._units = reducer, [list(unit) for unit in units]
        self._places = {id(p): (unit, index) for unit, ps in enumerate(self._units) for index, p in enumerate(ps)}

    def expect(self, last: bool) -> None:
        self._otherwise.expect(last)
        if self._shards is not None:
            self._shards.used()
        self._reducer.expect(last)

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if not self._reducer.begun or id(parameter) not in self._places:
            return self._otherwise.of(parameter)
        if self._shards is not None and not self._reducer.finished:
            self._shards.join()
        return self._reducer.of(*self._places[id(parameter)])

    def norm_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if not self._reducer.begun or id(parameter) not in self._places:
            return self._otherwise.norm_of(parameter)
        if self._shards is not None and not self._reducer.finished:
            self._shards.join()
        return self._reducer.norm_of(*self._places[id(parameter)])

    def put(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        super().put(parameter, value)
        if self._reducer.begun and id(parameter) in self._places:
            self._reducer.changed(*self._places[id(parameter)])

    def arrivals(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        if not self._reducer.begun:
            return self._otherwise.arrivals(parameters)
        wanted = {id(parameter): parameter for parameter in parameters}
        groups = [[wanted.pop(id(p)) for p in unit if id(p) in wanted] for unit in self._units]
        return [group for group in (*groups, list(wanted.values())) if group]

    def settle(self) -> None:
        if not self._reducer.begun:
            self._otherwise.settle()
            return
        for parameter in (parameter for unit in self._units for parameter in unit):
            gradient = self.of(parameter)
            if gradient is not None:
                parameter.grad = placed_like(parameter, gradient.to(parameter.dtype))
        self._reducer.forget()

    def forget(self) -> None:
        self._otherwise.forget()
        self._reducer.forget()
        if self._shards is not None:
            self._shards.forget()
