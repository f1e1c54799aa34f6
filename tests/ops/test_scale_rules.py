"""Scales by hand (B29): constant tensors, the floors of the writers, clamping, and what is not finite.

448 = 0x7E is the largest e4m3 code. bf16(1e-4) is 1.640625 * 2^-14; over 2^-13 it is 0.8203, coded 0x35 (0.8125);
over 2^-22 it is 420, coded 0x7D (416). bf16's largest value is 1.9922 * 2^127; over 2^120 it is 255, coded 0x78 (256).
"""

from __future__ import annotations

import math
import struct

import pytest
import torch

from .kernels import gather, write
from .writer import FORMATS, RULES, new_cache, page_bytes

UE8M0 = ("v4", "v41_footer", "v41_inline")
FLT_MIN = 2.0**-126


def _write_constant(
    layout: str, rule: str, value: float, dtype: torch.dtype = torch.bfloat16
) -> tuple[int, float | int]:
    """(code of every value, scale of every group) of a token filled with `value`; asserts that they are all alike."""
    codes, scales = _parts(layout, rule, torch.full((1, FORMATS[layout][0]), value, dtype=dtype))
    assert len(set(codes)) == 1 and len({str(s) for s in scales}) == 1
    return codes[0], scales[0]


def _parts(layout: str, rule: str, rows: torch.Tensor) -> tuple[bytes, tuple[float | int, ...]]:
    _, dims, group, step, *_ = FORMATS[layout]
    cache, flat = new_cache(layout, 1, 1, page_bytes(layout, 1))
    write(rows, cache, torch.tensor([0]), layout, rule)
    raw = flat.tobytes()
    if layout == "v32":
        return raw[:dims], struct.unpack("<4f", raw[512:528])
    at = 512 if layout == "v41_inline" else step
    return raw[:dims], tuple(raw[at : at + dims // group])


@pytest.mark.parametrize("rule", RULES["v4"])
@pytest.mark.parametrize("layout", UE8M0)
def test_constant_tensors_ue8m0(layout: str, rule: str) -> None:
    small = {"flashmla": (0x35, 127 - 13), "vllm": (0x7D, 127 - 22), "sglang": (0x7D, 127 - 22)}[rule]
    floor = {"flashmla": 127 - 13, "vllm": 127 - 22, "sglang": 127 - 35}[rule]
    assert _write_constant(layout, rule, 448.0) == (0x7E, 127)
    assert _write_constant(layout, rule, -448.0) == (0xFE, 127)
    assert _write_constant(layout, rule, 1e-4) == small
    assert _write_constant(layout, rule, 0.0) == (0x00, floor)
    assert _write_constant(layout, rule, -0.0) == (0x80, floor)
    assert _write_constant(layout, rule, 900.0) == (0x76, 129)  # 900 / 4 = 225, coded as 224
    assert _write_constant(layout, rule, 450.0) == (0x76, 128)  # 450 in bf16; 225 again: no NaN for values above 448
    top = torch.finfo(torch.bfloat16).max
    assert _write_constant(layout, rule, top) == (0x78, 247)
    assert _write_constant(layout, rule, -top) == (0xF8, 247)


def test_constant_tensors_v32() -> None:
    for rule in ("flashmla", "vllm"):
        assert _write_constant("v32", rule, 448.0) == (0x7E, 1.0)
        assert _write_constant("v32", rule, 1e-4) == (0x35, 2.0**-13)
        assert _write_constant("v32", rule, 0.0) == (0x00, 2.0**-13)
        assert _write_constant("v32", rule, -torch.finfo(torch.bfloat16).max) == (0xF8, 2.0**120)
    for rule in ("sglang", "arbitrary"):
        assert _write_constant("v32", rule, 448.0) == (0x7E, 1.0)
        code, scale = _write_constant("v32", rule, 600.0)
        assert code == 0x7E and scale == pytest.approx(600 / 448, rel=1e-7)  # not a power of two (B30)
        code, scale = _write_constant("v32", rule, -1e-4)
        assert code == 0xFE and scale == pytest.approx(1.640625 * 2.0**-14 / 448, rel=1e-7)
    assert _write_constant("v32", "sglang", 0.0) == (0x00, 0.0)  # SGLang's own writer divides 0 by 0 here
    assert _write_constant("v32", "arbitrary", 0.0) == (0x00, FLT_MIN)


@pytest.mark.parametrize("k", [-100, -14, -13, 0, 1, 37, 110])
def test_an_exact_ratio_keeps_its_power_of_two(k: int) -> None:
    """amax = 448 * 2^k needs scale 2^k, and the next fp32 number 2^(k+1): a division off by an ulp shows here."""
    exact = 448.0 * 2.0**k
    above = torch.nextafter(torch.tensor(exact), torch.tensor(math.inf)).item()
    floor = 127 - 35
    assert _write_constant("v4", "sglang", exact, torch.float32)[1] == max(127 + k, floor)
    assert _write_constant("v4", "sglang", above, torch.float32)[1] == max(128 + k, floor)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", tuple(FORMATS))
def test_a_group_that_is_not_finite_is_nan_alone(layout: str, bad: float) -> None:
    d_qk, dims, group, *_ = FORMATS[layout]
    rows = torch.full((1, d_qk), 448.0, dtype=torch.bfloat16)
    rows[0, group + 3] = bad
    codes, scales = _parts(layout, "flashmla", rows)
    assert codes == b"\x7e" * group + b"\x7f" * group + b"\x7e" * (dims - 2 * group)
    if layout == "v32":
        assert math.isnan(scales[1]) and scales[0] == scales[2] == scales[3] == 1.0
    else:
        assert scales[1] == 255 and set(scales[:1] + scales[2:]) == {127}


@pytest.mark.parametrize(("layout", "rule"), [(layout, rule) for layout in FORMATS for rule in RULES[layout]])
def test_round_trip_error(layout: str, rule: str) -> None:
    """|error| <= 2^-4 of the value (half a unit of 3 mantissa bits) or half a subnormal step, 2^-10 of the scale; an
    arbitrary fp32 scale adds the rounding of the product to bf16. Rope is exact."""
    d_qk, dims, group, *_ = FORMATS[layout]
    generator = torch.Generator().manual_seed(5)
    spread = torch.exp2(torch.randint(-24, 9, (6, d_qk), generator=generator).float())
    rows = (torch.randn(6, d_qk, generator=generator) * spread).bfloat16()
    cache, _ = new_cache(layout, 2, 3, page_bytes(layout, 2))
    write(rows, cache, torch.arange(6), layout, rule)
    back = gather(cache, torch.arange(6), layout).double()
    x = rows.double()
    assert torch.equal(back[:, dims:], x[:, dims:])
    amax = x[:, :dims].unflatten(1, (-1, group)).abs().amax(2).repeat_interleave(group, 1)
    # a power of two is at most twice amax / 448, or one of the floors, of which 2^-13 is the largest
    scale = (2 * amax / 448).clamp_min(2.0**-13) if rule != "arbitrary" else amax / 448
    bound = torch.maximum(x[:, :dims].abs() * 2.0**-4, scale * 2.0**-10 * (1 + 1e-6))
    bound += 0 if rule == "flashmla" else back[:, :dims].abs() * 2.0**-8
    error = (back[:, :dims] - x[:, :dims]).abs()
    assert (error <= bound).all()
    assert (error > 0).any()  # it was quantised at all
