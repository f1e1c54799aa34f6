"""Writers of KV caches: float rows in, the bytes that engines store out.

Written from spec.md section 1, not from kgen.runtime.layouts, so that a wrong offset there is seen. Every region is an
`as_strided` view over one buffer of bytes, which leaves page strides, guards and pads free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScaleRule = Literal["flashmla", "vllm", "sglang", "arbitrary"]

POISON = 0xFF
"""A byte that is NaN in every reading: e4m3 0xFF, bf16 0xFFFF, fp32 0xFFFFFFFF and UE8M0 255."""

FLT_MIN = 1.1754943508222875e-38
E4M3_MAX = 448.0


@dataclass(frozen=True)
class _Format:
    d_qk: int
    latent: int
    group: int
    pow2_bytes: bool  # UE8M0 scales; else fp32
    record: int  # bytes from token to token inside the page's data part
    logical: int  # last dim of the tensor as engines shape it
    align: int  # what the writers round a page up to


_FORMATS = {
    "v32": _Format(576, 512, 128, False, 656, 656, 1),
    "v4": _Format(512, 448, 64, True, 576, 584, 576),
    "v41_footer": _Format(512, 512, 32, True, 512, 528, 512),
    "v41_inline": _Format(512, 512, 32, True, 528, 528, 528),
}
PAGED_LAYOUTS = tuple(_FORMATS)


def page_bytes(layout: str, page: int) -> int:
    """Bytes that the engines' writers allocate for a page of `page` tokens (spec 1.1 to 1.3)."""
    form = _FORMATS[layout]
    return -(-page * form.logical // form.align) * form.align


def encode_e4m3(x: Tensor) -> Tensor:
    """Float tensor -> uint8 e4m3fn codes, round to nearest even, saturating at +-448; NaN gives 0x7F."""
    # torch's cast does not saturate: what rounds above 448 becomes NaN, which is what a writer must not store
    codes = x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, 0x7F), codes)


