"""PTX instructions on registers of bits (int64 tensors). Each takes its source operands and gives its result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from .types import ModelError

Bits = torch.Tensor
_FLOATS = {
    "f16": (torch.int16, torch.float16), "bf16": (torch.int16, torch.bfloat16), "f32": (torch.int32, torch.float32),
    "f64": (torch.int64, torch.float64),
}  # fmt: skip
_MASK = {16: 0xFFFF, 32: 0xFFFFFFFF}


def number(text: str) -> int | None:
    """An immediate operand as bits."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text) or re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return None


def _value(bits: Bits, kind: str) -> torch.Tensor:
    """Bits as numbers of a floating or integer kind; integers as int64."""
    if kind in _FLOATS:
        word, number_type = _FLOATS[kind]
        return bits.to(word).view(number_type)
    width = int(kind[1:])
    low = bits & ((1 << width) - 1) if width < 64 else bits
    if kind[0] == "s" and width < 64:
        return low - ((low >> (width - 1)) << width)
    return low


def _bits(value: torch.Tensor, kind: str) -> Bits:
    if kind in _FLOATS:
        word, number_type = _FLOATS[kind]
        raw = value.to(number_type).view(word).to(torch.int64)
        return raw if kind == "f64" else raw & (0xFFFF if word == torch.int16 else 0xFFFFFFFF)
    width = int(kind[1:])
    return value.to(torch.int64) & ((1 << width) - 1) if width < 64 else value.to(torch.int64)


def _halves(bits: Bits) -> tuple[Bits, Bits]:
    return bits & 0xFFFF, (bits >> 16) & 0xFFFF


def _pair(low: Bits, high: Bits) -> Bits:
    return low | (high << 16)


_MATH: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "min": torch.fmin,
    "max": torch.fmax,
    "fma": lambda a, b, c: a.double() * b.double() + c.double(),
    "neg": torch.neg,
    "abs": torch.abs,
}


def _float_op(name: str, kind: str) -> Callable[..., Bits]:
    wide = torch.float64 if name == "fma" else None

    def run(*sources: Bits) -> Bits:
        values = [_value(s, kind) for s in sources]
        return _bits(_MATH[name](*(v if wide is None else v.to(wide) for v in values)), kind)

    return run


def _vector_op(name: str, kind: str) -> Callable[..., Bits]:
    single = _float_op(name, kind)

    def run(*sources: Bits) -> Bits:
        halves = [_halves(s) for s in sources]
        return _pair(single(*(h[0] for h in halves)), single(*(h[1] for h in halves)))

    return run


def _int_op(name: str, kind: str) -> Callable[..., Bits]:
    return lambda *sources: _bits(_MATH[name](*(_value(s, kind) for s in sources)), kind)


def _e4m3x2_to(kind: str) -> Callable[[Bits], Bits]:
    """Two e4m3 -> two halves, the low byte to the low half; exact, and NaN stays NaN."""

    def one(byte: Bits) -> Bits:
        return _bits(byte.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32), kind)

    return lambda bits: _pair(one(bits & 0xFF), one((bits >> 8) & 0xFF))


def _to_pair(kind: str) -> Callable[[Bits, Bits], Bits]:
    """cvt.x2.f32 d, a, b: a goes to the high half."""
    return lambda high, low: _pair(_bits(_value(low, "f32"), kind), _bits(_value(high, "f32"), kind))


def _convert(target: str, source: str) -> Callable[[Bits], Bits]:
    return lambda bits: _bits(_value(bits, source), target)


def _mov(source: Any) -> Any:
    """A vector source is packed, low part first; a vector target is unpacked by the caller."""
    if not isinstance(source, list):
        return source
    width = {2: 16, 4: 8}.get(len(source))
    if width is None:
        raise ModelError(f"a vector of {len(source)} registers is not modelled")
    packed = torch.zeros_like(source[0])
    for i, part in enumerate(source):
        packed = packed | ((part & ((1 << width) - 1)) << (i * width))
    return packed


def _shift_left(width: int) -> Callable[[Bits, Bits], Bits]:
    return lambda a, n: torch.where(n >= width, 0, (a << n.clamp(max=width - 1)) & ((1 << width) - 1))


def _shift_right(kind: str) -> Callable[[Bits, Bits], Bits]:
    width = int(kind[1:])
    return lambda a, n: _bits(
        _value(a, "s" + kind[1:] if kind[0] == "s" else "u" + kind[1:]) >> n.clamp(max=width), kind
    )


