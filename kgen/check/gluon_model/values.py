"""Run-time values: `Scalar` (an int of a fixed width, on which control flow may depend) and `Tensor`.

Both follow Triton's arithmetic: promotion, two's complement wrap, division that truncates. A `Scalar` is an `int`, so it
can stand wherever the kernel's Python text wants one. A floating scalar is a `Tensor` without dimensions. Tensors may lie
on torch's meta device; then they have a shape and no values (tracing).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Union

import torch

from . import state
from . import types as ty
from .types import DType, ModelError

Value = Union["Tensor", "Scalar", int, float, bool]
Made = TypeVar("Made")
Split = tuple[int, int] | None
"""How the CTAs of a cluster share a block out: see `cluster.split_of`."""


class Scalar(int):
    """An integer (or a pointer: an address) that a machine would hold in a register."""

    dtype: DType

    def __new__(cls, value: int, dtype: DType = ty.int32) -> Scalar:
        self = super().__new__(cls, ty.wrap_int(int(value), dtype))
        self.dtype = dtype
        return self

    shape: tuple[int, ...] = ()

    @property
    def type(self) -> DType:
        return self.dtype

    def to(self, dtype: DType, bitcast: bool = False, **_: Any) -> Scalar | Tensor:
        if dtype.is_floating():
            return as_tensor(self).to(dtype, bitcast=bitcast)
        return Scalar(self, dtype)

    def __hash__(self) -> int:
        return int(self)

    def __invert__(self) -> Scalar:
        return Scalar(not int(self) if self.dtype.kind == "bool" else ~int(self), self.dtype)

    def __neg__(self) -> Scalar:
        return Scalar(-int(self), self.dtype)

    def __repr__(self) -> str:
        return str(int(self))  # module text may be made of numbers

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)


class Tensor:
    """A block of values of one type."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: torch.Tensor, dtype: DType) -> None:
        assert data.dtype == dtype.carrier, (data.dtype, dtype)
        self.data = data
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def type(self) -> Tensor:
        return self

    @property
    def scalar(self) -> DType:
        return self.dtype

    @property
    def element_ty(self) -> DType:
        return self.dtype

    layout = None  # inert
    split: Split = None

    @property
    def T(self) -> Tensor:  # noqa: N802
        return Tensor(self.data.transpose(-1, -2), self.dtype)

    def to(self, dtype: DType, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> Tensor:
        if fp_downcast_rounding not in (None, "rtne"):
            raise ModelError(f"The rounding {fp_downcast_rounding!r} is not modelled; only to nearest even is.")
        change = ty.bitcast if bitcast else ty.convert
        return share(Tensor(change(self.data, self.dtype, dtype), dtype), self)

    cast = to

    def reshape(self, *shape: Any) -> Tensor:
        sizes = [int(n) for n in (shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)]
        self.must_be_whole("reshapes")
        return Tensor(self.data.reshape(sizes), self.dtype)

    def permute(self, *dims: Any) -> Tensor:
        order = dims[0] if len(dims) == 1 else dims
        self.must_be_whole("permutes")
        return Tensor(self.data.permute([int(d) for d in order]), self.dtype)

    trans = permute

    def expand_dims(self, axis: int) -> Tensor:
        made = Tensor(self.data.unsqueeze(axis), self.dtype)
        if self.split is not None:
            axis = axis if axis >= 0 else axis + made.data.dim()
            made.split = (self.split[0] + (axis <= self.split[0]), self.split[1])
        return made

    def must_be_whole(self, verb: str) -> None:
        if self.split is not None:
            raise ModelError(f"{state.where()} {verb} a block of which each CTA has its own part.")

    def broadcast_to(self, *shape: Any) -> Tensor:
        sizes = [int(n) for n in (shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)]
        return share(Tensor(self.data.expand(sizes), self.dtype), self)

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k == slice(None) for k in keys):
            raise ModelError(f"A tensor is indexed with {key!r}; only None and : are possible.")
        data: torch.Tensor = self.data[keys]
        made = Tensor(data, self.dtype)
        if self.split is not None:
            kept = [i for i, k in enumerate(keys) if k is not None]
            dim = self.split[0]
            made.split = (kept[dim] if dim < len(kept) else dim + len(keys) - len(kept), self.split[1])
        return made

    def __bool__(self) -> bool:
        if self.data.is_meta:
            return state.machine().decide()
        if self.data.dim():
            raise ModelError(f"A tensor of shape {self.shape} is used as a condition.")
        return bool(self.data)

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)})"

    def __neg__(self) -> Tensor:
        return share(Tensor(ty.cut(-self.data, self.dtype), self.dtype), self)

    def __invert__(self) -> Tensor:
        return share(Tensor(ty.cut(~self.data, self.dtype), self.dtype), self)


