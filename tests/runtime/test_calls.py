"""Every accepted form of the arguments, and the exact call that it becomes (B26: strides go through as they are)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kgen.runtime.call import AttentionCall
from kgen.runtime.layouts import LAYOUTS
from kgen.runtime.table import Shape
from kgen.runtime.validate import build_call, shape_of

from .samples import arguments, dual, paged

BF16, I32, F32 = torch.bfloat16, torch.int32, torch.float32


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def call(given: dict[str, Any], **more: Any) -> AttentionCall:
    return build_call(**given, **more)


def same_place(address: int, tensor: torch.Tensor, *at: int) -> bool:
    return address == tensor[at].data_ptr()


def test_plain_call_of_three_dimensions() -> None:
    given = arguments("v4")
    made = call(given)
    assert (made.layout, made.tokens, made.s_q, made.heads) == (LAYOUTS["v4"], 5, 1, 8)
    assert made.q is given["q"] and made.q_strides == (8 * 512, 8 * 512, 512)
    assert made.out.shape == (5, 8, 512) and made.out.dtype == BF16 and made.out_strides == (4096, 4096, 512)
    assert made.lse is None and made.lse_strides == (8, 8, 1)
    assert made.max_logits is None and made.max_logits_strides == (8, 8, 1)
    assert made.extra is None and made.attn_sink is None
    assert (made.sm_scale, made.lse_scale, made.empty_lse) == (0.1, 1.0, -math.inf)
    main = made.main
    assert main.kv is given["kv"] and main.indices is given["indices"] and main.lengths is None
    assert (main.page, main.page_stride, main.slots, main.topk) == (4, 4 * 584, 12, 6)
    assert (main.index_stride_b, main.index_stride_s) == (6, 6)


@pytest.mark.parametrize("layout", ["v32", "v4", "v41_footer", "v41_inline"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rank", [3, 4])
def test_paged_caches_become_bytes(layout: str, dtype: torch.dtype, rank: int) -> None:
    kv = paged(layout, dtype=dtype)
    made = call(arguments(layout, kv=kv if rank == 4 else kv.squeeze(2)))
    assert made.main.kv.dtype == torch.uint8 and made.main.kv.data_ptr() == kv.data_ptr()
    assert made.layout.name == layout and made.main.slots == 12


@pytest.mark.parametrize("page", [1, 2, 53, 61, 64, 69, 256, 576])
def test_page_stride_is_carried_through(page: int) -> None:
    """V4 pages as writers allocate them (rounded up to 576), each a slice of a pool that other layers share."""
    stride = 3 * LAYOUTS["v4"].page_bytes(page)
    pool = torch.zeros(2 * stride, dtype=torch.uint8)
    made = call(arguments(kv=pool.as_strided((2, page, 1, 584), (stride, 584, 584, 1))))
    assert (made.main.page, made.main.page_stride, made.main.slots) == (page, stride, 2 * page)


def test_page_stride_beyond_32_bits() -> None:
    strides = (2**40, 584, 584, 1)
    huge = torch.empty_strided(
        (2, 4, 1, 584), strides, dtype=torch.uint8, device="meta"
    )  # of two pages: one has no stride
    given = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in arguments(kv=huge).items()}
    assert call(given).main.page_stride == 2**40


def test_odd_v4_pages_without_padding_are_only_8_byte_aligned() -> None:
    made = call(arguments(kv=paged("v4", page=53)))
    assert made.main.page_stride == 53 * 584 and made.main.page_stride % 16 == 8


@pytest.mark.parametrize("shape", [(12, 576), (12, 1, 576)])
def test_flat_rows(shape: tuple[int, ...]) -> None:
    made = call(arguments("bf16_576", kv=zeros(*shape)))
    assert (made.layout.name, made.main.page, made.main.page_stride, made.main.slots) == ("bf16_d576", 1, 576, 12)
    assert call(arguments("bf16", kv=zeros(12, 512))).layout.name == "bf16_d512"


def test_flat_rows_may_be_far_apart() -> None:
    assert call(arguments("bf16", kv=zeros(12, 640)[:, :512])).main.page_stride == 640


def test_no_tokens_and_no_slots() -> None:
    made = call(arguments(tokens=0), return_lse=True)
    assert (made.tokens, made.s_q, made.out.shape) == (0, 1, (0, 8, 512))
    assert call(arguments(kv=paged("v4", pages=0))).main.slots == 0
    assert call(arguments("bf16", kv=zeros(0, 512))).main.slots == 0
    four = arguments(q=zeros(2, 0, 8, 512), indices=zeros(2, 0, 6, dtype=I32), topk_length=zeros(2, dtype=I32))
    assert (call(four).tokens, call(four).s_q) == (0, 1)


def test_four_dimensions_keep_batch_and_position() -> None:
    q, indices = zeros(2, 4, 9, 512)[:, :3, :8], zeros(2, 3, 16, dtype=I32)[..., :6]
    lengths = zeros(2, dtype=I32)
    made = call(arguments(q=q, indices=indices, topk_length=lengths), return_lse=True)
    assert (made.tokens, made.s_q) == (6, 3)
    assert made.q_strides == (4 * 9 * 512, 9 * 512, 512)
    assert (made.main.index_stride_b, made.main.index_stride_s) == (48, 16)
    assert made.main.lengths is lengths
    assert made.out.shape == (2, 3, 8, 512) and made.out_strides == (3 * 4096, 4096, 512)
    assert made.lse is not None and made.lse.shape == (2, 3, 8) and made.lse_strides == (24, 8, 1)


def test_lengths_per_token_make_every_token_a_batch_row() -> None:
    lengths = zeros(6, dtype=I32)
    given = arguments(q=zeros(2, 3, 8, 512), indices=zeros(2, 3, 6, dtype=I32), topk_length=lengths)
    made = call(given)
    assert (made.tokens, made.s_q) == (6, 1) and made.main.lengths is lengths
    assert made.q_strides == (4096, 4096, 512) and made.out_strides == (4096, 4096, 512)
    assert made.out.shape == (2, 3, 8, 512)
    assert made.main.index_stride_b == 6


def test_batch_of_one() -> None:
    """vLLM's mixed batch: q [1, T, h, d], one row of lengths or one per token."""
    q, indices = zeros(1, 5, 8, 512), zeros(1, 5, 6, dtype=I32)
    assert call(arguments(q=q, indices=indices, topk_length=zeros(5, dtype=I32))).s_q == 1
    made = call(arguments(q=q, indices=indices, topk_length=zeros(1, dtype=I32)))
    assert made.s_q == 5 and made.q_strides == (5 * 4096, 4096, 512)


