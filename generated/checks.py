"""The checks of single arguments: a sentence for each thing to change. They read shapes, dtypes and strides only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .layouts import D_V, DUAL_LAYOUTS, KvLayout, find_layout
from .wording import bytes_hint, dtype_word, layout_refusal, width_refusal

MAX_HEADS = 128
FP8_CACHE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
"""One byte per element; only the bytes count, so the three are the same cache."""

MAX_PAGE_BYTES = 1 << 31
"""Pages must be smaller: kernels count offsets inside a page in 32 bits."""

Strides = tuple[int, int]


def axes(tensor: torch.Tensor, inner: int, batch: int, s_q: int) -> Strides | None:
    """(batch, position) strides of the axes before the last `inner` ones, or None when no two strides reach them.

    Leading axes: [T], [batch, s_q], or two of which one has size 1. The stride of an axis of size 1 does not matter and
    repeats the other one, because Triton compiles once per divisibility of a stride.
    """
    lead, strides = tensor.shape[:-inner], tensor.stride()
    if len(lead) == 1:
        return (s_q * strides[0], strides[0])
    x, y = lead
    if y == 1:
        return (s_q * strides[0], strides[0])
    if x == 1:
        return (s_q * strides[1], strides[1])
    if (x, y) == (batch, s_q):
        return (strides[0], strides[1])
    if strides[0] == y * strides[1] or x * y == 0:  # collapses to one token axis
        return (s_q * strides[1], strides[1])
    return None


def token_axes(
    q: torch.Tensor,
    indices: torch.Tensor,
    lengths: Sequence[tuple[str, torch.Tensor | None]],
    reasons: list[str],
) -> tuple[int, int]:
    """(batch, s_q) such that lengths have one entry per batch row. Checks the lengths on the way."""
    tokens = math.prod(q.shape[:-2])
    batch, s_q = tokens, 1
    if q.ndim == 4:
        batch, s_q = q.shape[:2]
    elif indices.ndim == 3 and indices.shape[0] * indices.shape[1] == tokens and indices.shape[0] > 1:
        batch, s_q = indices.shape[:2]
    sizes = []
    for name, length in lengths:
        if length is None:
            continue
        if length.dtype != torch.int32:
            reasons.append(f"{name} is {dtype_word(length)}: pass int32.")
        if length.ndim != 1 or length.shape[0] not in (batch, tokens):
            want = f"[{tokens}]" if batch == tokens else f"[{batch}] (one per batch row) or [{tokens}] (one per token)"
            reasons.append(f"{name} has shape {list(length.shape)}: pass {want}.")
            continue
        if length.shape[0] > 1 and length.stride(0) != 1:
            reasons.append(f"{name} has stride {length.stride(0)}: make it contiguous.")
        sizes.append(length.shape[0])
    if tokens == 0:
        return 0, 1
    if len(set(sizes)) == 2:
        reasons.append(
            "topk_length and extra_topk_length must both have one entry per batch row or both one per token."
        )
    if tokens in sizes:
        batch, s_q = tokens, 1  # per token: each token is a batch row of its own
        if axes(q, 2, batch, s_q) is None:
            reasons.append("Lengths per token need q with one token stride: stride(0) == s_q * stride(1).")
    return batch, s_q


def check_scalars(sm_scale: float, lse_base: str, reasons: list[str]) -> None:
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (float, int)):
        reasons.append(
            f"sm_scale is a {type(sm_scale).__name__}: pass a Python float (a tensor would need a synchronisation)."
        )
    elif not _finite(sm_scale):
        reasons.append(f"sm_scale is {sm_scale}: pass a finite number.")
    if lse_base not in ("e", "2"):
        reasons.append(f'lse_base is {lse_base!r}: pass "e" (natural logarithm) or "2".')


def _finite(number: float) -> bool:
    """Whether a Python number is finite as a float (an int may be too large to be one)."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def check_scale_range(scale_range: object, reasons: list[str]) -> None:
    """A promise about group scales: None, or two finite numbers 0 <= low <= high."""
    if scale_range is None:
        return
    numbers = scale_range if isinstance(scale_range, (tuple, list)) and len(scale_range) == 2 else ()
    if not numbers or not all(isinstance(n, (int, float)) and _finite(n) for n in numbers):
        reasons.append(f"scale_range is {scale_range!r}: pass None, or two finite Python numbers (low, high).")
    elif not 0 <= numbers[0] <= numbers[1]:
        reasons.append(f"scale_range is {scale_range!r}: pass (low, high) with 0 <= low <= high.")


