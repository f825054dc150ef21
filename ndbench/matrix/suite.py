"""A suite: what varies (axes, points, layouts), what is left out, and the settings it needs on each kind of device.

Reads nothing and runs nothing; ``compose`` hands in the file's content, ``expand`` makes cells of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from ndbench.matrix.expressions import parse_expression
from ndbench.matrix.keys import type_of, typed
from ndbench.matrix.layouts import parse_layout
from ndbench.matrix.sources import GROUPS, Sources, close_to
from ndbench.parallel.config import AXES

DEVICES = ("all", "cpu", "cuda")
_LISTED = 4
_LONGEST = 60

FORM: dict[str, tuple[type | tuple[type, ...], str]] = {
    "name": (str, "text"),
    "description": ((str, int, float), "text"),
    "settings": (dict, "a mapping of all, cpu and cuda to keys and values"),
    "gate": (dict, "a mapping of keys of gate to values"),
    "axes": (dict, "a mapping of keys to lists of values"),
    "points": (dict, "a mapping of names to keys and values"),
    "layouts": (dict, "a mapping of world sizes to lists of layouts, as {8: [fsdp8]}"),
    "factorise": (list, "a list of axes, as [dp_shard, tp]"),
    "exclude": (list, "a list of expressions, as ['tp == 1'], or of mappings"),
    "include": (list, "a list of expressions, as ['tp == 1'], or of mappings"),
}
"""Key of a suite's file -> its type, and in words."""


@dataclass
class SuiteConfig:
    """One file of ``suites/``."""

    name: str = ""
    description: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """``all``, ``cpu``, ``cuda`` -> {key or group: value}; a list for a group means "the first whose cells all fit",
    and ``"= 2 * world_size"`` a number computed from the rest of the cell."""
    gate: dict[str, Any] = field(default_factory=dict)
    """Values of ``gate.*``."""
    axes: dict[str, Any] = field(default_factory=dict)
    """Key or group -> its values; every combination is a cell."""
    points: dict[str, Any] = field(default_factory=dict)
    """Name -> {key or group: value}: combinations that are not a product."""
    layouts: dict[int, Any] = field(default_factory=dict)
    """World size -> layouts, by name (``hsdp2x4_tp2``)."""
    factorise: list[str] = field(default_factory=list)
    """Axes over which every factorisation of the world size is a layout."""
    exclude: list[Any] = field(default_factory=list)
    """Expressions, or {key: value}: cells to leave out."""
    include: list[Any] = field(default_factory=list)
    """Expressions: cells that no exclude touches. Mappings {key: value}: further cells, no exclude touches them."""

    def settings_for(self, device: str) -> dict[str, Any]:
        """Settings of a device, nested groups written out as dotted keys; the device's own win over ``all``."""
        found = {f"gate.{key}": value for key, value in self.gate.items()}
        for section in ("all", device):
            found.update(flatten(self.settings.get(section) or {}))
        return found

    def layouts_for(self, world_size: int) -> list[dict[str, int]]:
        """Degrees by axis of each layout at a world size; empty when the suite does not name layouts."""
        if self.factorise:
            return list(factorisations(world_size, self.factorise))
        return [parse_layout(layout) for layout in self._named(world_size)]

    def left_out(self, used: Collection[int]) -> str:
        """``layouts of 1 device are left out: single``: those of every world size that is not ``used``, if any."""
        said: list[str] = []
        for size in sorted(set(self.layouts) - {*used}):
            names = [str(layout) for layout in self._named(size)]
            if names:
                listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if names[_LISTED:] else "")
                devices = f"of {size} device{'' if size == 1 else 's'}"
                said.append(f"{devices}: {listed}" if said else f"layouts {devices} are left out: {listed}")
        return "; ".join(said)

    def _named(self, world_size: int) -> list[Any]:
        layouts = self.layouts.get(world_size) or []
        return layouts if isinstance(layouts, list) else [layouts]


def is_computed(value: object) -> bool:
    """``"= 2 * world_size"``: a value computed from the rest of the cell."""
    return isinstance(value, str) and value.startswith("=")