def _ceil_log2(x: Tensor) -> Tensor:
    """ceil(log2(x)) of positive finite x, exact (log2 in floating point is off by one near powers of two)."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def group_scales(amax: Tensor, layout: str, rule: ScaleRule) -> Tensor:
    """Float64 scales from the largest magnitude of each group, by the rule of one writer (tables of spec 1.1 and 1.2).

    flashmla: 2^ceil(log2(max(amax/448, 1e-4))). vllm: the same on V32 (after PR 49435); on UE8M0 layouts the floor 1e-4
    is on amax. sglang: floor 1e-8 on amax; on V32 plain amax/448. arbitrary: max(amax/448, FLT_MIN) in fp32, V32 only.
    A group with a NaN or infinity gets a NaN scale.
    """
    if rule == "arbitrary" and layout != "v32":
        raise ValueError(f"scale rule arbitrary needs fp32 scales, which {layout} does not store; use flashmla or vllm")
    amax = amax.double()
    broken = ~amax.isfinite()
    amax = amax.masked_fill(broken, 1.0)
    if layout == "v32" and rule in ("arbitrary", "sglang"):
        scale = (amax.float() / E4M3_MAX).double()
        if rule == "arbitrary":
            scale = scale.clamp_min(FLT_MIN)
    else:
        ratio = amax / E4M3_MAX
        if rule == "flashmla" or layout == "v32":
            ratio = ratio.clamp_min(1e-4)
        else:
            ratio = amax.clamp_min(1e-4 if rule == "vllm" else 1e-8) / E4M3_MAX
        exponent = _ceil_log2(ratio).clamp(-127, 127).long()
        scale = ((exponent + 1023) << 52).view(torch.float64)  # from its bits: exp2 need not be exact on every device
    return scale.masked_fill(broken, float("nan"))


def pack_flat(
    rows: Tensor, *, row_gap: int = 0, guard_rows: int = 0, used: Tensor | None = None, poison: bool = False
) -> Tensor:
    """[slots, d] float -> bf16 view [slots, d] with stride(0) = d + row_gap, inside a larger buffer.

    With `poison`, unused slots (`used` False), row gaps and `guard_rows` rows on both sides hold NaN or inf.
    """
    slots, d = rows.shape
    width = d + row_gap
    buffer = torch.zeros(slots + 2 * guard_rows, width, dtype=torch.bfloat16, device=rows.device)
    if poison:
        buffer.fill_(float("nan"))
        buffer[::2] = float("inf")
    view = buffer[guard_rows : guard_rows + slots, :d]
    if used is None:
        view.copy_(rows)
    else:
        view.copy_(torch.where(used[:, None], rows.to(torch.bfloat16), view))
    return view


def pack_paged(
    rows: Tensor,
    layout: str,
    page: int,
    *,
    scale_rule: ScaleRule = "flashmla",
    page_stride: int | None = None,
    guard_bytes: int = 0,
    used: Tensor | None = None,
    poison: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """[slots, d_qk] float rows -> uint8 cache [pages, page, 1, token_bytes] with strides (page_stride, token_bytes, …).

    slots is rounded up to whole pages. page_stride: bytes, at least page * token_bytes; default `page_bytes`. used:
    bool [slots]; unused slots keep the fill. poison: every byte that no used token owns (unused slots, V4's pad
    byte, tail pads, `guard_bytes` on both sides) is 0xFF, else 0. scales: [slots, groups] float64, overrides the rule.
    """
    form = _FORMATS[layout]
    slots = rows.shape[0]
    pages = -(-slots // page)
    stride = page_bytes(layout, page) if page_stride is None else page_stride
    if stride < page * form.logical:
        raise ValueError(
            f"page_stride {stride} is below the {page * form.logical} bytes of a {layout} page of {page} tokens"
        )
    cache = empty_cache(layout, page, pages, stride, guard_bytes, POISON if poison else 0, rows.device)
    write_rows(cache, layout, rows, scale_rule=scale_rule, used=used, scales=scales)
    return cache


def empty_cache(
    layout: str, page: int, pages: int, stride: int, guard_bytes: int, fill: int, device: torch.device | str
) -> Tensor:
    """A cache of `pages` pages in which every byte, guards included, is `fill`; shape and strides as `pack_paged`."""
    logical = _FORMATS[layout].logical
    size = 2 * guard_bytes + pages * stride
    buffer = torch.full((max(size, 1),), fill, dtype=torch.uint8, device=device)
    return buffer.as_strided((pages, page, 1, logical), (stride, logical, logical, 1), guard_bytes)


def write_rows(
    cache: Tensor,
    layout: str,
    rows: Tensor,
    *,
    first_page: int = 0,
    scale_rule: ScaleRule = "flashmla",
    used: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Quantise `rows` [n, d_qk] into the slots of `cache` from page `first_page` on; other bytes stay as they are."""
    form = _FORMATS[layout]
    page, count = cache.shape[1], rows.shape[0]
    slot = torch.arange(count, device=rows.device)
    if used is not None:
        slot = slot[used]
        rows = rows[used]
        scales = None if scales is None else scales[used]
    groups = rows[:, : form.latent].reshape(rows.shape[0], form.latent // form.group, form.group)
    if scales is None:
        scales = group_scales(groups.abs().amax(dim=2), layout, scale_rule)
    scaled = groups.double() / scales[:, :, None]
    scaled = torch.where(scales[:, :, None] == 0, torch.zeros_like(scaled), scaled)  # a zero group of the sglang rule
    latent, scale_view, rope = _regions(cache, layout)
    where = (first_page + slot // page, slot % page)
    latent[where] = encode_e4m3(scaled).flatten(1)
    scale_view[where] = _scale_bytes(scales, form.pow2_bytes)
    if rope is not None:
        rope[where] = rows[:, form.latent :].to(torch.bfloat16).contiguous().view(torch.uint8)


def _scale_bytes(scales: Tensor, pow2_bytes: bool) -> Tensor:
    if not pow2_bytes:
        return scales.float().contiguous().view(torch.uint8)
    _, exponent = torch.frexp(scales.nan_to_num(1.0))
    biased = (exponent - 1 + 127).clamp(0, 254)
    return torch.where(scales.isnan(), torch.full_like(biased, 255), biased).to(torch.uint8)


def _regions(cache: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """(latent [pages, page, dims], scales [pages, page, bytes], rope [pages, page, 128] or None) as uint8 views."""
    pages, page = cache.shape[:2]
    stride, base = cache.stride(0), cache.storage_offset()

    def view(offset: int, step: int, width: int) -> Tensor:
        return cache.as_strided((pages, page, width), (stride, step, 1), base + offset)

    if layout == "v32":
        return view(0, 656, 512), view(512, 656, 16), view(528, 656, 128)
    if layout == "v4":
        return view(0, 576, 448), view(page * 576, 8, 7), view(448, 576, 128)
    if layout == "v41_footer":
        return view(0, 512, 512), view(page * 512, 16, 16), None
    return view(0, 528, 512), view(512, 528, 16), None
