"""From the caller's tensors to an `AttentionCall`, or to sentences that say why not.

Host work only: nothing here reads a tensor's contents, copies, synchronises or launches. The contract of every argument
stands in `dispatch.sparse_mla`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .call import LN2, MAX_OUTPUT_SPAN, MAX_SPAN, AttentionCall, CacheView
from .checks import (
    Strides,
    axes,
    check_cache,
    check_indices,
    check_layout,
    check_lse,
    check_out,
    check_q,
    check_scalars,
    check_scale_range,
    check_sink,
    same_memory,
    token_axes,
)
from .families import FP16_SCALES
from .forms import form_key, known_call, remember
from .layouts import D_V, KvLayout, find_layout
from .table import Shape


class Unsupported(ValueError):
    """A call that no kernel here serves. `reasons` holds one sentence for each thing to change."""

    def __init__(self, reasons: Sequence[str]):
        self.reasons = list(reasons)
        super().__init__("\n".join(["sparse_mla cannot serve this call:", *(f"- {reason}" for reason in self.reasons)]))


class _Form(NamedTuple):
    """How the token axis is read: token t is (batch t // s_q, position t % s_q)."""

    batch: int
    s_q: int
    layout: KvLayout


def refusals(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    kv_layout: str,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    lse_base: str = "e",
    scale_range: tuple[float, float] | None = None,
) -> list[str]:
    """Every reason why the arguments do not make a call, one sentence each; empty when they do."""
    return _examine(
        q, kv, indices, sm_scale, kv_layout, topk_length, attn_sink,
        extra_kv, extra_indices, extra_topk_length, out, lse, lse_base, scale_range,
    )[0]  # fmt: skip


def build_call(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    kv_layout: str,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    lse_base: str = "e",
    empty_lse: float = -math.inf,
    scale_range: tuple[float, float] | None = None,
) -> AttentionCall:
    """The validated call; outputs that were not passed in are allocated (contiguous, in q's leading shape).

    `lse` is written when it is passed or asked for; a row without a valid key gets `empty_lse`. Raises `Unsupported`.

    Calls of one form (`forms.form_key`) are examined once: what is said about one holds for all of them, except that an output
    may overlap an input, which is asked again.
    """
    key = form_key(
        q, kv, indices, sm_scale, kv_layout, topk_length, attn_sink, extra_kv, extra_indices, extra_topk_length, out, lse,
        return_lse, return_max_logits, lse_base, empty_lse, scale_range,
    )  # fmt: skip
    known = known_call(key)
    if known is not None and (out is None or not any(same_memory(out, other) for other in (q, kv, extra_kv))):
        return known.call(
            q, kv, indices, sm_scale, topk_length, attn_sink, extra_kv, extra_indices, extra_topk_length, out, lse
        )
    call = _examined_call(
        q, kv, indices, sm_scale, kv_layout, topk_length, attn_sink, extra_kv, extra_indices, extra_topk_length, out, lse,
        return_lse, return_max_logits, lse_base, empty_lse, scale_range,
    )  # fmt: skip
    remember(key, call, own_out=out is None, own_lse=lse is None)
    return call


def _examined_call(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    kv_layout: str,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_kv: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    return_max_logits: bool,
    lse_base: str,
    empty_lse: float,
    scale_range: tuple[float, float] | None,
) -> AttentionCall:
    """`build_call` for a form that was not seen before."""
    reasons, form = _examine(
        q, kv, indices, sm_scale, kv_layout, topk_length, attn_sink,
        extra_kv, extra_indices, extra_topk_length, out, lse, lse_base, scale_range,
    )  # fmt: skip
    if reasons or form is None:
        raise Unsupported(reasons)
    batch, s_q, layout = form
    rows, heads = q.shape[:-1], q.shape[-2]
    if out is None:
        out = q.new_empty((*rows, D_V))
    if lse is None and return_lse:
        lse = q.new_empty(rows, dtype=torch.float32)
    top = q.new_empty(rows, dtype=torch.float32) if return_max_logits else None
    extra = None
    if extra_kv is not None and extra_indices is not None:
        extra = _view(extra_kv, extra_indices, extra_topk_length, form)
    return AttentionCall(
        layout=layout,
        tokens=math.prod(q.shape[:-2]),
        s_q=s_q,
        heads=heads,
        q=q,
        q_strides=_row_strides(q, form),
        main=_view(kv, indices, topk_length, form),
        extra=extra,
        attn_sink=attn_sink,
        sm_scale=float(sm_scale),
        out=out,
        out_strides=_row_strides(out, form),
        lse=lse,
        lse_strides=_lse_strides(lse, form, heads),
        max_logits=top,
        max_logits_strides=_lse_strides(top, form, heads),
        lse_scale=1.0 if lse_base == "e" else 1.0 / LN2,
        empty_lse=empty_lse,
        fp16=layout.fp8 and fits_fp16(scale_range),
    )


def fits_fp16(scale_range: tuple[float, float] | None) -> bool:
    """Whether a stated range of group scales allows kernels that keep scaled latents in fp16 (`families.FP16_SCALES`)."""
    return scale_range is not None and FP16_SCALES[0] <= scale_range[0] and scale_range[1] <= FP16_SCALES[1]


def shape_of(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    kv_layout: str,
    extra_kv: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    scale_range: tuple[float, float] | None = None,
    out: torch.Tensor | None = None,
    sm_scale: float = 1.0,
) -> Shape:
    """The look-up's key of arguments that `refusals` has nothing against; allocates nothing."""
    layout = find_layout(kv_layout, q.shape[-1])
    if layout is None:
        raise Unsupported(refusals(q, kv, indices, sm_scale=1.0, kv_layout=kv_layout))
    return Shape(
        layout=layout.name,
        heads=q.shape[-2],
        topk=indices.shape[-1],
        page=kv.shape[1] if layout.paged else 0,
        tokens=math.prod(q.shape[:-2]),
        extra_topk=0 if extra_indices is None else extra_indices.shape[-1],
        extra_page=0 if extra_kv is None else extra_kv.shape[1],
        fp16=layout.fp8 and fits_fp16(scale_range),
        aligned=sm_scale > 0
        and all(map(_copies_whole, (q, out, kv, extra_kv)))
        and _near(out, math.prod(q.shape[:-1])),
    )


def _near(out: torch.Tensor | None, rows: int) -> bool:
    """Whether an output spans what `AttentionCall.aligned` asks for; one yet to be made has its rows side by side."""
    if out is None:
        return (rows - 1) * 512 < MAX_OUTPUT_SPAN
    return (
        sum((size - 1) * stride for size, stride in zip(out.shape[:-1], out.stride(), strict=False)) < MAX_OUTPUT_SPAN
    )


def _copies_whole(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor's pointer and strides are what `AttentionCall.aligned` asks for (an output yet to be made is)."""
    if tensor is None:
        return True
    outer = 1 if tensor.element_size() == 1 else tensor.dim() - 1  # of a paged cache only the way from page to page
    strides = [stride for stride, size in zip(tensor.stride()[:outer], tensor.shape, strict=False) if size > 1]
    if tensor.element_size() == 1 and strides and tensor.shape[0] * strides[0] >= MAX_SPAN:
        return False
    return not any(number % 16 for number in (tensor.data_ptr(), *strides))


def _view(kv: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None, form: _Form) -> CacheView:
    paged = form.layout.paged
    page = kv.shape[1] if paged else 1
    stride_b, stride_s = _token_strides(indices, 1, form)
    return CacheView(
        kv=kv if not paged or kv.dtype == torch.uint8 else kv.view(torch.uint8),
        page=page,
        page_stride=kv.stride(0) if kv.shape[0] > 1 else _only_page_stride(form.layout, page),
        slots=kv.shape[0] * page,
        indices=indices,
        topk=indices.shape[-1],
        index_stride_b=stride_b,
        index_stride_s=stride_s,
        lengths=lengths,
    )


# The stride of an axis of size 1 is never used, and a tensor may have any there: the kernels get the one of a contiguous
# tensor, so that an odd one neither keeps a call from the families that copy 16 bytes at a time nor needs another kernel.


def _only_page_stride(layout: KvLayout, page: int) -> int:
    """The page stride of a cache of one page (row stride of one row), a multiple of 16 in any case."""
    return -(-layout.page_bytes(page) // 16) * 16 if layout.paged else layout.d_qk


def _row_strides(tensor: torch.Tensor, form: _Form) -> tuple[int, int, int]:
    """(batch, position, head) strides of q or out."""
    heads, width = tensor.shape[-2:]
    return (*_token_strides(tensor, 2, form), tensor.stride(-2) if heads > 1 else width)


def _lse_strides(lse: torch.Tensor | None, form: _Form, heads: int) -> tuple[int, int, int]:
    """Of an absent tensor: as if it were contiguous, so that asking for it does not need another compiled kernel."""
    if lse is None:
        return (form.s_q * heads, heads, 1)
    return (*_token_strides(lse, 1, form), lse.stride(-1) if heads > 1 else 1)


def _token_strides(tensor: torch.Tensor, inner: int, form: _Form) -> Strides:
    """(batch, position) strides of the axes before the last `inner` ones."""
    if math.prod(tensor.shape[:-inner]) == 1:
        row = math.prod(tensor.shape[-inner:])
        return row, row
    strides = axes(tensor, inner, form.batch, form.s_q)
    assert strides is not None, "checked by _examine"
    return strides


def _examine(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    kv_layout: str,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_kv: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    lse_base: str,
    scale_range: tuple[float, float] | None,
) -> tuple[list[str], _Form | None]:
    """All reasons, and the form of the call when there is none."""
    tensors = {"q": q, "kv": kv, "indices": indices}
    for name, tensor in (
        ("topk_length", topk_length), ("attn_sink", attn_sink), ("extra_kv", extra_kv),
        ("extra_indices", extra_indices), ("extra_topk_length", extra_topk_length), ("out", out), ("lse", lse),
    ):  # fmt: skip
        if tensor is not None:
            tensors[name] = tensor
    reasons = [
        f"{n} is a {type(t).__name__}: pass a torch.Tensor."
        for n, t in tensors.items()
        if not isinstance(t, torch.Tensor)
    ]
    if reasons:
        return reasons, None
    device = q.device
    for name, tensor in tensors.items():
        if tensor.device != device:
            reasons.append(f"{name} is on {tensor.device} and q on {device}: put every tensor on one device.")
    check_scalars(sm_scale, lse_base, reasons)
    check_scale_range(scale_range, reasons)
    if (extra_kv is None) != (extra_indices is None):
        given, missing = ("extra_kv", "extra_indices") if extra_indices is None else ("extra_indices", "extra_kv")
        reasons.append(f"{given} is given without {missing}: a second cache needs both.")
    elif extra_topk_length is not None and extra_kv is None:
        reasons.append("extra_topk_length is given without extra_kv and extra_indices: a second cache needs both.")
    layout = check_layout(kv_layout, q, extra_kv is not None or extra_indices is not None, reasons)
    if layout is not None:
        check_cache("kv", kv, layout, reasons)
        if extra_kv is not None:
            check_cache("extra_kv", extra_kv, layout, reasons)
    if not check_q(q, reasons):
        return reasons, None
    lengths = (("topk_length", topk_length), ("extra_topk_length", extra_topk_length))
    batch, s_q = token_axes(q, indices, lengths, reasons)
    check_indices("indices", indices, q, batch, s_q, reasons)
    if extra_indices is not None:
        check_indices("extra_indices", extra_indices, q, batch, s_q, reasons)
    check_sink(attn_sink, q.shape[-2], reasons)
    if out is not None:
        check_out(out, q, batch, s_q, (kv, extra_kv), reasons)
    if lse is not None:
        check_lse(lse, q, batch, s_q, reasons)
    return reasons, None if reasons or layout is None else _Form(batch, s_q, layout)