def flatten(settings: dict[str, Any]) -> dict[str, Any]:
    """``{"training": {"steps": 3}}`` and ``{"training.steps": 3}`` mean the same; ``ValueError`` for both."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, dict) and "." not in key
        for name, item in {f"{key}.{name}": item for name, item in value.items()}.items() if nested else [(key, value)]:
            if name in flat:
                raise ValueError(f"{name} is given twice: once dotted, once nested")
            flat[name] = item
    for name in flat:
        above = name.rpartition(".")[0]
        if above in flat and above not in GROUPS:
            raise ValueError(f"{name} is given twice: {above} is given, too")
    return flat


def factorisations(world_size: int, axes: list[str]) -> Iterator[dict[str, int]]:
    """Every way to write ``world_size`` as a product over the named axes; the other axes are 1."""

    def split(rest: int, names: list[str]) -> Iterator[dict[str, int]]:
        if len(names) == 1:
            yield {names[0]: rest}
            return
        for size in range(1, rest + 1):
            if rest % size == 0:
                for others in split(rest // size, names[1:]):
                    yield {names[0]: size, **others}

    for sizes in split(world_size, axes):
        yield {axis: sizes.get(axis, 1) for axis in AXES}


def check_content(content: dict[str, Any], where: str) -> None:
    """Check the form of a suite's file, before anything is made of it.

    Raises ``ValueError`` naming the file (``where``), the key and what is expected there.
    """
    for key, value in content.items():
        if key == "defaults":
            continue
        if key not in FORM:
            raise ValueError(f"{where}: there is no '{key}' in a suite{close_to(str(key), FORM)}")
        kind, wanted = FORM[key]
        right = isinstance(value, kind) and not isinstance(value, bool)
        if not right:
            raise ValueError(f"{where}: {key} is {_shown(value)}, expected is {wanted}")
        if key == "layouts":
            for size in value:
                if not isinstance(size, int) or isinstance(size, bool):
                    raise ValueError(f"{where}: layouts.{size}: '{size}' is not a world size; expected is {wanted}")
        elif (odd := _key_that_is_no_text(value)) is not None:
            raise ValueError(f"{where}: {key} has the key {odd!r}, which is not text: quote it")
        if key == "settings":
            for section, settings in value.items():
                if not isinstance(settings, dict | None):
                    raise ValueError(f"{where}: settings.{section} is {_shown(settings)}, expected is a mapping")
        if key == "factorise":
            for axis in value:
                if not isinstance(axis, str):
                    raise ValueError(f"{where}: factorise holds {_shown(axis)}, expected is {wanted}")


def _key_that_is_no_text(value: Any) -> Any | None:
    items = list(value.items()) if isinstance(value, dict) else []
    for key, _ in items:
        if not isinstance(key, str):
            return key
    inside = [item for _, item in items] + (value if isinstance(value, list) else [])
    return next((odd for item in inside if (odd := _key_that_is_no_text(item)) is not None), None)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return f"'{text}'" if len(text) < _LONGEST else f"'{text[:_LONGEST]}…'"


def check_suite(suite: SuiteConfig, sources: Sources) -> None:
    """Check every key, name and value a suite holds, so that a mistake is found whatever is selected.

    Raises ``ValueError`` without the file's name; the caller adds it.
    """
    for section in suite.settings:
        if section not in DEVICES:
            raise ValueError(f"settings.{section} is not one of {', '.join(DEVICES)}{close_to(section, DEVICES)}")
    for device in DEVICES:
        for key, value in suite.settings_for(device).items():
            if key.split(".")[0] == "hardware":
                raise ValueError(f"settings: {key} is no setting: hardware is found, or named on the command line")
            _check(key, value if isinstance(value, list) and key in GROUPS else [value], sources)
    for key, values in suite.axes.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"axes.{key} is not a list of values: {values}")
        _check(key, values, sources)
    for name, point in suite.points.items():
        if not isinstance(point, dict):
            raise ValueError(f"points.{name} is not a mapping of keys to values")
        for key, value in flatten(point).items():
            _check(key, [value], sources)
    for rule in [*suite.exclude, *suite.include]:
        if isinstance(rule, dict):
            for key, value in flatten(rule).items():
                _check(key, [value], sources)
        elif not isinstance(rule, str):
            raise ValueError(f"rule {rule!r} is neither an expression nor a mapping")
    for axis in suite.factorise:
        if axis not in AXES:
            raise ValueError(f"factorise names '{axis}', the axes are {', '.join(AXES)}{close_to(axis, AXES)}")
    if suite.factorise and suite.layouts:
        raise ValueError("a suite has layouts or factorise, not both")
    for size, layouts in suite.layouts.items():
        for layout in layouts if isinstance(layouts, list) else [layouts]:
            degrees = parse_layout(layout)
            product = 1
            for degree in degrees.values():
                product *= degree
            if product != size:
                raise ValueError(f"layout {layout} is {product} ranks, it stands under world size {size}")


def _check(key: str, values: list[Any], sources: Sources) -> None:
    if key == "suite":
        raise ValueError("a suite cannot name a suite")
    if key not in GROUPS:
        type_of(key)
    for value in values:
        if is_computed(value):
            if key in GROUPS:
                raise ValueError(f"{key}: '{value}' is computed, which names no file: only keys can be, a group cannot")
            parse_expression(value[1:], key)
            continue
        if key not in GROUPS:
            typed(key, value)
            continue
        from ndbench.matrix.overrides import choose

        choose(key, str(value), sources)
