"""The computed values of a cell (``"= 2 * world_size"``), set after all plain ones."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from ndbench.config import Config
from ndbench.matrix.expressions import parse_expression
from ndbench.matrix.keys import get_value, set_value, typed
from ndbench.matrix.layouts import DEGREES, LAYOUT_KEYS
from ndbench.matrix.resolve import fill_world


def compute(config: Config, computed: Mapping[str, str], where: str) -> None:
    """Set the values in place: those of the layout first, so that the others see its degrees.

    Raises ``ValueError`` naming ``where`` (the file) and the key for one that reads another, or has no value.
    """
    fill_world(config)
    _set(config, computed, [key for key in computed if key in LAYOUT_KEYS], where)
    with contextlib.suppress(ValueError):  # the cell is refused for it later
        config.parallelism = config.parallelism.resolved(fill_world(config))
    _set(config, computed, [key for key in computed if key not in LAYOUT_KEYS], where)


def _set(config: Config, computed: Mapping[str, str], keys: list[str], where: str) -> None:
    unknown = {key for key in DEGREES if get_value(config, key) == -1}
    unknown |= {"layout"} if unknown else set()
    for key in keys:
        value = computed[key]
        expression = parse_expression(value[1:], f"{where}: {key}")
        if both := sorted(expression.keys & computed.keys()):
            raise ValueError(f"{where}: {key}: '{value}' reads {', '.join(both)}, which is computed, too")
        if not (reads := sorted(expression.keys & unknown)):
            set_value(config, key, typed(key, expression.value(config)))
        elif key in LAYOUT_KEYS:
            raise ValueError(f"{where}: {key}: '{value}' reads {', '.join(reads)}, which is known only after it")