def share(result: Made, *operands: Any) -> Made:
    """The result of an operation element by element; CTAs share it out as they do an operand."""
    for operand in operands:
        split = getattr(operand, "split", None)
        if split is not None and isinstance(result, Tensor):
            if result.split not in (None, split):
                raise ModelError(f"{state.where()} combines blocks that are shared out to CTAs in different ways.")
            result.split = split
    return result


class NoOperand:
    """What a kernel holds but cannot calculate with; every operator raises its sentence."""

    def refuse_as_operand(self) -> str:
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------- conversions


def as_value(value: Any) -> Value:
    """What an operation takes; refuses what it cannot (an accumulator in flight, a descriptor)."""
    if isinstance(value, (Tensor, int, float)):
        return value
    if isinstance(value, NoOperand):
        raise ModelError(value.refuse_as_operand())
    raise ModelError(f"{type(value).__name__} cannot be an operand of arithmetic.")


def dtype_of(value: Value) -> DType:
    return value.dtype if isinstance(value, (Tensor, Scalar)) else ty.weak_type(value)


def is_weak(value: Value) -> bool:
    return not isinstance(value, (Tensor, Scalar))


def as_tensor(value: Any, dtype: DType | None = None, device: str | torch.device = "cpu") -> Tensor:
    """Any value as a tensor, converted to `dtype` if that is given."""
    value = as_value(value)
    if not isinstance(value, Tensor):
        own = dtype if dtype is not None and is_weak(value) else dtype_of(value)
        number = float(value) if own.is_floating() else int(value)
        if own.bits == 8 and own.is_floating():
            raise ModelError("Constants of 8-bit floating types are not modelled.")
        value = Tensor(ty.cut(torch.tensor(number, dtype=own.carrier, device=device), own), own)
    return value if dtype is None or value.dtype == dtype else Tensor(ty.convert(value.data, value.dtype, dtype), dtype)


def joint_shape(operands: Sequence[Value]) -> list[int]:
    """The shape that blocks broadcast to; scalars fit everything, ranks must agree."""
    shape: list[int] = []
    for operand in operands:
        own = operand.shape if isinstance(operand, Tensor) else ()
        if own and shape and len(own) != len(shape):
            raise ModelError(
                f"Operands of shapes {shape} and {list(own)} have different ranks; Gluon wants them equal."
            )
        shape = [max(n, m) for n, m in zip(shape, own, strict=True)] if own and shape else shape or list(own)
        if any(n not in (1, m) for n, m in zip(own, shape, strict=False)):
            raise ModelError(f"Operands of shapes {shape} and {list(own)} do not broadcast.")
    return shape


def ghost(dtype: DType, *operands: Value) -> Tensor | None:
    """The result of an elementwise operation without its values, if an operand has none."""
    if not any(isinstance(operand, Tensor) and operand.data.is_meta for operand in operands):
        return None
    return Tensor(torch.empty(joint_shape(operands), dtype=dtype.carrier, device="meta"), dtype)


