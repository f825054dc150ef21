"""The states of the random number generators of this process, as JSON, and back."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
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


def prepare_random_states(states: dict[str, Any], device_type: str) -> Callable[[], None]:
    """A function that sets what :func:`random_states` gave; the device's only if there was one.

    Raises ``ValueError`` or ``TypeError`` for what cannot be set.
    """
    host = _tensor(states["torch"], len(torch.get_rng_state()))
    device = None
    if device_type != "cpu" and states["device"] is not None:
        device = _tensor(states["device"], len(torch.cuda.get_rng_state()))
    version, words, gauss = states["python"]
    python = (version, tuple(int(word) for word in np.frombuffer(base64.b64decode(words), dtype="<u4")), gauss)
    random.Random().setstate(python)
    keys, position, has_gauss, cached = states["numpy"]
    numpy = ("MT19937", np.frombuffer(base64.b64decode(keys), dtype="<u4"), position, has_gauss, cached)
    np.random.RandomState().set_state(numpy)

    def restore() -> None:
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)
        random.setstate(python)
        np.random.set_state(numpy)

    return restore


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(text: str, length: int) -> torch.Tensor:
    data = bytearray(base64.b64decode(text, validate=True))
    if len(data) != length:
        raise ValueError(f"a generator's state has {len(data)} bytes, not {length}")
    return torch.frombuffer(data, dtype=torch.uint8)