def check_layout(word: str, q: torch.Tensor, dual: bool, reasons: list[str]) -> KvLayout | None:
    d_qk = q.shape[-1] if q.ndim else 0
    layout = find_layout(word, d_qk)
    if layout is None:
        reasons.append(layout_refusal(word) or width_refusal(word, d_qk))
        return None
    if dual and layout.name not in DUAL_LAYOUTS:
        reasons.append(
            f"Layout {word} has no second cache: drop extra_kv and extra_indices, or use {', '.join(DUAL_LAYOUTS)}."
        )
    return layout


def check_q(q: torch.Tensor, reasons: list[str]) -> bool:
    """False when the rank leaves nothing else to check against."""
    if q.dtype != torch.bfloat16:
        reasons.append(f"q is {dtype_word(q)}: pass bfloat16.")
    if q.ndim not in (3, 4):
        reasons.append(f"q has shape {list(q.shape)}: pass [T, heads, d_qk] or [b, s_q, heads, d_qk].")
        return False
    if not 1 <= q.shape[-2] <= MAX_HEADS:
        reasons.append(f"q has {q.shape[-2]} heads: 1 to {MAX_HEADS} are served.")
    if q.stride(-1) != 1:
        reasons.append(f"q has stride {q.stride(-1)} in its last dimension: make that dimension contiguous (stride 1).")
    return True


def check_cache(name: str, kv: torch.Tensor, layout: KvLayout, reasons: list[str]) -> None:
    (check_paged if layout.paged else check_flat)(name, kv, layout, reasons)


def check_flat(name: str, kv: torch.Tensor, layout: KvLayout, reasons: list[str]) -> None:
    """bf16 rows: [slots, d_qk] or [slots, 1, d_qk], row stride at least d_qk."""
    d = layout.d_qk
    if kv.dtype != torch.bfloat16:
        reasons.append(
            f"{name} is {dtype_word(kv)}: layout bf16 takes bfloat16 (name the layout of an fp8 cache in kv_layout)."
        )
    if kv.ndim not in (2, 3) or kv.shape[-1] != d:
        hint = f"; view a paged bf16 cache as rows: kv.view(-1, {d})" if kv.ndim == 4 else ""
        reasons.append(f"{name} has shape {list(kv.shape)}: layout bf16 takes [slots, {d}] or [slots, 1, {d}]{hint}.")
        return
    if kv.ndim == 3 and kv.shape[1] != 1:
        reasons.append(f"{name} has h_kv = {kv.shape[1]}: sparse MLA has one KV head; pass [slots, 1, {d}].")
    if kv.stride(-1) != 1:
        reasons.append(
            f"{name} has stride {kv.stride(-1)} in its last dimension: make that dimension contiguous (stride 1)."
        )
    if kv.shape[0] > 1 and kv.stride(0) < d:
        reasons.append(
            f"{name} has a row stride of {kv.stride(0)} elements, so rows of {d} overlap: no expanded caches."
        )


def check_paged(name: str, kv: torch.Tensor, layout: KvLayout, reasons: list[str]) -> None:
    """Bytes: [pages, page, 1, token_bytes] or [pages, page, token_bytes]; any page stride that keeps pages apart."""
    size, word = layout.token_bytes, layout.kv_layout
    if kv.dtype not in FP8_CACHE_DTYPES:
        reasons.append(f"{name} is {dtype_word(kv)}: layout {word} takes uint8, int8 or float8_e4m3fn.")
    if kv.ndim not in (3, 4):
        reasons.append(
            f"{name} has shape {list(kv.shape)}: layout {word} takes [pages, page, 1, {size}] or [pages, page, {size}]."
        )
        return
    if kv.shape[-1] != size:
        reasons.append(
            f"{name} has {kv.shape[-1]} bytes per token: layout {word} has {size}{bytes_hint(kv.shape[-1])}."
        )
        return
    pages, page = kv.shape[:2]
    if kv.ndim == 4 and kv.shape[2] != 1:
        hint = f"; for [pages, 1, page, {size}] (HND) pass {name}.transpose(1, 2)" if page == 1 else ""
        reasons.append(
            f"{name} has h_kv = {kv.shape[2]}: sparse MLA has one KV head; pass [pages, page, 1, {size}]{hint}."
        )
        return
    if page < 1:
        reasons.append(f"{name} has pages of 0 tokens: pass at least 1 token per page.")
        return
    if page * size >= MAX_PAGE_BYTES:
        reasons.append(f"{name} has pages of {page * size} bytes: pass it as smaller pages, each of less than 2 GiB.")
        return
    if kv.stride(-1) != 1:
        reasons.append(
            f"{name} has stride {kv.stride(-1)} in its last dimension: make that dimension contiguous (stride 1)."
        )
    if page > 1 and kv.stride(1) != size:
        reasons.append(
            f"{name} has stride {kv.stride(1)} from token to token: layout {word} needs stride(1) == {size}."
        )
    stride = kv.stride(0)
    if pages > 1 and stride < page * size:
        reasons.append(
            f"{name} has a page stride of {stride} bytes, so pages of {page * size} overlap: no expanded caches."
        )
    align = 4 if layout.scale == "fp32" else 2 if layout.rope_dims else 1
    if align > 1 and (kv.data_ptr() % align or (pages > 1 and stride % align)):
        reasons.append(
            f"{name} is not aligned: layout {word} needs start and page stride to be multiples of {align} bytes."
        )


