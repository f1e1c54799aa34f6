"""`triton.experimental.gluon.language` without its elementwise functions (see `elementwise`)."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator
from typing import Any

import torch

from . import state
from . import types as ty
from .cluster import held, split_of
from .ptx import inline_asm_elementwise
from .types import DType, ModelError
from .values import (
    Scalar,
    Tensor,
    Value,
    as_tensor,
    as_value,
    broadcast_shape,
    dtype_of,
    expand_together,
    match,
    shape_of,
    share,
)

__all__ = ["inline_asm_elementwise"]


class constexpr:  # noqa: N801
    """An annotation, and a wrapper of module constants that the model sees through."""

    def __new__(cls, value: Any) -> Any:
        return value


# ---------------------------------------------------------------------------------------------- creation


def _device() -> str:
    return state.machine().device


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    made = Tensor(torch.arange(int(start), int(end), dtype=torch.int32, device=_device()), ty.int32)
    made.split = split_of(layout)
    return made


def full(shape: Any, value: Any, dtype: DType, layout: Any = None) -> Tensor:
    data, sizes = as_tensor(value, dtype).data, shape_of(shape)
    one = dtype.integral and list(sizes) == [1]  # what partitions tell each other stays real in a trace
    made = Tensor((data if one else data.to(_device())).expand(sizes), dtype)
    made.split = split_of(layout)
    return made


def zeros(shape: Any, dtype: DType, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype, layout)


def zeros_like(x: Tensor, **_: Any) -> Tensor:
    return zeros(x.shape, x.dtype)


def full_like(x: Tensor, value: Any, **_: Any) -> Tensor:
    return full(x.shape, value, x.dtype)


# ---------------------------------------------------------------------------------------------- shape


def reshape(x: Tensor, *shape: Any) -> Tensor:
    return x.reshape(*shape)


def permute(x: Tensor, *dims: Any) -> Tensor:
    return x.permute(*dims)


def expand_dims(x: Tensor, axis: Any) -> Tensor:
    return x.expand_dims(int(axis))


def broadcast(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    x, y = as_tensor(a), as_tensor(b)
    shape = broadcast_shape(x.data.shape, y.data.shape)
    return share(Tensor(x.data.expand(shape), x.dtype), x), share(Tensor(y.data.expand(shape), y.dtype), y)


def join(a: Tensor, b: Tensor) -> Tensor:
    dtype = ty.promote(a.dtype, False, b.dtype, False)
    x, y = expand_together(*match(a, b, dtype))
    if x.is_meta:  # stacking nothing takes torch long
        return Tensor(x.new_empty((*x.shape, 2)), dtype)
    return Tensor(torch.stack((x, y), dim=-1), dtype)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] != 2:
        raise ModelError(f"{state.where()} splits a block of shape {list(x.shape)}, whose last dimension is not 2.")
    return Tensor(x.data[..., 0], x.dtype), Tensor(x.data[..., 1], x.dtype)


def convert_layout(x: Any, layout: Any, assert_trivial: bool = False) -> Any:
    value = as_value(x)
    if not isinstance(value, Tensor) or layout is None or split_of(layout) == value.split:
        return value
    value.must_be_whole("moves to another CTA")
    made = Tensor(value.data, value.dtype)
    made.split = split_of(layout)
    return made


set_auto_layout = convert_layout


def ravel(x: Tensor, **_: Any) -> Tensor:
    return x.reshape([math.prod(x.shape)])


# ---------------------------------------------------------------------------------------------- reductions


def max(x: Tensor, axis: Any = None, keep_dims: bool = False, **_: Any) -> Any:  # noqa: A001
    return _reduce_extreme(x, axis, keep_dims, "amax", float("-inf"))


def min(x: Tensor, axis: Any = None, keep_dims: bool = False, **_: Any) -> Any:  # noqa: A001
    return _reduce_extreme(x, axis, keep_dims, "amin", float("inf"))


def _reduce_extreme(x: Tensor, axis: Any, keep_dims: bool, name: str, worst: float) -> Any:
    x.must_be_whole("reduces")
    data = x.data
    dims = list(builtins.range(data.dim())) if axis is None else [int(axis)]
    if data.is_meta:
        return Tensor(data.sum(dim=dims, keepdim=keep_dims).to(x.dtype.carrier), x.dtype)
    if not x.dtype.is_floating():
        return _reduced(getattr(data, name)(dim=dims, keepdim=keep_dims), x.dtype)
    nan = data.isnan()
    best = getattr(data.masked_fill(nan, worst), name)(dim=dims, keepdim=keep_dims)
    for dim in sorted(dims, reverse=True):
        nan = nan.all(dim=dim, keepdim=keep_dims)
    return _reduced(best.masked_fill(nan, float("nan")), x.dtype)


def sum(x: Tensor, axis: Any = None, keep_dims: bool = False, dtype: DType | None = None) -> Any:  # noqa: A001
    x.must_be_whole("reduces")
    kind = dtype or (x.dtype if x.dtype.is_floating() or x.dtype.bits >= 32 else ty.int32)
    dims = list(builtins.range(x.data.dim())) if axis is None else [int(axis)]
    return _reduced(ty.cut(x.to(kind).data.sum(dim=dims, keepdim=keep_dims).to(kind.carrier), kind), kind)


def _reduced(data: torch.Tensor, dtype: DType) -> Any:
    """An integer that is left alone is a scalar, on which control flow may depend."""
    if data.dim() == 0 and dtype.integral and not data.is_meta:
        return Scalar(int(data), dtype)
    return Tensor(data, dtype)


# ---------------------------------------------------------------------------------------------- memory


def load(pointer: Any, mask: Any = None, other: Any = None, **_: Any) -> Any:
    pointer = as_value(pointer)
    dtype = dtype_of(pointer)
    if not dtype.is_ptr():
        raise ModelError(f"{state.where()} loads through {dtype}, which is no pointer.")
    element = dtype.element_ty
    address = as_tensor(pointer).data
    keep = _held(address, mask, pointer)
    fill = None if other is None else as_tensor(other, element)
    if keep is not None and address.dim() == 0 and keep.dim() != 0:
        raise ModelError(f"{state.where()} masks a scalar load with a block.")
    if address.is_meta:
        return Tensor(torch.empty(address.shape, dtype=element.carrier, device="meta"), element)
    if keep is not None and keep.is_meta:
        raise ModelError(f"{state.where()} masks a load of real addresses with values that a trace does not have.")
    if fill is not None and fill.data.is_meta:
        raise ModelError(f"{state.where()} fills a load with values that a trace does not have.")
    return share(_reduced(state.machine().memory.load(address, element, keep, fill), element), pointer, mask)


def _held(address: torch.Tensor, mask: Any, pointer: Any) -> torch.Tensor | None:
    """The mask of an access: where each CTA has its own part of a block, that part."""
    keep = None if mask is None else as_tensor(mask, ty.int1).data
    split = pointer.split if isinstance(pointer, Tensor) else None
    if split is None or address.is_meta:
        return keep
    own = held(split, address.shape, state.machine().rank)
    return own if keep is None else keep & own


def store(pointer: Any, value: Any, mask: Any = None, **_: Any) -> None:
    pointer = as_value(pointer)
    dtype = dtype_of(pointer)
    if not dtype.is_ptr():
        raise ModelError(f"{state.where()} stores through {dtype}, which is no pointer.")
    address = as_tensor(pointer).data
    block = as_tensor(value, dtype.element_ty).data
    keep = _held(address, mask, pointer)
    whole = not isinstance(pointer, Tensor) or pointer.split is None
    if state.machine().device == "meta" or (whole and state.machine().rank):  # a trace changes nothing
        return
    if address.dim() == 0 and block.dim():
        raise ModelError(f"{state.where()} stores a block through one pointer.")
    state.machine().memory.store(address, block, dtype.element_ty, keep)


def atomic_add(pointer: Any, value: Any, mask: Any = None, **_: Any) -> Scalar:
    """At one address, of an int. What a trace takes from a counter is taken, or the next would be the same."""
    pointer = as_value(pointer)
    element = dtype_of(pointer).element_ty
    if isinstance(pointer, Tensor) or not element.integral or mask is not None:
        raise ModelError(f"{state.where()} adds atomically to more than one int, which the model does not have.")
    memory, address = state.machine().memory, as_tensor(pointer).data
    before = Scalar(int(memory.load(address, element, None, None)), element)
    memory.store(address, as_tensor(before + value, element).data, element, None)
    return before


# ---------------------------------------------------------------------------------------------- control


def static_range(*bounds: Any) -> Iterator[int]:
    return iter(builtins.range(*(int(b) for b in bounds)))


def dynamic_range(*bounds: Any, **_: Any) -> Iterator[Scalar]:
    """`range` of a kernel: the loop variable is a run-time integer."""
    dtype = ty.int32
    for bound in bounds:
        if dtype_of(as_value(bound)).bits > dtype.bits:
            dtype = dtype_of(as_value(bound))
    return (Scalar(i, dtype) for i in builtins.range(*(int(b) for b in bounds)))


def program_id(axis: int) -> Scalar:
    program = state.machine().program
    return Scalar(program[int(axis)] if int(axis) < len(program) else 0, ty.int32)


def num_programs(axis: int) -> Scalar:
    grid = state.machine().grid
    return Scalar(grid[int(axis)] if int(axis) < len(grid) else 1, ty.int32)


def num_warps() -> int:
    return state.machine().partition.warps


def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None) -> Any:
    return state.machine().specialize(functions_and_args, worker_num_warps)


def thread_barrier() -> None:
    """Threads of a partition run in step here, but see `mbarrier.expect`."""
    state.machine().partition.apart = False


barrier = thread_barrier


def static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise ModelError(f"static_assert failed: {message}")


def device_assert(condition: Any, message: str = "", mask: Any = None) -> None:
    value: Value = as_value(condition)
    if isinstance(value, Tensor) and not value.data.is_meta and not bool(value.data.all()):
        raise ModelError(f"device_assert failed: {message}")


def static_print(*_: Any, **__: Any) -> None:
    pass


device_print = static_print


def hint(x: Any, *_: Any) -> Any:
    """multiple_of, max_contiguous and max_constancy: promises to the compiler."""
    return x


multiple_of = max_contiguous = max_constancy = hint


def assume(condition: Any) -> None:
    if not condition:
        raise ModelError(f"{state.where()} assumes what is not so.")
