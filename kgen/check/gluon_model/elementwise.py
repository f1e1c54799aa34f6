"""Elementwise functions of `triton.experimental.gluon.language`, on blocks and on scalars."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from . import state
from . import types as ty
from .types import DType, ModelError
from .values import Scalar, Tensor, as_tensor, as_value, binary, dtype_of, ghost, is_weak, match, share


def to_tensor(value: Any) -> Any:
    value = as_value(value)
    if not is_weak(value):
        return value
    dtype = dtype_of(value)
    return Scalar(int(value), dtype) if dtype.integral and not isinstance(value, Tensor) else as_tensor(value)


def cast(x: Any, dtype: DType, bitcast: bool = False) -> Any:
    return to_tensor(x).to(dtype, bitcast=bitcast)


def where(condition: Any, x: Any, y: Any) -> Any:
    x, y, condition = as_value(x), as_value(y), as_value(condition)
    plain = not any(isinstance(v, (Tensor, float)) for v in (x, y))
    if dtype_of(x).is_ptr() and dtype_of(x) == dtype_of(y):
        dtype = dtype_of(x)
    else:
        dtype = ty.promote(dtype_of(x), is_weak(x), dtype_of(y), is_weak(y))
    if not isinstance(condition, Tensor) and plain:
        return Scalar(int(x) if condition else int(y), dtype)
    made = ghost(dtype, condition, x, y)
    if made is not None:
        return made
    a, b = match(x, y, dtype)
    return share(Tensor(torch.where(as_tensor(condition, ty.int1).data, a, b), dtype), condition, x, y)


def _extreme(name: str, a: Any, b: Any) -> Any:
    a, b = as_value(a), as_value(b)
    dtype = ty.promote(dtype_of(a), is_weak(a), dtype_of(b), is_weak(b))
    if not any(isinstance(v, (Tensor, float)) for v in (a, b)):
        pick = builtins.max if name == "fmax" else builtins.min
        return Scalar(pick(int(a), int(b)), dtype)
    made = ghost(dtype, a, b)
    if made is not None:
        return made
    x, y = match(a, b, dtype)
    return share(Tensor(torch.fmax(x, y) if name == "fmax" else torch.fmin(x, y), dtype), a, b)


def maximum(a: Any, b: Any, propagate_nan: Any = None) -> Any:
    """A NaN loses against a number, as in PTX."""
    return _extreme("fmax", a, b)


def minimum(a: Any, b: Any, propagate_nan: Any = None) -> Any:
    return _extreme("fmin", a, b)


def fma(a: Any, b: Any, c: Any) -> Tensor:
    dtype = ty.promote(dtype_of(as_value(a)), is_weak(a), dtype_of(as_value(b)), is_weak(b))
    made = ghost(dtype, as_value(a), as_value(b), as_value(c))
    if made is not None:
        return made
    x, y = match(a, b, dtype)
    z = as_tensor(c, dtype).data
    if dtype != ty.float32:
        raise ModelError(f"{state.where()} takes fma of {dtype}; only float32 is modelled.")
    return Tensor((x.double() * y.double() + z.double()).float(), dtype)


def _unary(function: Any, x: Any) -> Tensor:
    block = as_tensor(x)
    if not block.dtype.is_floating():
        raise ModelError(f"{state.where()} takes a floating function of {block.dtype}.")
    made = ghost(block.dtype, block)
    return Tensor(function(block.data), block.dtype) if made is None else made


def exp2(x: Any) -> Tensor:
    return _unary(torch.exp2, x)


def exp(x: Any) -> Tensor:
    return _unary(torch.exp, x)


def log2(x: Any) -> Tensor:
    return _unary(torch.log2, x)


def log(x: Any) -> Tensor:
    return _unary(torch.log, x)


def sqrt(x: Any) -> Tensor:
    return _unary(torch.sqrt, x)


def rsqrt(x: Any) -> Tensor:
    return _unary(torch.rsqrt, x)


def floor(x: Any) -> Tensor:
    return _unary(torch.floor, x)


def ceil(x: Any) -> Tensor:
    return _unary(torch.ceil, x)


def abs(x: Any) -> Any:  # noqa: A001
    value = as_value(x)
    if isinstance(value, Tensor):
        return Tensor(torch.abs(value.data), value.dtype)
    return Scalar(builtins.abs(int(value)), dtype_of(value))


def fdiv(a: Any, b: Any, ieee_rounding: bool = False) -> Any:
    return binary("truediv", a, b)


div_rn = fdiv


def add(a: Any, b: Any, **_: Any) -> Any:
    return binary("add", a, b)


def sub(a: Any, b: Any, **_: Any) -> Any:
    return binary("sub", a, b)


def mul(a: Any, b: Any, **_: Any) -> Any:
    return binary("mul", a, b)


def cdiv(a: Any, b: Any) -> Any:
    if type(a) is int and type(b) is int:
        return -(-a // b)
    return binary("floordiv", binary("sub", binary("add", a, b), 1), b)