def check_indices(name: str, indices: torch.Tensor, q: torch.Tensor, batch: int, s_q: int, reasons: list[str]) -> None:
    if indices.dtype != torch.int32:
        reasons.append(f"{name} is {dtype_word(indices)}: pass int32.")
    lead = tuple(indices.shape[:-1])
    tokens = math.prod(q.shape[:-2])
    if lead not in ((tokens,), (tokens, 1), (1, tokens), (batch, s_q), tuple(q.shape[:-2])):
        shape = " or [b, s_q, topk] = [{}, {}, topk]".format(*q.shape[:2]) if q.ndim == 4 else ""
        reasons.append(f"{name} has shape {list(indices.shape)}: pass [{tokens}, topk] or [{tokens}, 1, topk]{shape}.")
        return
    if indices.shape[-1] < 1:
        reasons.append(f"{name} is 0 wide: pass a topk of at least 1 (-1 marks an index as invalid).")
        return
    if indices.shape[-1] > 1 and indices.stride(-1) != 1:
        reasons.append(
            f"{name} has stride {indices.stride(-1)} in its last dimension: make that dimension contiguous (stride 1)."
        )
    if axes(indices, 1, batch, s_q) is None:
        reasons.append(f"Lengths per token need {name} with one token stride: stride(0) == s_q * stride(1).")


def check_sink(sink: torch.Tensor | None, heads: int, reasons: list[str]) -> None:
    if sink is None:
        return
    if sink.dtype != torch.float32:
        reasons.append(f"attn_sink is {dtype_word(sink)}: pass float32.")
    if sink.ndim != 1 or sink.shape[0] != heads:
        reasons.append(f"attn_sink has shape {list(sink.shape)}: pass [{heads}], one per head.")
    elif heads > 1 and sink.stride(0) != 1:
        reasons.append(f"attn_sink has stride {sink.stride(0)}: make it contiguous.")


def check_out(
    out: torch.Tensor,
    q: torch.Tensor,
    batch: int,
    s_q: int,
    caches: Sequence[torch.Tensor | None],
    reasons: list[str],
) -> None:
    if out.dtype != torch.bfloat16:
        reasons.append(f"out is {dtype_word(out)}: pass bfloat16.")
    if out.shape != (*q.shape[:-1], D_V):
        reasons.append(f"out has shape {list(out.shape)}: pass {[*q.shape[:-1], D_V]} (d_v is {D_V}).")
        return
    if out.stride(-1) != 1:
        reasons.append(
            f"out has stride {out.stride(-1)} in its last dimension: make that dimension contiguous (stride 1)."
        )
    elif _self_overlaps(out):
        reasons.append(
            f"out has strides {list(out.stride())}, so its rows overlap: pass a tensor without expanded dimensions."
        )
    elif any(same_memory(out, other) for other in (q, *caches)):
        reasons.append("out overlaps an input: pass an output of its own (the kernels read inputs while they write).")
    if axes(out, 2, batch, s_q) is None:
        reasons.append("Lengths per token need out with one token stride: stride(0) == s_q * stride(1).")


def check_lse(lse: torch.Tensor, q: torch.Tensor, batch: int, s_q: int, reasons: list[str]) -> None:
    if lse.dtype != torch.float32:
        reasons.append(f"lse is {dtype_word(lse)}: pass float32.")
    if lse.shape != q.shape[:-1]:
        reasons.append(f"lse has shape {list(lse.shape)}: pass {list(q.shape[:-1])}.")
        return
    if _self_overlaps(lse):
        reasons.append(
            f"lse has strides {list(lse.stride())}, so its rows overlap: pass a tensor without expanded dimensions."
        )
    if axes(lse, 1, batch, s_q) is None:
        reasons.append("Lengths per token need lse with one token stride: stride(0) == s_q * stride(1).")


def _self_overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share an address: from the innermost axis out, a stride must clear what lies inside."""
    if tensor.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def same_memory(out: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether both surely share memory. Cheap, so two interleaved views of one buffer are taken for separate."""
    if other is None or out.numel() == 0 or other.numel() == 0:
        return False
    a, b = out.data_ptr(), other.data_ptr()
    if a == b:
        return out.device.type != "meta"
    if not (out.is_contiguous() and other.is_contiguous()):
        return False
    return a < b + other.numel() * other.element_size() and b < a + out.numel() * out.element_size()
