"""Bytes that `quantise_kernel` writes: equal to an independent writer's over the whole buffer, so that gaps, pads,
skipped slots and neighbours are checked with the records."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kgen.check import pack

from .kernels import write
from .writer import CANARY, FORMATS, RULES, new_cache, page_bytes
from .writer import write as write_by_hand

LAYOUTS = tuple(FORMATS)
LAYOUT_RULES = [(layout, rule) for layout in LAYOUTS for rule in RULES[layout]]


def _rows(n: int, layout: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows whose groups differ widely in magnitude: a scale taken from a neighbouring group shows."""
    generator = torch.Generator().manual_seed(seed)
    d_qk, dims, group, *_ = FORMATS[layout]
    rows = torch.randn(n, d_qk, generator=generator)
    exponents = torch.randint(-18, 12, (n, dims // group), generator=generator)
    rows[:, :dims] *= torch.exp2(exponents.float()).repeat_interleave(group, 1)
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("layout", "rule"), LAYOUT_RULES)
def test_pages_are_byte_exact(layout: str, rule: str, dtype: torch.dtype) -> None:
    page, pages = 3, 3
    stride = page_bytes(layout, page) + 48
    rows, slots = _rows(5, layout, dtype), [7, 0, 2, 5, 3]
    cache, got = new_cache(layout, page, pages, stride)
    _, want = new_cache(layout, page, pages, stride)
    write(rows, cache, torch.tensor(slots), layout, rule)
    write_by_hand(want, rows, slots, layout, rule, page, stride)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("page", [1, 2, 5, 61, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_sizes(layout: str, page: int) -> None:
    stride = page_bytes(layout, page)
    slots = sorted({0, page - 1, page, 2 * page - 1})
    rows = _rows(len(slots), layout, seed=page)
    cache, got = new_cache(layout, page, 2, stride)
    _, want = new_cache(layout, page, 2, stride)
    write(rows, cache, torch.tensor(slots, dtype=torch.int32), layout)
    write_by_hand(want, rows, slots, layout, "flashmla", page, stride)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("layout", "rule"), LAYOUT_RULES)
def test_agrees_with_the_packer_of_the_checks(layout: str, rule: str) -> None:
    rows = _rows(6, layout, seed=3)
    stride = page_bytes(layout, 2)
    cache = pack.empty_cache(layout, 2, 3, stride, 0, 0, "cpu")
    write(rows, cache, torch.arange(6), layout, rule)
    want = pack.pack_paged(rows, layout, 2, scale_rule=rule, page_stride=stride)
    assert torch.equal(cache, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipped_slots_leave_no_trace(layout: str, dtype: torch.dtype) -> None:
    rows = _rows(6, layout)
    cache, got = new_cache(layout, 2, 2, page_bytes(layout, 2))
    write(rows, cache, torch.tensor([-1, 4, 2**31 - 1, -(2**31), -7, 5], dtype=dtype), layout)
    assert (got == CANARY).all()
    write(rows, cache, torch.tensor([-1, 3, -1, 4, -1, -1], dtype=dtype), layout)
    _, want = new_cache(layout, 2, 2, page_bytes(layout, 2))
    write_by_hand(want, rows[1:2], [3], layout, "flashmla", 2, page_bytes(layout, 2))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_cache_may_be_slices(layout: str) -> None:
    """Rows with a row stride; two layers interleaved in one pool, of which the second is written (B26)."""
    d_qk, *_, logical, _ = FORMATS[layout]
    wide = torch.full((4, d_qk + 24), 7.0, dtype=torch.bfloat16)
    wide[:, :d_qk] = _rows(4, layout)
    layer = page_bytes(layout, 2)
    pool = torch.full((2 * 2 * layer,), CANARY, dtype=torch.uint8)
    second = pool.as_strided((2, 2, 1, logical), (2 * layer, logical, logical, 1), layer)
    write(wide[:, :d_qk], second.view(torch.float8_e4m3fn), torch.arange(4), layout)
    want = np.full(2 * 2 * layer, CANARY, np.uint8)
    write_by_hand(want[layer:], wide[:, :d_qk].contiguous(), [0, 1, 2, 3], layout, "flashmla", 2, 2 * layer)
    np.testing.assert_array_equal(pool.numpy(), want)


def test_every_rounding_decision_of_e4m3() -> None:
    """Each midpoint of neighbouring e4m3 values, and the fp32 numbers next to it, in a group with scale 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[:-1] + codes[1:]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    points = torch.cat([middle, torch.nextafter(middle, up), torch.nextafter(middle, down), codes])
    points = torch.cat([points, -points])
    points = torch.cat([points, torch.zeros(-len(points) % 127)]).view(-1, 127)
    group = torch.cat([torch.full((len(points), 1), 448.0), points], 1)
    rows = torch.zeros(-(-len(group) // 4), 576)
    rows[:, :512] = torch.cat([group, group[: -len(group) % 4]]).view(-1, 512)
    cache, got = new_cache("v32", len(rows), 1, 656 * len(rows))
    _, want = new_cache("v32", len(rows), 1, 656 * len(rows))
    write(rows, cache, torch.arange(len(rows)), "v32")
    write_by_hand(want, rows, list(range(len(rows))), "v32", "flashmla", len(rows), 0)
    np.testing.assert_array_equal(got, want)
    assert (cache[0, :, 0, 512:528].contiguous().view(torch.float32) == 1.0).all()


@pytest.mark.parametrize("layout", ["v32", "v4"])
def test_rope_bits_are_copied(layout: str) -> None:
    """All bits of bf16 rope survive (NaN payloads, infinities, subnormals, -0); fp32 rope rounds to nearest even."""
    d_qk, dims, *_ = FORMATS[layout]
    special = [0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x8000, 0x7F7F, 0x43FF]
    rows = torch.zeros(2, d_qk, dtype=torch.bfloat16)
    rows[0, dims:] = torch.tensor(special * 8, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rope_at = 528 if layout == "v32" else 448
    cache, got = new_cache(layout, 2, 1, page_bytes(layout, 2))
    write(rows, cache, torch.tensor([0, 1]), layout)
    assert got[rope_at : rope_at + 128].view("<u2").tolist() == special * 8

    halves = torch.zeros(1, d_qk)
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x7F800001, 0x7F7FFFFF, 0x00018000]
    halves[0, dims : dims + 8] = torch.tensor(bits).to(torch.int32).view(torch.float32)
    write(halves, cache, torch.tensor([0]), layout)
    assert got[rope_at : rope_at + 16].view("<u2").tolist() == [
        0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82, 0x7FC0, 0x7F80, 0x0002,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_bf16_cache_is_a_scatter(d_qk: int, dtype: torch.dtype) -> None:
    rows = torch.randn(4, d_qk, generator=torch.Generator().manual_seed(1)).to(dtype)
    pool = torch.full((5, d_qk + 8), -3.0, dtype=torch.bfloat16)
    write(rows, pool[:, :d_qk].unsqueeze(1), torch.tensor([4, -1, 0, 9]), "bf16")
    want = torch.full((5, d_qk + 8), -3.0, dtype=torch.bfloat16)
    want[4, :d_qk], want[0, :d_qk] = rows[0].bfloat16(), rows[2].bfloat16()
    assert torch.equal(pool.view(torch.int16), want.view(torch.int16))


def test_addresses_past_2_to_the_31() -> None:
    """Page 2 starts 4.3 GB after page 0: a 32-bit product would land in front of it (B23, B25). Memory stays untouched
    but for the pages used."""
    stride = (1 << 31) + 656 * 2
    try:
        flat = torch.empty(2 * stride + 1312, dtype=torch.uint8)
    except RuntimeError:
        pytest.skip("This machine does not lend 4.3 GB of address space.")
    cache = flat.as_strided((3, 2, 1, 656), (stride, 656, 656, 1))
    rows = _rows(2, "v32")
    write(rows, cache, torch.tensor([5, 2]), "v32")
    want = np.zeros(4 * 656, np.uint8)
    write_by_hand(want, rows, [3, 0], "v32", "flashmla", 2, 1312)
    np.testing.assert_array_equal(cache[2, 1, 0].numpy(), want[3 * 656 :])
    np.testing.assert_array_equal(cache[1, 0, 0].numpy(), want[:656])
