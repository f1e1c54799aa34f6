"""Arguments of `cache_ops`: caches as kernels address them, the writers' scale rules, sentences for what is refused.

Host work only: nothing here reads a tensor's contents, synchronises or launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import FP8_CACHE_DTYPES, MAX_PAGE_BYTES
from .layouts import KvLayout, find_layout
from .validate import Unsupported
from .wording import bytes_hint, dtype_word, layout_refusal

FLT_MIN = 1.1754943508222875e-38


class CacheOpError(Unsupported):
    """Arguments that no kernel here can serve. `reasons` holds one sentence for each thing to change."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)
        ValueError.__init__(self, " ".join(reasons))


@dataclass(frozen=True)
class ScaleRule:
    """scale = max(max(amax, amax_floor) / 448, scale_floor), rounded up to a power of two where `pow2`."""

    amax_floor: float
    scale_floor: float
    pow2: bool


_FLOOR_ON_SCALE = ScaleRule(0.0, 1e-4, True)

SCALE_RULES: dict[str, dict[str, ScaleRule]] = {
    "fp32": {
        "flashmla": _FLOOR_ON_SCALE,  # FlashMLA tests/quant.py
        "vllm": _FLOOR_ON_SCALE,  # vLLM after PR 49435; before it: "arbitrary"
        "sglang": ScaleRule(0.0, 0.0, False),  # an all-zero group: scale 0 and codes 0 here, 0 / 0 there
        "arbitrary": ScaleRule(0.0, FLT_MIN, False),  # vLLM cache_kernels.cu @00eb0c87, GLM
    },
    "ue8m0": {
        "flashmla": _FLOOR_ON_SCALE,  # FlashMLA tests/quant.py
        "vllm": ScaleRule(1e-4, 0.0, True),  # vLLM deepseek_v4 cache_utils.py: smaller scales below amax 0.027
        "sglang": ScaleRule(1e-8, 0.0, True),  # SGLang dsv4 quant_k_cache.py (its V4 writer; V4.1 by analogy)
    },
}
"""By how a layout stores scales, then by the writer whose bytes are wanted. Readers take any of them."""


@dataclass(frozen=True)
class Storage:
    """A cache as kernels address it: bytes and page stride in bytes, or bf16 rows and row stride in elements."""

    data: torch.Tensor
    page: int
    slots: int
    stride: int


def as_storage(layout: KvLayout, cache: torch.Tensor) -> Storage:
    return _paged_storage(layout, cache) if layout.paged else _flat_storage(layout, cache)


def _flat_storage(layout: KvLayout, cache: torch.Tensor) -> Storage:
    if cache.ndim == 3 and cache.shape[1] == 1:
        cache = cache.squeeze(1)
    if cache.dtype != torch.bfloat16 or cache.ndim != 2 or cache.shape[1] != layout.d_qk:
        raise CacheOpError(f"A bf16 cache must be bf16 [slots, {layout.d_qk}], not {cache.dtype} {list(cache.shape)}.")
    if cache.stride(1) != 1 or (cache.shape[0] > 1 and cache.stride(0) < layout.d_qk):
        raise CacheOpError(f"Rows of the cache must be contiguous and apart, not strided {cache.stride()}.")
    return Storage(cache, 1, cache.shape[0], cache.stride(0))


def _paged_storage(layout: KvLayout, cache: torch.Tensor) -> Storage:
    size = layout.token_bytes
    if cache.dtype not in FP8_CACHE_DTYPES:
        raise CacheOpError(f"A {layout.name} cache must be uint8, int8 or float8_e4m3fn, not {dtype_word(cache)}.")
    if cache.ndim == 4 and cache.shape[2] == 1:
        cache = cache.squeeze(2)
    if cache.ndim != 3 or cache.shape[2] != size or cache.shape[1] < 1:
        hint = bytes_hint(cache.shape[-1]) if cache.ndim and cache.shape[-1] != size else ""
        raise CacheOpError(f"A {layout.name} cache must be [pages, page, 1, {size}], not {list(cache.shape)}{hint}.")
    pages, page, _ = cache.shape
    if page * size >= MAX_PAGE_BYTES:
        raise CacheOpError(f"A page of {page * size} bytes is too large: pass the cache as pages of less than 2 GiB.")
    stride = cache.stride(0) if pages > 1 else layout.page_bytes(page)
    if cache.stride(2) != 1 or (page > 1 and cache.stride(1) != size) or stride < page * size:
        raise CacheOpError(
            f"A {layout.name} cache needs strides (at least {page * size}, {size}, 1) bytes over [pages, page, bytes], "
            f"not {cache.stride()}."
        )
    step = 4 if layout.scale == "fp32" else 2 if layout.rope_dims else 1
    if stride % step or cache.data_ptr() % step:
        raise CacheOpError(f"Address and page stride of a {layout.name} cache must be multiples of {step} bytes.")
    return Storage(cache.view(torch.uint8), page, pages * page, stride)