def _lop3(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
    lut = int(table[0])
    full = 0xFFFFFFFF
    out = torch.zeros_like(a)
    for i in range(8):
        if lut >> i & 1:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) & full)
    return out


def _prmt(a: Bits, b: Bits, selector: Bits) -> Bits:
    out = torch.zeros_like(a)
    both = a | (b << 32)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 0xF
        byte = (both >> ((nibble & 7) * 8)) & 0xFF
        sign = (byte >> 7) * 0xFF
        out = out | (torch.where((nibble & 8) != 0, sign, byte) << (8 * i))
    return out


_TESTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "eq": torch.eq, "ne": lambda a, b: (a != b) & (a == a) & (b == b), "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge, "neu": torch.ne, "equ": lambda a, b: ~((a != b) & (a == a) & (b == b)),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


def _setp(test: str, kind: str) -> Callable[[Bits, Bits], Bits]:
    return lambda a, b: _TESTS[test](_value(a, kind), _value(b, kind)).to(torch.int64)


def _not_bits(width: int) -> Callable[[Bits], Bits]:
    return lambda a: ~a & ((1 << width) - 1)


def _table() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {"lop3.b32": _lop3, "prmt.b32": _prmt}
    for kind in ("b16", "b32", "u32", "s32", "f32", "u16", "pred"):  # of 64 bits: not vectors
        table[f"mov.{kind}"] = _mov
    for kind in ("b64", "u64", "s64", "f64"):
        table[f"mov.{kind}"] = lambda a: a
    for kind in ("f16", "bf16", "f32"):
        for name in _MATH:
            rounding = ("", ".rn") if name in ("add", "sub", "mul", "fma") else ("",)
            for mode in rounding:
                table[f"{name}{mode}.{kind}"] = _float_op(name, kind)
                if kind != "f32":
                    table[f"{name}{mode}.{kind}x2"] = _vector_op(name, kind)
        table[f"cvt.rn.{kind}x2.e4m3x2"] = _e4m3x2_to(kind)
        table[f"cvt.rn.{kind}x2.f32"] = _to_pair(kind)
        table[f"cvt.rn.{kind}.f32"] = table[f"cvt.{kind}.f32"] = _convert(kind, "f32")
        table[f"cvt.f32.{kind}"] = _convert("f32", kind)
        for test in _TESTS:
            table[f"setp.{test}.{kind}"] = _setp(test, kind)
    for kind in ("u32", "s32", "u64", "s64", "u16", "s16"):
        for name in ("add", "sub", "min", "max"):
            table[f"{name}.{kind}"] = _int_op(name, kind)
        table[f"mul.lo.{kind}"] = _int_op("mul", kind)
        table[f"mad.lo.{kind}"] = lambda a, b, c, k=kind: _bits(_value(a, k) * _value(b, k) + _value(c, k), k)
        table[f"shr.{kind}"] = _shift_right(kind)
        table[f"cvt.rn.f32.{kind}"] = _convert("f32", kind)
        for test in ("eq", "ne", "lt", "le", "gt", "ge"):
            table[f"setp.{test}.{kind}"] = _setp(test, kind)
    for width in (16, 32):
        table[f"and.b{width}"] = lambda a, b: a & b
        table[f"or.b{width}"] = lambda a, b: a | b
        table[f"xor.b{width}"] = lambda a, b: a ^ b
        table[f"not.b{width}"] = _not_bits(width)
        table[f"shl.b{width}"] = _shift_left(width)
        table[f"shr.b{width}"] = _shift_right(f"u{width}")
        for kind in ("b", "u", "s", "f"):
            table[f"selp.{kind}{width}"] = lambda a, b, p: torch.where(p != 0, a, b)
    for name in ("and", "or", "xor"):
        table[f"{name}.pred"] = table[f"{name}.b32"]
    table["not.pred"] = lambda p: 1 - p
    table["vote.any.pred"] = table["vote.all.pred"] = table["vote.ballot.b32"] = lambda p, *_: p
    for name in ("or", "and"):  # of values that are equal in a warp
        table[f"redux.{name}.b32"] = lambda a, *_: a
    for name in ("min", "max"):
        table[f"redux.{name}.s32"] = table[f"redux.{name}.u32"] = lambda a, *_: a
    table["ex2.f32"] = lambda a: _bits(torch.exp2(_value(a, "f32")), "f32")
    table["lg2.f32"] = lambda a: _bits(torch.log2(_value(a, "f32")), "f32")
    table["rcp.f32"] = lambda a: _bits(1 / _value(a, "f32"), "f32")
    return table


OPERATIONS = _table()
