"""Boolean expressions of a suite (``tp > model.num_key_value_heads``), read with ``ast`` and never evaluated as Python.

Allowed: names and dotted keys of the resolved cell, numbers, text, true/false/null, lists, arithmetic
(+ - * / // %), comparisons (also ``in`` and ``is``), and/or/not, ``a if condition else b``. No calls, no indexing, no
powers.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ndbench.config import Config
from ndbench.matrix.keys import all_keys, get_value, type_of
from ndbench.matrix.sources import close_to
from ndbench.parallel.config import AXES

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}
_CONSTANTS = {"true": True, "false": False, "null": None}
_SHORT = {axis: f"parallelism.{axis}_size" for axis in AXES}
_LONGEST = 2000


@dataclass(frozen=True)
class Expression:
    """A parsed expression. Build with :func:`parse_expression`."""

    text: str
    where: str
    tree: ast.expr

    def value(self, config: Config) -> Any:
        """Value for a resolved cell. Raises ``ValueError`` naming file and expression when there is none."""
        try:
            return _value(self.tree, config)
        except (TypeError, ArithmeticError) as error:
            known = [f"{name} is {_of(name, config)}" for name in sorted(_names(self.tree))]
            where = f" where {', '.join(known)}" if known else ""
            raise ValueError(f"{self.where}: expression '{self.text}' has no value{where}: {error}") from error

    @property
    def keys(self) -> set[str]:
        """The keys of the configuration that it reads."""
        return {_full(name) for name in _names(self.tree)}

    def holds(self, config: Config) -> bool:
        """Truth for a resolved cell. Raises ``ValueError`` naming file and expression when it has none."""
        result = self.value(config)
        if not isinstance(result, bool):
            raise ValueError(f"{self.where}: expression '{self.text}' is {result!r}, not true or false")
        return result


def parse_expression(text: str, where: str) -> Expression:
    """Raises ``ValueError`` naming ``where`` (the file), the expression and what is wrong with it."""
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"it is longer than {_LONGEST} characters")
        tree = ast.parse(text.strip(), mode="eval").body
        _check(tree)
        for name in _names(tree):
            _check_name(name)
    except (SyntaxError, ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.offset}" if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{where}: expression '{text}' cannot be used: {reason}") from error
    return Expression(text, where, tree)


def _check(node: ast.expr) -> None:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return
        case ast.Name() | ast.Attribute():
            _dotted(node)
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            for part in parts:
                _check(part)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            _check(operand)
        case ast.IfExp(test=test, body=body, orelse=other):
            for part in (test, body, other):
                _check(part)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            _check(left)
            _check(right)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARE for op in ops):
            for part in (left, *others):
                _check(part)
        case _:
            raise ValueError(f"'{ast.unparse(node)}' is not allowed in an expression")


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
        case _:
            raise ValueError(f"'{ast.unparse(node)}' is not allowed in an expression")


def _names(tree: ast.expr) -> set[str]:
    if isinstance(tree, ast.Name | ast.Attribute):
        name = _dotted(tree)
        return set() if name in _CONSTANTS else {name}
    return {name for part in ast.iter_child_nodes(tree) if isinstance(part, ast.expr) for name in _names(part)}


def _full(name: str) -> str:
    return _SHORT.get(name, name)


def _check_name(name: str) -> None:
    if name in _SHORT or name == "layout":
        return
    try:
        type_of(name)
    except ValueError as error:
        raise ValueError(f"it names '{name}'{close_to(name, [*all_keys(), *_SHORT, 'layout'])}: {error}") from error


def _value(node: ast.expr, config: Config) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            name = _dotted(node)
            if name in _CONSTANTS:
                return _CONSTANTS[name]
            return _of(name, config)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, config) for part in parts]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _truth(_value(operand, config))
        case ast.UnaryOp(operand=operand):
            return -_value(operand, config)
        case ast.IfExp(test=test, body=body, orelse=other):
            return _value(body if _truth(_value(test, config)) else other, config)
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(_value(left, config)), _number(_value(right, config)))
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_truth(_value(part, config)) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_truth(_value(part, config)) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(part, config) for part in (left, *others)]
            return all(_COMPARE[type(sign)](a, b) for sign, a, b in zip(ops, values, values[1:], strict=False))
    raise AssertionError(f"checked when parsed: {ast.dump(node)}")


def _of(name: str, config: Config) -> Any:
    return config.parallelism.layout if name == "layout" else get_value(config, _full(name))


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value
