"""Frozen dataclasses to JSON values and back, strictly: what does not fit the type is an error, never a guess."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kgen.types import Scalar

Decoder = Callable[[Any, str], Any]
Pairs = tuple[tuple[str, Scalar], ...]
"""Sorted name/value pairs (tunables): a JSON object."""


def encode(value: Any) -> Any:
    """A JSON value with keys in the order of the fields; optional fields that are None or () are left out.

    Floats of declared `float` fields keep six significant digits: more is noise in a time, an error or an estimate.
    Tunables keep every digit, since they are part of a candidate's identity.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return value
    out: dict[str, Any] = {}
    for name, tp, default in _schema(type(value)):
        item = getattr(value, name)
        if default in (None, ()) and item == default:
            continue
        if _is_pairs(tp):
            out[name] = dict(item)
        elif isinstance(item, float) and tp in (float, float | None):
            out[name] = float(f"{item:.6g}")
        else:
            out[name] = encode(item)
    return out


@cache
def decoder(tp: Any) -> Decoder:
    """A function (JSON value, where) -> value of type `tp`; it raises ValueError with a sentence that names the
    field.
    """
    if is_dataclass(tp) and isinstance(tp, type):
        return _dataclass_decoder(tp)
    if _is_pairs(tp):
        return _pairs
    origin = get_origin(tp)
    if origin in (Union, types.UnionType):
        return _union_decoder(get_args(tp))
    if origin is Literal:
        return _literal_decoder(get_args(tp))
    if tp is type(None):
        return _scalar_decoder(type(None))
    if tp in (int, float, str, bool):
        return _scalar_decoder(tp)
    raise TypeError(f"{tp} has no JSON form: use int, float, str, bool, None, pairs or a dataclass of those")


_NO_DEFAULT = object()


@cache
def _schema(cls: type) -> tuple[tuple[str, Any, Any], ...]:
    hints = get_type_hints(cls)
    return tuple(
        (field.name, hints[field.name], _NO_DEFAULT if field.default is MISSING else field.default)
        for field in fields(cls)
    )


def _is_pairs(tp: Any) -> bool:
    args = get_args(tp)
    return get_origin(tp) is tuple and len(args) == 2 and args[1] is Ellipsis and get_origin(args[0]) is tuple


def _dataclass_decoder(cls: type) -> Decoder:
    schema = [(name, decoder(tp), default in (None, ())) for name, tp, default in _schema(cls)]
    names = {name for name, _, _ in schema}

    def decode(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{where or cls.__name__} is not an object")
        if unknown := value.keys() - names:
            raise ValueError(f"unknown field {where + '.' if where else ''}{min(unknown)}")
        args = {}
        for name, decode_field, optional in schema:
            path = f"{where}.{name}" if where else name
            if name in value:
                args[name] = decode_field(value[name], path)
            elif not optional:
                raise ValueError(f"missing field {path}")
        return cls(**args)

    return decode


def _pairs(value: Any, where: str) -> Pairs:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    for name, item in value.items():
        if not isinstance(item, int | float | str | None):
            raise ValueError(f"{where}.{name} is not a plain value")
    return tuple(sorted(value.items()))


def _union_decoder(members: tuple[Any, ...]) -> Decoder:
    others = [decoder(tp) for tp in members if tp is not type(None)]
    nullable = type(None) in members

    def decode(value: Any, where: str) -> Any:
        if value is None and nullable:
            return None
        for decode_member in others[:-1]:
            try:
                return decode_member(value, where)
            except ValueError:
                continue
        return others[-1](value, where)

    return decode


def _literal_decoder(words: tuple[Any, ...]) -> Decoder:
    def decode(value: Any, where: str) -> Any:
        if value not in words:
            raise ValueError(f"{where} is {value!r}, not one of {', '.join(map(str, words))}")
        return value

    return decode


def _scalar_decoder(tp: type) -> Decoder:
    # bool is a subclass of int in Python, and JSON writes 3.0 for a float that Python may print as 3
    accepted = (float, int) if tp is float else (tp,)

    def decode(value: Any, where: str) -> Any:
        if type(value) not in accepted:
            raise ValueError(f"{where} is {value!r}, not {tp.__name__}")
        return tp(value) if tp is float else value

    return decode
