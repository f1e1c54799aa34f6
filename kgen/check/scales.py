"""Which group scales a cache holds, read from its bytes: what a caller may state as `scale_range`."""

from __future__ import annotations

import torch
from torch import Tensor

from kgen.runtime.layouts import find_layout

from .inputs import Inputs


def _place(layout: str, page: int) -> tuple[int, int, int]:
    """(first byte of a page's scales, bytes from token to token, bytes per token), written out from the spec once more."""
    places = {
        "v32": (512, 656, 16), "v4": (page * 576, 8, 7), "v41_footer": (page * 512, 16, 16), "v41_inline": (512, 528, 16)
    }  # fmt: skip
    return places[layout]


def scale_range(kv: Tensor, layout: str, slots: Tensor | None = None) -> tuple[float, float] | None:
    """(least, largest) group scale of a paged cache [pages, page, 1, bytes], or of `slots` of it (int64); None when one of
    them is NaN or there is none."""
    page = kv.shape[1]
    offset, step, width = _place(layout, page)
    shape, strides = (kv.shape[0], page, width), (kv.stride(0), step, 1)
    raw = kv.view(torch.uint8).as_strided(shape, strides, kv.storage_offset() + offset)
    if slots is not None:
        raw = raw[slots // page, slots % page]
    if raw.numel() == 0:
        return None
    if layout == "v32":
        low, high = (float(x) for x in raw.contiguous().view(torch.float32).aminmax())
        return None if low != low or high != high else (low, high)
    least, largest = (int(x) for x in raw.aminmax())
    return None if largest == 255 else (2.0 ** (least - 127), 2.0 ** (largest - 127))  # UE8M0: 255 is NaN


def selected_range(inputs: Inputs) -> tuple[float, float] | None:
    """The range over the rows that a call selects, of both caches; None when a scale is NaN, or no row is selected."""
    layout = find_layout(inputs.kv_layout, inputs.d_qk)
    if layout is None or not layout.fp8:
        return None
    sides = [(inputs.kv, inputs.indices, inputs.topk_length)]
    if inputs.extra_kv is not None and inputs.extra_indices is not None:
        sides.append((inputs.extra_kv, inputs.extra_indices, inputs.extra_topk_length))
    found = []
    for kv, indices, lengths in sides:
        slots = _selected(kv, indices, lengths, inputs.tokens)
        if slots.numel():
            here = scale_range(kv, layout.name, slots)
            if here is None:
                return None
            found.append(here)
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def _selected(kv: Tensor, indices: Tensor, lengths: Tensor | None, tokens: int) -> Tensor:
    flat = indices.reshape(tokens, indices.shape[-1]).long()
    valid = (flat >= 0) & (flat < kv.shape[0] * kv.shape[1])
    if lengths is not None and lengths.numel():
        limit = lengths.clamp(0, flat.shape[1]).repeat_interleave(tokens // lengths.numel())
        valid &= torch.arange(flat.shape[1], device=flat.device)[None, :] < limit[:, None]
    return flat[valid]
