"""Element types of the model, how a tensor of each is carried by torch, and Triton's promotion rules.

Torch has few operations on unsigned types, so a tensor is *carried* in a wider signed type and cut back after every
operation; its *storage* type is what lies in memory. Pointers are int64 addresses (see `memory`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


class ModelError(Exception):
    """A sentence about what a kernel did that the model does not know, or that no machine would survive."""


@dataclass(frozen=True)
class DType:
    name: str
    kind: str  # "bool", "int", "uint", "float" or "pointer"
    bits: int
    carrier: torch.dtype
    storage: torch.dtype
    pointee: DType | None = None

    @property
    def element_ty(self) -> DType:
        if self.pointee is None:
            raise ModelError(f"{self.name} is no pointer type, so it has no element_ty.")
        return self.pointee

    @property
    def scalar(self) -> DType:
        return self

    @property
    def primitive_bitwidth(self) -> int:
        return self.bits

    @property
    def itemsize(self) -> int:
        return max(1, self.bits // 8)

    @property
    def integral(self) -> bool:
        return self.kind in ("bool", "int", "uint")

    def is_ptr(self) -> bool:
        return self.kind == "pointer"

    def is_floating(self) -> bool:
        return self.kind == "float"

    def is_int(self) -> bool:
        return self.integral

    def __repr__(self) -> str:
        return self.name


int1 = DType("int1", "bool", 1, torch.bool, torch.uint8)
int8 = DType("int8", "int", 8, torch.int8, torch.int8)
int16 = DType("int16", "int", 16, torch.int16, torch.int16)
int32 = DType("int32", "int", 32, torch.int32, torch.int32)
int64 = DType("int64", "int", 64, torch.int64, torch.int64)
uint8 = DType("uint8", "uint", 8, torch.int32, torch.uint8)
uint16 = DType("uint16", "uint", 16, torch.int32, torch.int16)
uint32 = DType("uint32", "uint", 32, torch.int64, torch.int32)
uint64 = DType("uint64", "uint", 64, torch.int64, torch.int64)
float16 = DType("float16", "float", 16, torch.float16, torch.float16)
bfloat16 = DType("bfloat16", "float", 16, torch.bfloat16, torch.bfloat16)
float32 = DType("float32", "float", 32, torch.float32, torch.float32)
float64 = DType("float64", "float", 64, torch.float64, torch.float64)
float8e4nv = DType("float8e4nv", "float", 8, torch.float8_e4m3fn, torch.float8_e4m3fn)
float8e5 = DType("float8e5", "float", 8, torch.float8_e5m2, torch.float8_e5m2)

DTYPES = {
    dtype.name: dtype
    for dtype in (
        *(int1, int8, int16, int32, int64, uint8, uint16, uint32, uint64),
        *(float16, bfloat16, float32, float64, float8e4nv, float8e5),
    )
}

_OF_TORCH = {
    dtype.storage: dtype
    for dtype in (int8, int16, int32, int64, uint8, float16, bfloat16, float32, float64, float8e4nv, float8e5)
} | {torch.bool: int1, torch.uint16: uint16, torch.uint32: uint32, torch.uint64: uint64}


def of_torch(dtype: torch.dtype) -> DType:
    return _OF_TORCH[dtype]


@lru_cache(maxsize=64)
def pointer_type(element: DType, address_space: int = 1, const: bool = False) -> DType:
    return DType(f"pointer<{element.name}>", "pointer", 64, torch.int64, torch.int64, element)


def wrap_int(value: int, dtype: DType) -> int:
    """`value` as an integer of `dtype`: what is left of it in that many bits."""
    if dtype.kind == "bool":
        return int(value != 0)
    value &= (1 << dtype.bits) - 1
    signed = dtype.kind in ("int", "pointer") and value >> (dtype.bits - 1)
    return value - (1 << dtype.bits) if signed else value


def cut(data: torch.Tensor, dtype: DType) -> torch.Tensor:
    """A carrier after arithmetic, cut back to the bits of its type. Signed carriers wrap by themselves."""
    if dtype.kind == "uint" and dtype.bits < 64:
        return data & ((1 << dtype.bits) - 1)
    return data


def to_storage(data: torch.Tensor, dtype: DType) -> torch.Tensor:
    return data.to(dtype.storage)


def from_storage(stored: torch.Tensor, dtype: DType) -> torch.Tensor:
    if dtype.kind == "bool":
        return stored != 0
    return cut(stored.to(dtype.carrier), dtype)


def bitcast(data: torch.Tensor, source: DType, target: DType) -> torch.Tensor:
    if source.bits != target.bits:
        raise ModelError(f"A bitcast from {source} to {target} changes the number of bits.")
    return from_storage(to_storage(data, source).view(target.storage), target)


def convert(data: torch.Tensor, source: DType, target: DType) -> torch.Tensor:
    """A cast by value. Floating numbers round to nearest even; integers keep the low bits."""
    if source == target:
        return data
    if target.kind == "bool":
        return data != 0
    if source.kind == "pointer" or target.kind == "pointer":
        if not (source.bits == target.bits == 64):
            raise ModelError(f"A pointer cannot be cast between {source} and {target}.")
        return data
    if source.is_floating() and target.integral:
        return cut(data.to(torch.float64).trunc().to(torch.int64).to(target.carrier), target)
    if source.bits == 8 and source.is_floating() and not target.is_floating():
        data = data.to(torch.float32)
    return cut(data.to(target.carrier), target)


_RANK = {"bool": 0, "uint": 1, "int": 1, "float": 2}


def _promote_ints(a: DType, b: DType) -> DType:
    if a.kind == b.kind:
        return a if a.bits >= b.bits else b
    unsigned, other = (a, b) if a.kind == "uint" else (b, a)
    return unsigned if unsigned.kind == "uint" and unsigned.bits >= other.bits else other


def promote(a: DType, a_weak: bool, b: DType, b_weak: bool, division: bool = False) -> DType:
    """Triton's `computation_type_impl`. A weak operand is a number of the Python text: it takes the other's type."""
    if a_weak != b_weak:
        weak, strong = (a, b) if a_weak else (b, a)
        if _RANK[weak.kind] <= _RANK[strong.kind]:
            return float32 if division and strong in (float16, bfloat16) else strong
    for wide in (float64, float32):
        if wide in (a, b):
            return wide
    if float16 in (a, b):
        return float32 if division else float16
    if a == b == bfloat16:
        return float32 if division else bfloat16
    if bfloat16 in (a, b):
        return float32
    if a.is_floating() or b.is_floating():
        raise ModelError(f"Arithmetic between {a} and {b} is not modelled; cast to a wider type first.")
    if division and a.kind != b.kind:
        raise ModelError(f"Triton refuses to divide {a} by {b}: their signedness differs.")
    return _promote_ints(a, b)


def weak_type(value: int | float | bool) -> DType:
    """The type that Triton gives to a number of the Python text when nothing else decides."""
    if isinstance(value, bool):
        return int1
    if isinstance(value, float):
        return float32
    if -(2**31) <= value < 2**31:
        return int32
    return uint32 if 0 <= value < 2**32 else int64
