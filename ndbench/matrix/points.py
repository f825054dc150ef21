"""Every point of a suite under a command line, each as a resolved cell with what speaks against it.

The command line wins over the suite: a key it sets is fixed on every axis. Of layouts, and of points where it names a
value that one of them has, it picks those that agree; the others are left out with that reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ndbench.config import Cell, Config
from ndbench.matrix.compose import Composer
from ndbench.matrix.computed import compute
from ndbench.matrix.expressions import Expression, parse_expression
from ndbench.matrix.keys import get_value, set_value, typed
from ndbench.matrix.layouts import DEGREES, LAYOUT_KEYS
from ndbench.matrix.names import cell_name, layout_name, script_name, token
from ndbench.matrix.overrides import Request, choose
from ndbench.matrix.resolve import fill, fill_world, refusals, shortages
from ndbench.matrix.sources import GROUPS, Sources
from ndbench.matrix.suite import SuiteConfig, flatten, is_computed
from ndbench.parallel.config import ParallelismConfig

MOST_CELLS = 10_000
"""Cells of a suite before rules: more are a slip, and no machine would ever be done with them."""


@dataclass
class Draft:
    """A point before its defaults are filled."""

    values: dict[str, Any]
    """Group or dotted key -> value."""
    tokens: list[str] = field(default_factory=list)
    forced: bool = False
    """An ``include`` entry: no exclude touches it."""
    swept: dict[str, Any] = field(default_factory=dict)
    """What the command line's sweep asks for here; the point may have said otherwise."""


@dataclass
class Point:
    cell: Cell
    excluded: str | None
    """The rule that leaves it out."""
    here: bool
    """It must fit this machine."""
    wrong: list[str] = field(default_factory=list)
    """What is wrong with its degrees: there is no layout to ask an engine about."""
    contradicts: bool = False
    """Left out by the command line, not by the suite."""

    @cached_property
    def refused(self) -> list[str]:
        """Why no machine can run it. Asks the engine, which is for cells that are selected only."""
        return self.wrong or ([] if self.excluded is not None else refusals(self.cell))

    @cached_property
    def lacks(self) -> list[str]:
        """Why this machine cannot hold it."""
        return [] if self.wrong or self.excluded is not None else shortages(self.cell, self.here)