def layout_of_rows(kv_layout: str, rows: torch.Tensor) -> KvLayout:
    refusal = layout_refusal(kv_layout)
    if refusal is not None:
        raise CacheOpError(refusal)
    layout = find_layout(kv_layout, rows.shape[-1] if rows.ndim else 0)
    if layout is None:
        raise CacheOpError(f"kv_layout {kv_layout!r} has no rows of shape {list(rows.shape)}: check the last dim.")
    return layout


def layout_of_cache(kv_layout: str, cache: torch.Tensor) -> KvLayout:
    """The layout of a cache alone: paged words stand for one d_qk, bf16 shows it in its last dim."""
    found = next(
        (find_layout(kv_layout, d) for d in (512, 576) if kv_layout != "bf16" and find_layout(kv_layout, d)), None
    )
    return found or layout_of_rows(kv_layout, cache)


def scale_rule_of(layout: KvLayout, name: str) -> ScaleRule:
    if not layout.fp8:
        return _FLOOR_ON_SCALE
    rules = SCALE_RULES[layout.scale]
    if name not in rules:
        raise CacheOpError(
            f"No scale_rule {name!r} for {layout.name}, whose scales are {layout.scale}: use {', '.join(rules)}."
        )
    return rules[name]


def check_slots(name: str, slots: torch.Tensor) -> list[str]:
    if slots.dtype not in (torch.int32, torch.int64):
        return [f"{name} must be int32 or int64, not {slots.dtype}."]
    return []


def check_tables(
    indices: torch.Tensor, block_table: torch.Tensor, request_ids: torch.Tensor, counts: torch.Tensor | None
) -> list[str]:
    reasons = []
    if indices.dtype != torch.int32 or indices.ndim not in (2, 3):
        reasons.append(f"indices must be int32 [T, topk] or [b, s_q, topk], not {indices.dtype} {list(indices.shape)}.")
        return reasons
    tokens = indices.shape[:-1].numel()
    if block_table.dtype != torch.int32 or block_table.ndim != 2 or block_table.stride(1) != 1:
        reasons.append("block_table must be int32 [requests, columns] with a contiguous last dim.")
    elif block_table.numel() == 0:
        reasons.append(f"block_table is empty, {list(block_table.shape)}: it needs a request and a column.")
    for name, vector in (("request_ids", request_ids), ("counts", counts)):
        if vector is None:
            continue
        if vector.dtype != torch.int32 or vector.shape != (tokens,) or not vector.is_contiguous():
            reasons.append(f"{name} must be contiguous int32 [{tokens}], not {vector.dtype} {list(vector.shape)}.")
    return reasons


def row_view(name: str, x: torch.Tensor) -> torch.Tensor:
    """[T, topk] view with a contiguous last dim."""
    if x.shape[-1] and x.stride(-1) == 1:
        try:
            return x.view(-1, x.shape[-1])
        except RuntimeError:
            pass
    elif not x.shape[-1]:
        return x.new_empty(x.shape[:-1].numel(), 0)
    raise CacheOpError(f"{name} must have one row stride and a contiguous last dim, not strides {x.stride()}.")


def check_devices(**tensors: torch.Tensor | None) -> list[str]:
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(devices.values())) <= 1:
        return []
    return [f"All tensors must be on one device, not {', '.join(f'{k} on {v}' for k, v in devices.items())}."]
