"""`gather_kernel` against values made by hand: every code, odd scales (B30), rows that are not there, strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kgen.check.reference import decode_slots

from .kernels import D_QK, gather
from .writer import FORMATS, new_cache, page_bytes

LAYOUTS = tuple(FORMATS)


def _noise(layout: str, page: int, pages: int, stride: int, seed: int = 0) -> torch.Tensor:
    """A cache whose codes are random and finite and whose scales are near 1."""
    cache, flat = new_cache(layout, page, pages, stride)
    _, dims, group, step, *_ = FORMATS[layout]
    generator = np.random.default_rng(seed)
    flat[:] = generator.integers(0, 0x7F, flat.size)
    for slot in range(page * pages):
        start, token = slot // page * stride, slot % page
        count = dims // group
        if layout == "v32":
            at = start + token * step + 512
            flat[at : at + 16] = np.frombuffer(generator.uniform(0.1, 3, 4).astype("<f4").tobytes(), np.uint8)
        else:
            inline = layout == "v41_inline"
            at = start + (token * step + 512 if inline else page * step + token * (8 if layout == "v4" else 16))
            flat[at : at + count] = generator.integers(120, 134, count)
    return cache


@pytest.mark.parametrize("page", [1, 3, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_agrees_with_the_reference_decoder(layout: str, page: int) -> None:
    cache = _noise(layout, page, 3, page_bytes(layout, page) + 16 * 3)
    indices = torch.tensor([3 * page - 1, 0, page - 1, page, 2 * page, 0, page], dtype=torch.int32)
    want = decode_slots(cache, layout, indices.long()).float().bfloat16()
    assert torch.equal(gather(cache, indices, layout), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code(layout: str) -> None:
    """All 256 codes at scale 1, from a list of e4m3 values made here; 0x7F and 0xFF are NaN, -0 keeps its sign."""
    dims, step = FORMATS[layout][1], FORMATS[layout][3]
    cache, flat = new_cache(layout, 1, 1, page_bytes(layout, 1), fill=0)
    flat[:dims] = np.resize(np.arange(256, dtype=np.uint8), dims)
    if layout == "v32":
        flat[512:528] = np.frombuffer(np.ones(4, "<f4").tobytes(), np.uint8)
    else:
        at = 512 if layout == "v41_inline" else step
        flat[at : at + 16 if layout != "v4" else at + 7] = 127
    magnitude = [c * 2.0**-9 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(127)] + [
        float("nan")
    ]
    want = torch.tensor(magnitude + [-m for m in magnitude])
    want = want.repeat(2)[:dims]
    got = gather(cache, torch.tensor([0]), layout)[0, :dims].float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got[[0, 128]]), torch.tensor([False, True]))


def test_fp32_scales_are_used_as_they_are() -> None:
    """0.3, 1.7, FLT_MIN-like and a large one, none a power of two (B30)."""
    cache, flat = new_cache("v32", 1, 1, 656, fill=0)
    scales = np.array([0.3, 1.7, 1.3e-38, 5.5e30], "<f4")
    flat[:512] = 0x3C  # 1.5
    flat[512:528] = np.frombuffer(scales.tobytes(), np.uint8)
    want = torch.from_numpy(scales.astype(np.float64) * 1.5).float().bfloat16().repeat_interleave(128)
    assert torch.equal(gather(cache, torch.tensor([0]), "v32")[0, :512], want)


@pytest.mark.parametrize("layout", ["v4", "v41_footer", "v41_inline"])
def test_ue8m0_at_its_ends(layout: str) -> None:
    """Bytes 0 (2^-127, not zero), 1, 127, 254 and 255 (NaN, even where the codes are zero)."""
    dims, group, step = FORMATS[layout][1:4]
    cache, flat = new_cache(layout, 1, 1, page_bytes(layout, 1), fill=0)
    flat[:dims] = 0x38  # 1.0
    flat[5 * group : 6 * group] = 0
    at = 512 if layout == "v41_inline" else step
    flat[at : at + 6] = [0, 1, 127, 254, 255, 255]
    row = gather(cache, torch.tensor([0]), layout)[0].double()
    got = [row[g * group : (g + 1) * group].unique().tolist() for g in range(4)]
    assert got == [[2.0**-127], [2.0**-126], [1.0], [2.0**127]]
    assert row[4 * group : 6 * group].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_are_not_there_are_zero(layout: str, dtype: torch.dtype) -> None:
    """Every byte of the cache is NaN: a row that is loaded, or multiplied by zero, shows."""
    cache, _ = new_cache(layout, 2, 3, page_bytes(layout, 2), fill=0xFF)
    indices = torch.tensor([-1, 6, -(2**31), 2**31 - 1, 1919810, -123456], dtype=dtype)
    got = gather(cache, indices, layout)
    assert torch.equal(got.view(torch.int16), torch.zeros(6, D_QK[layout], dtype=torch.int16))
    assert gather(cache, torch.tensor([5], dtype=dtype), layout).isnan().all()


@pytest.mark.parametrize("n", [1, 3, 4, 5])
@pytest.mark.parametrize(
    ("word", "d_qk"), [("bf16", 576), ("bf16", 512), ("v32", 576), ("v4", 512), ("v41_inline", 512)]
)
def test_out_may_have_a_row_stride(word: str, d_qk: int, n: int) -> None:
    if word == "bf16":
        cache = torch.randn(9, d_qk + 16, generator=torch.Generator().manual_seed(2)).bfloat16()[:, :d_qk]
    else:
        cache = _noise(word, 3, 3, page_bytes(word, 3))
    indices = torch.tensor([8, -1, 4, 0, 8][:n])
    pool = torch.full((n + 1, d_qk + 40), 9.0, dtype=torch.bfloat16)
    out = pool[:n, :d_qk]
    assert gather(cache, indices, word, d_qk, out) is out
    assert (pool[n] == 9.0).all() and (pool[:, d_qk:] == 9.0).all()
    assert torch.equal(out, gather(cache, indices, word, d_qk))
    if word == "bf16":
        assert torch.equal(out, torch.where(indices[:, None] >= 0, cache[indices.clamp_min(0)], 0.0))


def test_shape_of_indices_is_kept() -> None:
    cache = _noise("v32", 2, 2, 1312)
    indices = torch.tensor([[0, 3, -1], [2, 2, 1]], dtype=torch.int32)
    got = gather(cache, indices, "v32")
    assert got.shape == (2, 3, 576)
    assert torch.equal(got.view(6, 576), gather(cache, indices.flatten(), "v32"))
    assert torch.equal(got, gather(cache, indices.t().contiguous().t(), "v32"))
    assert gather(cache, indices[:0], "v32").shape == (0, 3, 576)