def match(a: Value, b: Value, dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands as torch tensors of one type, broadcast against each other by torch."""
    x, y = as_tensor(a, dtype), as_tensor(b, dtype)
    joint_shape((x, y))
    if x.data.is_meta != y.data.is_meta:
        return x.data.to("meta"), y.data.to("meta")
    return x.data, y.data


# ---------------------------------------------------------------------------------------------- arithmetic


def _c_div(a: int, b: int) -> int:
    if b == 0:
        raise ModelError("Integer division by zero.")
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _c_mod(a: int, b: int) -> int:
    return a - b * _c_div(a, b)


_INTS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift, "floordiv": _c_div, "mod": _c_mod,
}  # fmt: skip

_TORCH: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "mod": torch.fmod,
}  # fmt: skip

_COMPARE: dict[str, Any] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


def _number(value: Value) -> int:
    assert isinstance(value, int)
    return int(value)


def _plain(value: Value) -> bool:
    return not isinstance(value, (Tensor, float))


def binary(name: str, a: Any, b: Any) -> Any:
    a, b = as_value(a), as_value(b)
    if dtype_of(a).is_ptr() or dtype_of(b).is_ptr():
        return _pointer_arithmetic(name, a, b)
    if name == "truediv":
        return _divide(a, b)
    dtype = ty.promote(dtype_of(a), is_weak(a), dtype_of(b), is_weak(b), name in ("floordiv", "mod"))
    if _plain(a) and _plain(b):
        return Scalar(_INTS[name](ty.wrap_int(_number(a), dtype), ty.wrap_int(_number(b), dtype)), dtype)
    made = ghost(dtype, a, b)
    if made is not None:
        return made
    x, y = match(a, b, dtype)
    if dtype.kind == "bool" and name in ("add", "mul"):
        name = {"add": "xor", "mul": "and"}[name]
    return Tensor(ty.cut(_TORCH[name](x, y), dtype), dtype)


def _divide(a: Value, b: Value) -> Tensor:
    dtype = ty.promote(dtype_of(a), is_weak(a), dtype_of(b), is_weak(b), True)
    dtype = dtype if dtype.is_floating() else ty.float32
    made = ghost(dtype, a, b)
    if made is not None:
        return made
    x, y = match(a, b, dtype)
    return Tensor(x / y, dtype)


def _pointer_arithmetic(name: str, a: Value, b: Value) -> Any:
    if name == "add" and dtype_of(b).is_ptr():
        a, b = b, a
    dtype = dtype_of(a)
    if name not in ("add", "sub") or dtype_of(b).is_ptr() or not dtype_of(b).integral:
        raise ModelError(f"{name} of {dtype} and {dtype_of(b)} is not possible.")
    sign = 1 if name == "add" else -1
    size = dtype.element_ty.itemsize
    if _plain(a) and _plain(b):
        return Scalar(_number(a) + sign * size * _number(b), dtype)
    made = ghost(dtype, a, b)
    if made is not None:
        return made
    offset = as_tensor(b)
    x, y = match(as_tensor(a), Tensor(offset.data.to(torch.int64), ty.int64).to(ty.int64), dtype)
    return Tensor(x + sign * size * y, dtype)


def compare(name: str, a: Any, b: Any) -> Any:
    a, b = as_value(a), as_value(b)
    if dtype_of(a).is_ptr() or dtype_of(b).is_ptr():
        dtype = ty.int64
        a = a.to(ty.int64) if isinstance(a, (Tensor, Scalar)) else a
        b = b.to(ty.int64) if isinstance(b, (Tensor, Scalar)) else b
    else:
        dtype = ty.promote(dtype_of(a), is_weak(a), dtype_of(b), is_weak(b))
    if _plain(a) and _plain(b):
        return Scalar(_COMPARE[name](ty.wrap_int(_number(a), dtype), ty.wrap_int(_number(b), dtype)), ty.int1)
    made = ghost(ty.int1, a, b)
    if made is not None:
        return made
    x, y = match(a, b, dtype)
    return Tensor(_COMPARE[name](x, y), ty.int1)


def _install() -> None:
    """The operators. Set after the classes, because they share these functions."""

    def forward(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda self, other: share(function(name, self, other), self, other)

    def backward(name: str) -> Callable[..., Any]:
        return lambda self, other: share(binary(name, other, self), self, other)

    words = {"and": "and", "or": "or", "xor": "xor", "shl": "lshift", "shr": "rshift"}
    for name in (*_INTS, "truediv"):
        word = words.get(name, name)
        for cls in (Tensor, Scalar, NoOperand):
            setattr(cls, f"__{word}__", forward(binary, name))
            setattr(cls, f"__r{word}__", backward(name))
    for name in _COMPARE:
        for cls in (Tensor, Scalar):
            setattr(cls, f"__{name}__", forward(compare, name))


_install()


def broadcast_shape(*shapes: Sequence[int]) -> torch.Size:
    if len({tuple(shape) for shape in shapes}) == 1:  # torch takes long to say so
        return torch.Size(shapes[0])
    made: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return made


def expand_together(*blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.broadcast_tensors(*blocks))  # type: ignore[no-untyped-call]


def shape_of(values: Sequence[Any]) -> list[int]:
    """A shape of the kernel's text as plain ints."""
    return [int(n) for n in values]
