"""The states of the random number generators of this process, as JSON, and back."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def random_states(device_type: str) -> dict[str, Any]:
    """PyTorch's on the host and on the current device, Python's and NumPy's."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    return {
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "device": None if device_type == "cpu" else _text(torch.cuda.get_rng_state().numpy().tobytes()),
        "python": [version, _text(np.array(words, dtype="<u4").tobytes()), gauss],
        "numpy": [_text(np.asarray(keys, dtype="<u4").tobytes()), int(position), int(has_gauss), float(cached)],
    }


def restore_random_states(states: dict[str, Any], device_type: str) -> None:
    """Set what :func:`random_states` gave; the device's only if there was one."""
    torch.set_rng_state(_tensor(states["torch"]))
    if device_type != "cpu" and states["device"] is not None:
        torch.cuda.set_rng_state(_tensor(states["device"]))
    version, words, gauss = states["python"]
    numbers = tuple(int(word) for word in np.frombuffer(base64.b64decode(words), dtype="<u4"))
    random.setstate((version, numbers, gauss))
    keys, position, has_gauss, cached = states["numpy"]
    state = ("MT19937", np.frombuffer(base64.b64decode(keys), dtype="<u4"), position, has_gauss, cached)
    np.random.set_state(state)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
