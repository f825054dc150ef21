"""Which module a step is in, in forward and backward, by hooks on the model for the time of one instrumented step."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ndbench.measure import _torch_private as private

WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)(?=\.|$)")
"""Parts of a module's name that wrappers insert."""


class ModuleStack:
    """Names of the modules being run, outermost first; the root goes by its class name.

    In backward a module begins when the gradient of one of its outputs is known and ends when that of an input is. A
    module that shows neither end (no input needs a gradient) ends when a module outside of it begins.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._backward_end_queued = False
        self._root = "" if model is None else type(model).__name__

    @property
    def current(self) -> str | None:
        """Name of the innermost module, or None outside of the model."""
        return (self._stack[-1] or self._root) if self._stack else None

    def attach(self) -> None:
        """Hook every module, around the hooks that are there already: FSDP and TP communicate in those."""
        if self._model is None:
            return
        for wrapped_name, module in self._model.named_modules():
            name = WRAPPERS.sub("", wrapped_name).removeprefix(".")
            self._handles += [
                module.register_forward_pre_hook(self._before_forward(name), prepend=True, with_kwargs=True),
                module.register_forward_hook(self._with_output(name), prepend=True),
                module.register_forward_hook(self._after_forward(name), always_call=True),
            ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack = []

    def _before_forward(self, name: str) -> Any:
        def hook(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(name)
            for tensor in _differentiable((args, kwargs)):
                private.on_gradient(tensor, lambda: self._leave(name))

        return hook

    def _with_output(self, name: str) -> Any:
        # Before FSDP's hook, so that our hook on the output's gradient also comes before the all-gather of FSDP's.
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            for tensor in _differentiable(output):
                private.on_gradient(tensor, lambda: self._enter_backward(name))

        return hook

    def _after_forward(self, name: str) -> Any:
        # After TP's hook, which may have made another output.
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._leave(name)
            for tensor in _differentiable(output):
                private.on_gradient(tensor, lambda: self._enter_backward(name))

        return hook

    def _leave(self, name: str) -> None:
        if name in self._stack:
            last = len(self._stack) - 1 - self._stack[::-1].index(name)
            del self._stack[last:]

    def _enter_backward(self, name: str) -> None:
        if not self._backward_end_queued:
            self._backward_end_queued = True
            private.at_end_of_backward(self._end_backward)
        while self._stack and not _is_inside(name, self._stack[-1]):
            self._stack.pop()
        if name not in self._stack:
            self._stack.append(name)

    def _end_backward(self) -> None:
        # FSDP reduces what is left in a callback of its own, queued after this one: that is the root's.
        self._stack = [""]
        private.at_end_of_backward(self._stack.clear)
        self._backward_end_queued = False


def _is_inside(name: str, other: str) -> bool:
    """Is ``name`` the module ``other`` or one of its descendants?"""
    return not other or name == other or name.startswith(f"{other}.")


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