class PointMaker:
    """Makes the points of one suite and command line; ``settings`` may differ from call to call."""

    def __init__(self, composer: Composer, sources: Sources, request: Request, suite: SuiteConfig, here: bool) -> None:
        self._composer, self._sources, self._request, self._suite, self._here = composer, sources, request, suite, here
        self._groups = {group: name for group, name in request.groups.items() if group != "suite"}
        self._short: dict[int, int] = {}
        """Devices of a machine -> how many of them the layouts use, where that is fewer."""
        self._worlds: set[int] = set()
        self._counts: dict[frozenset[tuple[str, Any]], int] = {}
        self._where = str(sources.files["suite"].get(suite.name, suite.name))
        self._exclude, self._exclude_values = _rules(suite.exclude, self._where)
        self._include, self._include_values = _rules(suite.include, self._where)
        self._points = {str(name): flatten(point) for name, point in (suite.points or {"": {}}).items()}
        self._axes = {**suite.axes, **request.sweeps}
        fixed = {**request.groups, **request.values}
        self._choices = {key: [fixed[key]] if key in fixed else values for key, values in self._axes.items()}
        self._refuse_more(math.prod([len(self._points), *(len(values) for values in self._choices.values())]))
        named = bool(suite.layouts or suite.factorise)
        swept = sorted({"parallelism", *DEGREES} & set(request.sweeps))
        if named and swept:
            raise ValueError(f"suite {suite.name} names its layouts: {', '.join(swept)} cannot be swept over too")
        for name, point in self._points.items():
            if both := sorted(set(point) & set(suite.axes)):
                raise ValueError(f"{self._where}: point {name} sets {', '.join(both)}, over which axes go already")

    @property
    def warnings(self) -> list[str]:
        """Devices that no layout uses, and the layouts of other world sizes that no point so far has asked for."""
        sizes = ", ".join(str(size) for size in sorted(self._suite.layouts))
        notes = [
            f"suite {self._suite.name} has layouts for world sizes {sizes}: {used} of {world} devices are used"
            for world, used in self._short.items()
        ]
        left = self._suite.left_out(self._worlds)
        return [f"{note}; {left}" if left else note for note in notes]

    def points(self, settings: dict[str, Any]) -> list[Point]:
        drafts = list(itertools.islice(self._drafts(settings), MOST_CELLS + 1))
        self._refuse_more(len(drafts))
        return [self._point(draft, settings) for draft in drafts]

    def _refuse_more(self, count: int) -> None:
        if count > MOST_CELLS:
            factors = [f"{len(values)} of {key}" for key, values in self._choices.items() if len(values) > 1]
            factors += [f"{len(self._points)} points"] if len(self._points) > 1 else []
            factors += ["the layouts"] if self._suite.layouts or self._suite.factorise else []
            raise ValueError(f"suite {self._suite.name} has more than {MOST_CELLS} cells: {' x '.join(factors)}")

    def _drafts(self, settings: dict[str, Any]) -> Iterator[Draft]:
        varying = [key for key, values in self._axes.items() if len(values) > 1 and key not in LAYOUT_KEYS]
        for combination in itertools.product(*self._choices.values()):
            values = dict(zip(self._axes, combination, strict=True))
            tokens = [token(key, values[key]) for key in varying]
            swept = {key: values[key] for key in self._request.sweeps}
            for name, point in self._points.items():
                merged = values | self._overridden(point, self._request.values | swept)
                for layout in self._layouts(merged, settings):
                    yield Draft(merged | layout, [name, *tokens], swept=swept)
        for include in self._include_values:
            values = self._overridden(include, self._request.values)
            tokens = [token(key, value) for key, value in values.items() if key not in LAYOUT_KEYS]
            yield Draft(values, tokens, forced=True)

    def _overridden(self, point: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
        """A point's or an include's values, those that the command line replaces replaced."""
        return {key: asked[key] if key in asked and not self._picks(key, asked[key]) else point[key] for key in point}

    def _picks(self, key: str, value: Any) -> bool:
        """Whether ``key=value`` picks cells. Else it is a value like any, which all cells take."""
        if key in GROUPS or key in LAYOUT_KEYS or key in self._suite.axes:
            return True
        said = [*self._points.values(), *self._include_values]
        return any(key in values and _agree(key, values[key], value) for values in said)

    def _layouts(self, values: dict[str, Any], settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        suite = self._suite
        if not suite.layouts and not suite.factorise:
            yield {}
            return
        asked = values.get("world_size") or self._request.values.get("world_size")
        world = asked or settings.get("world_size") or self._device_count(values, settings)
        if is_computed(world):
            raise ValueError(
                f"{self._where}: world_size: '{world}' is computed, but chooses the layouts: give a number"
            )
        if suite.layouts and world not in suite.layouts:
            sizes = ", ".join(str(size) for size in sorted(suite.layouts))
            smaller = [size for size in suite.layouts if size <= world]
            if asked is not None or not smaller:
                raise ValueError(f"suite {suite.name} has layouts for world sizes {sizes}, not for {world}")
            self._short[world] = max(smaller)
            world = max(smaller)
        self._worlds.add(world)
        for degrees in suite.layouts_for(world):
            yield {"world_size": world} | {f"parallelism.{axis}_size": size for axis, size in degrees.items()}

    def _device_count(self, values: dict[str, Any], settings: dict[str, Any]) -> int:
        groups = {key: value for key, value in (settings | values).items() if key in GROUPS}
        key = frozenset(groups.items())
        if key not in self._counts:
            config = self._config(Draft(groups), {})
            config.world_size, config.parallelism = None, ParallelismConfig(dp_shard_size=-1)
            self._counts[key] = fill_world(config)
        return self._counts[key]

    def _config(self, draft: Draft, settings: dict[str, Any]) -> Config:
        """Files, then what their names imply, then the suite's settings, the point, and last the command line."""
        groups = dict(self._groups)
        values: dict[str, Any] = {}
        for key, value in (settings | draft.values).items():
            if key in GROUPS and key not in groups:
                groups[key], implied = choose(key, str(value), self._sources)
                values |= implied
        values |= {key: value for key, value in settings.items() if key not in GROUPS}
        values |= {key: value for key, value in draft.values.items() if key not in GROUPS}
        values |= self._request.values
        config = self._composer.config(groups)
        computed = {key: value for key, value in values.items() if is_computed(value)}
        for key, value in values.items():
            if key not in computed:
                set_value(config, key, typed(key, value))
        if computed:
            compute(config, computed, self._where)
        return config

    def _point(self, draft: Draft, settings: dict[str, Any]) -> Point:
        config = self._config(draft, settings)
        given = {key[6:] for key in {*draft.values, *self._request.values} if key.startswith("model.")}
        refused = fill(config, given)
        cell = Cell(cell_name(self._base_name(config, draft), draft.tokens), self._suite.name, config)
        contradiction = self._contradiction(draft, config)
        if contradiction is not None:
            degrees = {key: draft.values[key] for key in DEGREES if key in draft.values}
            for key, degree in degrees.items():
                set_value(config, key, degree)
            cell = dataclasses.replace(cell, name=cell_name(self._base_name(config, draft), draft.tokens))
            return Point(cell, contradiction, self._here, contradicts=True)
        if refused:
            return Point(cell, None, self._here, refused)
        excluded = None if draft.forced else self._rule_against(config)
        return Point(cell, excluded, self._here)

    def _base_name(self, config: Config, draft: Draft) -> str:
        if config.engine.command is None:
            return layout_name(config.parallelism)
        asked = {*draft.values, *self._request.values, *self._request.groups}
        return script_name(config, bool(asked & {"parallelism", *DEGREES}))

    def _contradiction(self, draft: Draft, config: Config) -> str | None:
        asked = {**draft.swept, **self._request.values, **self._request.groups}
        for key, value in draft.values.items():
            if key in asked and asked[key] != -1 and not _agree(key, value, asked[key]):
                return f"the command line asks for {key}={asked[key]}"
        if "parallelism" in self._request.groups and DEGREES[0] in draft.values:
            name = self._request.groups["parallelism"]
            wanted = self._composer.config({"parallelism": name}).parallelism
            for key, value in self._request.values.items():
                if key in DEGREES:
                    setattr(wanted, key.partition(".")[2], value)
            try:
                same = wanted.resolved(config.world_size or 1).sizes == config.parallelism.sizes
            except ValueError:
                same = False
            return None if same else f"the command line asks for parallelism={name}"
        return None

    def _rule_against(self, config: Config) -> str | None:
        if any(rule.holds(config) for rule in self._include):
            return None
        for rule in self._exclude:
            if rule.holds(config):
                return rule.text
        for values in self._exclude_values:
            if all(_is(config, key, value) for key, value in values.items()):
                return ", ".join(f"{key}={value}" for key, value in values.items())
        return None


def _is(config: Config, key: str, value: Any) -> bool:
    if key in GROUPS:
        return bool(get_value(config, f"{key}.name") == value)
    return bool(get_value(config, key) == typed(key, value))


def _agree(key: str, value: Any, asked: Any) -> bool:
    """Whether a suite's value is the one asked for; of a computed one nobody knows."""
    return bool((value if key in GROUPS or is_computed(value) else typed(key, value)) == asked)


def _rules(rules: list[Any], where: str) -> tuple[list[Expression], list[dict[str, Any]]]:
    expressions = [parse_expression(rule, where) for rule in rules if isinstance(rule, str)]
    return expressions, [flatten(rule) for rule in rules if isinstance(rule, dict)]