INDEX_FORMS = [
    ((5, 8, 512), (5, 6), 1, (6, 6)),
    ((5, 8, 512), (5, 1, 6), 1, (6, 6)),
    ((6, 8, 512), (2, 3, 6), 3, (18, 6)),
    ((2, 3, 8, 512), (2, 3, 6), 3, (18, 6)),
    ((2, 3, 8, 512), (6, 6), 3, (18, 6)),
    ((2, 3, 8, 512), (6, 1, 6), 3, (18, 6)),
    ((5, 1, 8, 512), (5, 1, 6), 1, (6, 6)),
    ((5, 8, 512), (1, 5, 6), 1, (6, 6)),
]


@pytest.mark.parametrize(("q_shape", "index_shape", "s_q", "strides"), INDEX_FORMS)
def test_index_forms_address_the_same_rows(
    q_shape: tuple[int, ...], index_shape: tuple[int, ...], s_q: int, strides: tuple[int, int]
) -> None:
    indices = torch.arange(math.prod(index_shape), dtype=I32).view(index_shape)
    made = call(arguments(q=zeros(*q_shape), indices=indices))
    assert (made.s_q, (made.main.index_stride_b, made.main.index_stride_s)) == (s_q, strides)
    for token in range(made.tokens):  # the address that a kernel forms for token t, read back
        at = token // s_q * made.main.index_stride_b + token % s_q * made.main.index_stride_s
        assert indices.flatten()[at] == token * 6


def test_rows_may_be_shared_by_expanding() -> None:
    made = call(arguments(q=zeros(1, 8, 512).expand(5, 8, 512), indices=zeros(1, 6, dtype=I32).expand(5, 6)))
    assert made.q_strides == (0, 0, 512) and made.main.index_stride_b == 0


def test_two_caches() -> None:
    given = dual()
    made = call(given)
    assert made.extra is not None and made.extra.kv is given["extra_kv"]
    assert (made.extra.page, made.extra.page_stride, made.extra.slots, made.extra.topk) == (2, 1168, 4, 3)
    assert (made.extra.index_stride_b, made.extra.lengths) == (3, given["extra_topk_length"])
    assert made.main.page == 4 and made.main.lengths is None


def test_outputs_given() -> None:
    out, lse = zeros(5, 16, 512)[:, ::2], zeros(8, 5, dtype=F32).t()
    made = call(arguments(out=out, lse=lse))
    assert made.out is out and made.out_strides == (16 * 512, 16 * 512, 1024)
    assert made.lse is lse and made.lse_strides == (1, 1, 5)


def test_lse_convention() -> None:
    assert call(arguments(lse_base="2")).lse_scale == pytest.approx(1.4426950408889634, abs=1e-15)
    assert call(arguments(), empty_lse=math.inf).empty_lse == math.inf
    both = call(arguments(), return_lse=True, return_max_logits=True)
    assert both.lse is not None and both.max_logits is not None
    assert both.max_logits.shape == (5, 8) and both.max_logits.dtype == F32


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 1, 2**31 - 1])
def test_length_values_are_never_read(length: int) -> None:
    """B37, B39: 0 and negative lengths are a kernel's business; the host passes the tensor on."""
    lengths = torch.full((5,), length, dtype=I32)
    assert call(arguments(topk_length=lengths)).main.lengths is lengths


def test_contents_are_not_needed() -> None:
    """On the meta device there are none: validation neither reads nor synchronises."""
    given = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in dual().items()}
    assert call(given, return_lse=True, return_max_logits=True).out.device.type == "meta"


def test_shape_of_a_call() -> None:
    given = {k: v for k, v in dual().items() if k not in ("sm_scale", "extra_topk_length")}
    assert shape_of(**given) == Shape("v4", 8, 6, 4, 5, 3, 2)
    assert shape_of(zeros(2, 3, 8, 576), zeros(9, 576), zeros(6, 7, dtype=I32), "bf16") == Shape(
        "bf16_d576", 8, 7, 0, 6
    )
