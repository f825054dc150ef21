"""An optimizer's state as pieces and JSON, and back.

A tensor shaped like its parameter lies over the ranks as the parameter does; others (a step count) are whole; plain
numbers and the groups' options are JSON. A state that was never stepped is empty and comes back empty.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ndbench.parallel._torch_private import local_tensor
from ndbench.parallel.state_files import CheckpointError
from ndbench.parallel.state_pieces import Piece, holders, piece, whole

OF_THE_MACHINE = ("foreach", "fused", "capturable")
"""Options that say how a step is computed, not what: a run keeps its own."""


class OptimizerState:
    """The optimizer of one rank. ``parameters`` are the model's, in the order of the optimizer's own, which may be
    their local shards. Raises :class:`CheckpointError` for a parameter that the model lacks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        names: Mapping[int, str],
        world_size: int,
    ) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if len(held) != len(parameters):
            raise CheckpointError(
                f"the optimizer has {len(held)} parameters, {len(parameters)} of the model were given"
            )
        unknown = [tuple(p.shape) for p in parameters if id(p) not in names]
        if unknown:
            raise CheckpointError(
                f"{len(unknown)} parameters of the optimizer are not the model's; shapes {unknown[:3]}"
            )
        self.optimizer, self.world_size = optimizer, world_size
        self._by_name = {names[id(p)]: (own, p) for own, p in zip(held, parameters, strict=True)}
        self._names = {id(own): name for name, (own, _) in self._by_name.items()}

    @property
    def description(self) -> dict[str, Any]:
        """Class and groups, as JSON; equal on every rank."""
        groups = []
        for group in self.optimizer.param_groups:
            options = {key: _plain(key, value) for key, value in group.items() if key != "params"}
            groups.append({"options": options, "parameters": [self._names[id(p)] for p in group["params"]]})
        return {"class": type(self.optimizer).__name__, "groups": groups}

    def pieces(self) -> tuple[list[Piece], dict[str, dict[str, Any]]]:
        """The state's tensors, and its plain values by parameter and key."""
        pieces: list[Piece] = []
        values: dict[str, dict[str, Any]] = {}
        for name, (own, parameter) in self._by_name.items():
            if own not in self.optimizer.state:
                continue
            values[name] = {}
            for key, value in self.optimizer.state[own].items():
                full_name = tensor_name(name, key)
                if not isinstance(value, torch.Tensor):
                    values[name][key] = _plain(full_name, value)
                elif local_tensor(value).shape == local_tensor(parameter).shape:
                    pieces.append(piece(full_name, parameter, value, self.world_size))
                elif isinstance(value, DTensor) and any(hasattr(place, "dim") for place in value.placements):
                    raise CheckpointError(f"{full_name} is sharded, but not as its parameter: it cannot be saved")
                elif local_tensor(parameter).numel() or not parameter.numel():
                    pieces.append(whole(full_name, value, holders(parameter, self.world_size)))
        return pieces, values

    def refuse(self, saved: Mapping[str, Any]) -> str | None:
        """Why the optimizer described by ``saved`` is another one."""
        mine = self.description
        if saved["class"] != mine["class"]:
            return f"its optimizer is {saved['class']}, this run's is {mine['class']}"
        theirs, ours = ([group["parameters"] for group in each["groups"]] for each in (saved, mine))
        if theirs != ours:
            return (
                f"its optimizer has {_shape(theirs)} parameters a group, this run's has {_shape(ours)}, or other ones"
            )
        return None

    def restore(
        self,
        saved: Mapping[str, Any],
        values: Mapping[str, Mapping[str, Any]],
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        read: Callable[[Piece], None],
    ) -> None:
        """Replace the state: ``shapes`` has the saved tensors by name, ``read`` fills a piece's tensor."""
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        keys: dict[str, list[str]] = {name: [] for name in values}
        for full_name in shapes:
            if full_name.startswith("optimizer/"):
                _, name, key = full_name.split("/", 2)
                keys[name].append(key)
        for group in self.optimizer.param_groups:
            on_device = bool(group.get("fused") or group.get("capturable"))
            for own in group["params"]:
                name = self._names[id(own)]
                if name not in keys:
                    continue
                state[own] = dict(values[name])
                for key in keys[name]:
                    shape, dtype = shapes[tensor_name(name, key)]
                    state[own][key] = self._tensor(name, key, shape, dtype, on_device, read)
        self.optimizer.state = state
        for group, described in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            _set_options(group, described["options"])

    def _tensor(
        self,
        name: str,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        on_device: bool,
        read: Callable[[Piece], None],
    ) -> torch.Tensor:
        own, parameter = self._by_name[name]
        local = local_tensor(parameter)
        full_name = tensor_name(name, key)
        if shape == tuple(parameter.shape):
            value: torch.Tensor = torch.empty_like(local, dtype=dtype, requires_grad=False)
            read(piece(full_name, parameter, value, self.world_size))
            if isinstance(own, DTensor):
                value = DTensor.from_local(
                    value, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
                )
            return value
        # As torch's load_state_dict: a step count stays on the host unless the step runs on the device.
        device = torch.device("cpu") if key == "step" and not on_device else local.device
        value = torch.empty(shape, dtype=dtype, device=device)
        read(whole(full_name, value, ()))
        return value


def tensor_name(parameter: str, key: str) -> str:
    return f"optimizer/{parameter}/{key}"


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} of the optimizer is {value!r}, which JSON cannot hold") from error
    return value


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key in OF_THE_MACHINE:
            continue
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _shape(groups: list[list[str]]) -> str:
    return " + ".join(str(len(group)) for group in groups)
