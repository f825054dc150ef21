"""A YAML file of configuration as plain data: each key once, each value one that a configuration can hold.

Judged before anything is built from it: what YAML takes in silence (a key twice), what never ends (aliases of aliases)
and what is no file at all. Knows no schema.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

MOST_NODES = 100_000
"""Values of a file with its aliases written out: ten for each cell of the largest matrix."""

MOST_DIGITS = 300
"""Of a whole number: beyond that it is no number to any part of the program."""

_TAG = "tag:yaml.org,2002:"
_KINDS = {f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}


class _Loader(yaml.SafeLoader):
    """Scalars are read as Hydra reads them in the other files: ``1e-3`` is a number, ``2020-01-01`` is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{_TAG}timestamp", f"{_TAG}float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(  # type: ignore[no-untyped-call]
    f"{_TAG}float",
    re.compile(
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?$|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"
        r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


class _Refused(ValueError):
    """What is wrong with the content, without the file's name."""


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping from a YAML file. Raises ``ValueError`` in one line, naming the file, and the key if there is one."""
    try:
        if path.exists() and not path.is_file():
            raise _Refused("it is not a regular file")
        loader = _Loader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()  # type: ignore[no-untyped-call]
            if node is not None:
                _Check().count(node, "")
            content = None if node is None else loader.construct_document(node)  # type: ignore[no-untyped-call]
        finally:
            loader.dispose()  # type: ignore[no-untyped-call]
    except RecursionError as error:
        raise ValueError(f"{path} cannot be read: it is nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(content, dict | None):
        raise ValueError(f"{path} is not a mapping of keys to values")
    return content or {}


class _Check:
    """Goes through a document's nodes, each of them once, however often aliases name it."""

    def __init__(self) -> None:
        self._counted: dict[int, int | None] = {}
        """Values below a node; None while it is being counted."""

    def count(self, node: yaml.Node, where: str) -> int:
        """How many values ``node`` is with its aliases written out. Raises :class:`_Refused`."""
        if id(node) in self._counted:
            found = self._counted[id(node)]
            if found is None:
                raise _Refused(f"{where} is an alias of what it stands in")
            return found
        self._counted[id(node)] = None
        if node.tag not in _KINDS:
            raise _Refused(f"{where or 'the document'} is a {node.tag.replace(_TAG, '!!')}, which no setting is")
        total = 1
        if isinstance(node, yaml.MappingNode):
            total += self._mapping(node, where)
        elif isinstance(node, yaml.SequenceNode):
            total += sum(self.count(item, f"{where}[{index}]") for index, item in enumerate(node.value))
        else:
            _check_scalar(node, where)
        if total > MOST_NODES:
            raise _Refused(f"{where or 'it'} has more than {MOST_NODES:,} values when its aliases are written out")
        self._counted[id(node)] = total
        return total

    def _mapping(self, node: yaml.MappingNode, where: str) -> int:
        total, known = 0, set()
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            below = f"{where}.{name}" if where else name
            if key.tag != f"{_TAG}merge":
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in known:
                    line = key.start_mark.line + 1
                    raise _Refused(f"{below} is given twice (again in line {line}): YAML would take the last")
                known.add((key.tag, str(key.value)))
            total += self.count(key, below) + self.count(value, below)
        return total


def _check_scalar(node: yaml.Node, where: str) -> None:
    text = str(node.value)
    if node.tag == f"{_TAG}int" and len(text) > MOST_DIGITS:
        raise _Refused(f"{where} is a whole number of {len(text)} digits")
    if text == "???":
        raise _Refused(f"{where} is '???', which stands for a value that is missing: write the value")
