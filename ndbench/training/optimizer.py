"""The optimizer of a rank: elementwise ones work on the local shards directly, without DTensor dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ndbench import dotted
from ndbench.config import TrainingConfig
from ndbench.parallel._torch_private import local_tensor, make_capturable, same_storage
from ndbench.parallel.copies import Copies
from ndbench.parallel.held import Held
from ndbench.training.adamw import CompiledAdamW
from ndbench.training.schedule import schedule_factors

ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""torch.optim classes whose update of an element depends on that element alone: a shard is as good as the whole."""


class ShardOptimizer:
    """A torch optimizer over this rank's shards. ``optimizer`` is the torch object, ``taken`` how many steps it took.

    Its learning rate follows the schedule by that number alone: a host-side float, so no step waits for the device.
    With ``graphed`` the update reads it from the device instead, so that a captured one follows the schedule too.
    Gradients are read where ``held`` has them (None: on the parameters); ``copies`` are written with the parameters
    where that costs no pass of its own, and cast at the next step otherwise.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        training: TrainingConfig,
        graphed: bool = False,
        held: Held | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.held = Held(nn.ParameterList(self.parameters)) if held is None else held
        self.copies = copies
        kind, options = optimizer_class(training)
        self._local: list[nn.Parameter] | None = None
        if kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE:
            # Not of ``p.data``: the copies must see these change.
            self._local = [nn.Parameter(local_tensor(p)) for p in self.parameters]
        self.optimizer: torch.optim.Optimizer = kind(self._local or self.parameters, **options)
        self._compiled: CompiledAdamW | None = None
        if training.compile and isinstance(self.optimizer, torch.optim.AdamW) and self._local is not None:
            self._compiled = CompiledAdamW(self.optimizer)
        self.taken = 0
        self._factor = schedule_factors(training)
        self._rates: list[float | None] = [group.get("lr") for group in self.optimizer.param_groups]
        self._device_rates: list[torch.Tensor] | None = None
        if graphed:
            assert "fused" in options, "others read the rate on the host, and are refused"
            # Ours computes with it as with a host's float; torch's fused kernels read a float32.
            dtype = torch.float64 if self.scales else torch.float32
            device = local_tensor(self.parameters[0].data).device
            self._device_rates = [torch.zeros((), dtype=dtype, device=device) for _ in self._rates]
            make_capturable(self.optimizer)

    @property
    def scales(self) -> bool:
        """Does :meth:`step` scale the gradients on its way, so that clipping needs no pass of its own?"""
        return self._compiled is not None

    def step(self, scale: torch.Tensor | None = None) -> None:
        """Update the parameters from their gradients at the rate of this step, and forget the gradients.

        With ``scale``, a scalar, from the gradients times it; only when it :attr:`scales`.
        """
        self.advance()
        self.update(scale)

    def advance(self) -> None:
        """The host's part of a step: it is counted, and its learning rate set."""
        factor = self._factor(self.taken)
        self.taken += 1
        for index, (group, rate) in enumerate(zip(self.optimizer.param_groups, self._rates, strict=True)):
            if rate is not None:
                group["lr"] = rate * factor
                if self._device_rates is not None:
                    self._device_rates[index].fill_(group["lr"])

    def update(self, scale: torch.Tensor | None = None) -> None:
        """The device's part of a step: see :meth:`step`."""
        assert scale is None or self.scales, "this optimizer does not scale"
        with self._reading_device_rates():
            self._update(scale)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        self.held.forget()
        for parameter in (*self.parameters, *(self._local or ())):
            parameter.grad = None

    @property
    def _writes_copies(self) -> bool:
        return self.copies is not None and self._compiled is not None

    def prepare_capture(self) -> None:
        """Before a step is captured: it holds the cast of the parameters, unless each step leaves copies behind.

        Copies that peers fetch are cast before the step, captured or not.
        """
        if self.copies is not None and not self._writes_copies:
            self.copies.distrust()
        self.prepare_replay()

    def prepare_replay(self) -> None:
        """Before a captured step is repeated: what it computes with is what the parameters are now."""
        if self.copies is not None and self._writes_copies:
            self.copies.refresh()

    def replayed(self) -> None:
        """After a captured step was repeated, which no counter of the parameters has seen."""
        if self.copies is not None and not self._writes_copies:
            self.copies.distrust()

    def abandon(self) -> None:
        """After a step that broke off, or whose work was never done: nothing of it counts."""
        self.forget_gradients()
        if self.copies is not None:
            self.copies.distrust()

    def state_tensors(self) -> list[torch.Tensor]:
        """What the optimizer remembers, in a fixed order; loading a checkpoint puts other tensors in their place."""
        states = self.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    @contextmanager
    def _reading_device_rates(self) -> Iterator[None]:
        groups, rates = self.optimizer.param_groups, self._device_rates
        if rates is None:
            yield
            return
        known = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            yield
        finally:
            for group, number in zip(groups, known, strict=True):
                group["lr"] = number

    def _update(self, scale: torch.Tensor | None) -> None:
        if self._local is None:
            self.held.settle()
            self.optimizer.step()
        elif self._compiled is None:
            self.held.widen()
            for local, parameter in self._moved(self._local):
                gradient = self.held.of(parameter)
                local.grad = None if gradient is None else gradient.to(local.dtype)
            self.optimizer.step()
        else:
            self._step_compiled(self._compiled, self._local, scale)

    def _step_compiled(self, compiled: CompiledAdamW, locals_: list[nn.Parameter], scale: torch.Tensor | None) -> None:
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        copies: dict[torch.Tensor, torch.Tensor] = {}
        unchanged = self.copies is not None and self.copies.unchanged
        for local, parameter in self._moved(locals_):
            gradient = self.held.of(parameter)
            if gradient is not None:
                gradients[local] = gradient
            copy = None if self.copies is None else self.copies.of(parameter)
            if copy is not None:
                copies[local] = copy
        device = locals_[0].device  # with offload not that of the norm
        compiled.step(torch.ones((), device=device) if scale is None else scale.to(device), gradients, copies)
        if self.copies is not None and unchanged:
            self.copies.written()

    def _moved(self, locals_: list[nn.Parameter]) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        for local, parameter in zip(locals_, self.parameters, strict=True):
            assert same_storage(local, local_tensor(parameter)), "a parameter moved after the optimizer was made"
            yield local, parameter


def optimizer_class(training: TrainingConfig) -> tuple[Any, dict[str, Any]]:
    """The class and its arguments: ``adamw``, ``sgd``, or a dotted path to a torch optimizer (learning rate only).

    Raises ``ValueError`` for a name that is neither.
    """
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "adamw":
        first, second = training.betas
        return torch.optim.AdamW, {"lr": rate, "weight_decay": decay, "betas": (first, second), "fused": True}
    if training.optimizer == "sgd":
        options = {"lr": rate, "weight_decay": decay, "momentum": training.momentum, "fused": True}
        return torch.optim.SGD, options
    if "." not in training.optimizer:
        raise ValueError(f"training.optimizer '{training.optimizer}' is not known: adamw, sgd, or a dotted path")
    kind = dotted.load(training.optimizer, "training.optimizer", "Class")
    return kind, {"lr": rate}
