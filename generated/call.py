"""A validated call: what every launcher receives, with no question left open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .layouts import KvLayout

LN2 = 0.6931471805599453


@dataclass(frozen=True)
class CacheView:
    """One KV cache and the indices into it.

    kv: uint8 (paged) or bf16 (flat) storage whose element 0 is slot 0. `page_stride`: bytes from page to page for paged
    layouts, elements from row to row for flat ones. `slots`: number of addressable slots (pages * page). indices: int32, last
    dim contiguous, `topk` wide; strides in elements. `lengths`: int32, one per batch row of `length_rows` tokens, or None.
    """

    kv: torch.Tensor
    page: int  # tokens per page; 1 for flat rows
    page_stride: int
    slots: int
    indices: torch.Tensor
    topk: int
    index_stride_b: int
    index_stride_s: int
    lengths: torch.Tensor | None


class Memo:
    """What look-up and launch keep of a call for the next one of the same form (`validate.build_call` says what a form is);
    each fills in its own part and says itself when that still holds."""

    __slots__ = ("device_class", "kernels", "serving", "shape", "table")

    def __init__(self) -> None:
        self.shape: Any = None  # launch.call_shape
        self.table: Any = None  # lookup.serving_of: the answer, and for which table and device class it was given
        self.device_class: str | None = None
        self.serving: Any = None
        self.kernels: Any = None  # launch.Kernels


MAX_SPAN = 1 << 35
"""Bytes from a paged cache's first row to its last from which on no Gluon family serves it."""

MAX_OUTPUT_SPAN = 1 << 35
"""Numbers from an output's first row to its last from which on no Gluon family writes it."""


@dataclass(frozen=True)
class AttentionCall:
    """Everything a kernel needs. Token t is (batch t // s_q, position t % s_q); all strides in elements.

    q [b, s_q, heads, d_qk] bf16; out [b, s_q, heads, 512] bf16; lse and max_logits fp32 [b, s_q, heads] or None (not wanted).
    lse = (natural log-sum-exp) * lse_scale: 1 for base e, 1/ln 2 for base 2; rows without a valid key get `empty_lse`.
    """

    layout: KvLayout
    tokens: int
    s_q: int
    heads: int
    q: torch.Tensor
    q_strides: tuple[int, int, int]  # batch, position, head
    main: CacheView
    extra: CacheView | None
    attn_sink: torch.Tensor | None
    sm_scale: float
    out: torch.Tensor
    out_strides: tuple[int, int, int]
    lse: torch.Tensor | None
    lse_strides: tuple[int, int, int]
    max_logits: torch.Tensor | None
    max_logits_strides: tuple[int, int, int]
    lse_scale: float = 1.0
    empty_lse: float = float("-inf")
    fp16: bool = False  # the caller states that every group scale lies in families.FP16_SCALES
    memo: Memo | None = field(default=None, init=False, repr=False, compare=False)  # `replace` does not carry it over

    @property
    def aligned(self) -> bool:
        """Whether a Gluon family can serve the call: rows can be copied 16 bytes at a time (multiples of 16 elements, which
        is what Triton looks at), of paged caches that span less than 32 GiB (units of 16 bytes in 31 bits) to an output that
        spans less than 64 GiB (units of 16 elements), and `sm_scale` is positive, so that the largest product is the largest
        logit."""
        caches = (self.main,) if self.extra is None else (self.main, self.extra)
        pointers = self.q.data_ptr() | self.out.data_ptr()
        strides = 0
        for stride in (*self.q_strides, *self.out_strides):
            strides |= stride
        sizes = (self.out.shape[0], self.tokens // max(1, self.out.shape[0]), self.heads)
        near = (
            sum(max(0, size - 1) * stride for size, stride in zip(sizes, self.out_strides, strict=True))
            < MAX_OUTPUT_SPAN
        )
        for cache in caches:
            pointers |= cache.kv.data_ptr()
            strides |= cache.page_stride
            near &= not self.layout.paged or cache.kv.shape[0] * cache.page_stride < MAX_SPAN
        return self.sm_scale > 0 and near and not (pointers % 16 or strides % 16)
