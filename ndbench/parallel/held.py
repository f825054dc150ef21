"""Where a rank's gradients are between backward and the update: on the parameters, or in a home of their own.

A parameter's ``grad`` must have its dtype, so the low-precision gradient of a copy (``precision.py``) cannot be there.
One micro-batch's gradient is kept as backward computed it, whoever reads it sees the same numbers as in float32; a
second one makes the sum float32. It knows nothing of norms, of optimizers, or of other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ndbench.parallel._torch_private import local_tensor, placed_like
from ndbench.parallel.data import set_gradient_sync

Leaves = Iterable[tuple[nn.Parameter, nn.Parameter]]
"""Each parameter with the tensor that backward leaves its gradient on: a copy of it, or itself."""


class Held:
    """Gradients on the parameters of ``model`` themselves. FSDP reduces them, the rest has nothing to reduce."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._all = list(model.parameters())

    def expect(self, last: bool) -> None:
        """Before each backward of a step: whether it is the last, which reduces over the ranks that share gradients."""
        set_gradient_sync(self._model, last)

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the gradient, reduced, in the dtype it is held in; None where backward left none."""
        return None if parameter.grad is None else local_tensor(parameter.grad)

    def norm_of(self, parameter: nn.Parameter) -> torch.Tensor | None:  # noqa: ARG002
        """Euclidean norm of what :meth:`of` returns, a float32 scalar, where it is known without reading that."""
        return None

    def put(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the gradient by ``value``, in the parameter's dtype."""
        have = self.of(parameter)
        assert have is not None, "there is one to replace"
        have.copy_(value)

    def arrivals(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """``parameters`` in the groups in which their gradients arrive, the first first."""
        return [list(parameters)]

    def widen(self) -> None:
        """Hold every gradient in its parameter's dtype from here on: what changes gradients needs it."""

    def settle(self) -> None:
        """Move the gradients to the parameters' ``grad``, for those who look there."""

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter in self._all:
            parameter.grad = None


class HeldAsComputed(Held):
    """Gradients of ``leaves`` as backward computes them, until a second micro-batch adds to them."""

    def __init__(self, model: nn.Module, leaves: Leaves) -> None:
        super().__init__(model)
        pairs = list(leaves)
        self._parameters = [parameter for parameter, _ in pairs]
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._held: list[torch.Tensor | None] = [None] * len(pairs)
        for index, (parameter, leaf) in enumerate(pairs):
            # The hook must not know its leaf, nor whoever does: a cycle through it is never collected.
            take = functools.partial(_take, self._held, index, parameter.dtype)
            leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        held = self._held[self._index[id(parameter)]]
        return super().of(parameter) if held is None else held

    def put(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._held[self._index[id(parameter)]] = value

    def widen(self) -> None:
        for index, (parameter, held) in enumerate(zip(self._parameters, self._held, strict=True)):
            self._held[index] = None if held is None else held.to(parameter.dtype)

    def settle(self) -> None:
        for index, parameter in enumerate(self._parameters):
            held, self._held[index] = self._held[index], None
            if held is not None:
                parameter.grad = placed_like(parameter, held.to(parameter.dtype))

    def forget(self) -> None:
        super().forget()
        self._held[:] = [None] * len(self._held)


def _take(held: list[torch.Tensor | None], index: int, dtype: torch.dtype, leaf: torch.Tensor) -> None:
    gradient, before = taken(leaf), held[index]
    held[index] = gradient if before is None else before.to(dtype).add_(gradient)


def taken(leaf: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient that backward has just left on ``leaf``, which has none then."""
    assert leaf.grad is not None, "the hook runs when there is one"
    gradient = local_tensor(leaf.grad)
    leaf.grad = None
    return gradient
