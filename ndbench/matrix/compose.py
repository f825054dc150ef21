"""Hydra composition: groups of YAML files to one typed configuration, and a suite's file to a ``SuiteConfig``.

One compose costs about 0.06 s, so this is called once per combination of groups; single values are set afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ndbench.config import Config
from ndbench.matrix.keys import typed
from ndbench.matrix.reading import read_yaml
from ndbench.matrix.resolve import check_ranges
from ndbench.matrix.sources import Sources
from ndbench.matrix.suite import SuiteConfig, check_content, check_suite


@dataclass
class _Root(Config):
    suite: SuiteConfig | None = None


class Composer:
    """Composes from one set of sources; results are kept by their choice of groups."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._known: dict[frozenset[tuple[str, str]], _Root] = {}
        self._configs: dict[frozenset[tuple[str, str]], Config] = {}
        store = ConfigStore.instance()
        store.store(name="schema", node=_Root)
        store.repo.pop("suite", None)
        self._broken: dict[str, ValueError] = {}
        for name, path in sources.files["suite"].items():
            try:
                content = read_yaml(path)
                check_content(content, str(path))
            except ValueError as error:  # another suite's broken file must not stop this one
                self._broken[name] = error
                continue
            if path.parent.name != "suite":  # a group folder of the user's, which Hydra finds by itself
                store.store(group="suite", name=name, node=content)

    def config(self, groups: dict[str, str]) -> Config:
        """A copy of the configuration of these files, the defaults of ``config.yaml`` for the other groups."""
        key = frozenset(groups.items())
        if key not in self._configs:
            composed = self._compose(groups)
            values = {name: value for name, value in composed.__dict__.items() if name != "suite"}
            self._configs[key] = Config(**values)
            try:
                check_ranges(self._configs[key])
            except ValueError as error:
                files = [str(self._sources.files[group][name]) for group, name in sorted(groups.items())]
                raise ValueError(f"{error} (in {', '.join(files)})") from error
        config: Config = _copied(self._configs[key])
        return config

    def suite(self, name: str, groups: dict[str, str]) -> SuiteConfig:
        """The suite of that name, composed together with ``groups`` (their configuration is then known too).

        Raises ``ValueError`` naming the file for anything in it that cannot be.
        """
        path = self._sources.require("suite", name)
        if name in self._broken:
            raise self._broken[name]
        composed = self._compose({**groups, "suite": name}).suite
        assert composed is not None, "it was chosen"
        composed.name = name
        try:
            check_suite(composed, self._sources)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return composed

    def _compose(self, groups: dict[str, str]) -> _Root:
        key = frozenset(groups.items())
        if key in self._known:
            return self._known[key]
        for group, name in groups.items():
            self._check_files(group, name)
        overrides = [f"{group}={_quoted(name)}" for group, name in sorted(groups.items())]
        if self._sources.config_dir is not None:
            overrides.append(f"hydra.searchpath=[{_quoted(f'file://{self._sources.config_dir}')}]")
        try:
            with initialize_config_dir(config_dir=str(self._sources.conf), version_base="1.3"):
                values = compose("config", overrides)
            OmegaConf.resolve(values)
            composed = OmegaConf.to_object(values)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise ValueError(self._explain(error, groups)) from error
        assert isinstance(composed, _Root), "the schema's type"
        self._known[key] = composed
        self._known[frozenset((group, name) for group, name in key if group != "suite")] = composed
        return composed

    def _check_files(self, group: str, name: str, above: tuple[str, ...] = ()) -> None:
        """A user's file, and those of its group that it starts from, before Hydra reads them."""
        path, folder = self._sources.files[group][name], self._sources.config_dir
        if group == "suite" or folder is None or not path.is_relative_to(folder):
            return
        parents = read_yaml(path).get("defaults")
        for parent in parents if isinstance(parents, list) else []:
            if isinstance(parent, str) and parent in self._sources.files[group] and parent not in (*above, name):
                self._check_files(group, parent, (*above, name))

    def _explain(self, error: Exception, groups: dict[str, str]) -> str:
        """One line: the file, the key, and what is wrong with it; Hydra's words when it is not a key or a value."""
        others = {group: name for group, name in groups.items() if group != "suite"}
        for group, name in sorted(others.items()):
            path = self._sources.files[group][name]
            for key, value in read_yaml(path).items():
                if key != "defaults":
                    try:
                        typed(f"{group}.{key}", value)
                    except ValueError as reason:
                        return f"{path}: {reason}"
        blamed = others
        if others != groups:
            try:
                self._compose(others)
            except ValueError as reason:
                return str(reason)
            blamed = {"suite": groups["suite"]}  # without it there is nothing wrong
        said = " ".join(str(error).split("full_key:")[0].split())
        return f"{', '.join(str(self._sources.files[group][name]) for group, name in sorted(blamed.items()))}: {said}"


def _copied(value: Any) -> Any:
    """A deep copy, ten times faster than ``copy.deepcopy`` for nested dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{name: _copied(item) for name, item in value.__dict__.items()})
    return copy.deepcopy(value) if isinstance(value, list | dict) else value


def _quoted(text: str) -> str:
    escaped = text.replace("'", r"\'")
    return f"'{escaped}'"
