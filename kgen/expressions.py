"""A small language for restrictions: names, numbers, words, arithmetic, comparison and logic; no call, no attribute.

An expression is parsed by Python's own parser, every node is checked against a white list, and what is allowed becomes
nested closures. Nothing is handed to `eval`.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kgen.config import suggestion
from kgen.errors import ConfigError
from kgen.types import Scalar

MAX_LENGTH = 500

Value = Any  # Scalar, or a tuple of scalars on the right of `in`
Environment = Mapping[str, Scalar]
Evaluate = Callable[[Environment], Value]

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


@dataclass(frozen=True)
class Expression:
    """A checked expression. `names` are the names that it reads."""

    text: str
    names: frozenset[str]
    evaluate: Evaluate

    def __call__(self, environment: Environment) -> Value:
        """Its value; a type error or a division by zero is a ConfigError that shows the expression."""
        try:
            return self.evaluate(environment)
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise ConfigError(f"The expression `{self.text}` has no value here: {error}.") from None
        except KeyError as error:
            raise ConfigError(
                f"The expression `{self.text}` reads {error.args[0]!r}, which has no value here."
            ) from None


def parse_expression(text: str, known: Collection[str]) -> Expression:
    """Check and compile an expression over the known names; refuse everything outside the language with a sentence."""
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"An expression is at most {MAX_LENGTH} characters long, this one has {len(text)}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python only warns about (`1or 2`, an odd escape) is refused here
            tree = ast.parse(text.strip(), mode="eval")
        names: set[str] = set()
        evaluate = _compile(tree.body, known, names)
    except SyntaxError as error:
        raise ConfigError(f"`{text}` is not an expression: {error.msg} (column {error.offset}).") from None
    except (RecursionError, MemoryError, ValueError, Warning):
        raise ConfigError(f"`{text[:40]}…` cannot be read as an expression.") from None
    return Expression(text, frozenset(names), evaluate)


def _compile(node: ast.expr, known: Collection[str], names: set[str]) -> Evaluate:
    def sub(child: ast.expr) -> Evaluate:
        return _compile(child, known, names)

    if isinstance(node, ast.Constant):
        return _constant(node)
    if isinstance(node, ast.Name):
        return _name(node.id, known, names)
    if isinstance(node, ast.BoolOp):
        parts = [sub(child) for child in node.values]
        if isinstance(node.op, ast.And):
            return lambda env: all(_truth(part(env)) for part in parts)
        return lambda env: any(_truth(part(env)) for part in parts)
    if isinstance(node, ast.UnaryOp):
        return _unary(node, sub(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _binary(_ARITHMETIC[type(node.op)], sub(node.left), sub(node.right))
    if isinstance(node, ast.Compare):
        return _compare(node, sub)
    if isinstance(node, ast.IfExp):
        test, then, other = sub(node.test), sub(node.body), sub(node.orelse)
        return lambda env: then(env) if _truth(test(env)) else other(env)
    raise ConfigError(
        f"`{ast.unparse(node)}` is not allowed in an expression: only names, numbers, quoted words, + - * / // %, "
        "comparisons, in, is, and, or, not, and `x if c else y`."
    )


def _constant(node: ast.Constant) -> Evaluate:
    value = node.value
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise ConfigError(
            f"`{ast.unparse(node)}` is not allowed in an expression: only numbers, words, True, False, None."
        )
    return lambda env: value


def _name(name: str, known: Collection[str], names: set[str]) -> Evaluate:
    if name.startswith("_") or name not in known:
        raise ConfigError(f"unknown name {name!r}{suggestion(name, known)}; known: {', '.join(sorted(known))}.")
    names.add(name)
    return lambda env: env[name]


def _unary(node: ast.UnaryOp, operand: Evaluate) -> Evaluate:
    if isinstance(node.op, ast.Not):
        return lambda env: not _truth(operand(env))
    if isinstance(node.op, ast.USub):
        return lambda env: -_number(operand(env))
    if isinstance(node.op, ast.UAdd):
        return lambda env: +_number(operand(env))
    raise ConfigError(f"`{ast.unparse(node)}` is not allowed in an expression: of the bit operators, none is.")


def _binary(operation: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda env: operation(_number(left(env)), _number(right(env)))


def _compare(node: ast.Compare, sub: Callable[[ast.expr], Evaluate]) -> Evaluate:
    """A chain `a < b <= c`; the right side of `in` is a literal tuple or list."""
    steps: list[tuple[Callable[[Any, Any], Any], bool, Evaluate]] = []
    first = sub(node.left)
    for op, side in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, (ast.In, ast.NotIn)):
            if not isinstance(side, (ast.Tuple, ast.List)):
                raise ConfigError(f"`{ast.unparse(node)}`: the right side of `in` must be a list of values, (a, b, …).")
            right = _members([sub(item) for item in side.elts])
        else:
            right = sub(side)
        steps.append((_COMPARISONS[type(op)], isinstance(op, _ORDERED), right))

    def evaluate(env: Environment) -> bool:
        value = first(env)
        for operation, ordered, right in steps:
            other = right(env)
            if ordered:
                _number(value), _number(other)
            if not operation(value, other):
                return False
            value = other
        return True

    return evaluate


def _members(items: list[Evaluate]) -> Evaluate:
    return lambda env: tuple(item(env) for item in items)


def _number(value: Value) -> int | float:
    """Arithmetic is for numbers: text times a number would build a text of any size."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    return value


def _truth(value: Value) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value
