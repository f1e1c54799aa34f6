"""Sparse-MLA attention over the bf16_d512 KV cache: family "portable", plain Triton, emitted for sm120.

out[t, h] = sum_j exp(x_j) v_j / (sum_j exp(x_j) + exp(sink[h])),  x_j = sm_scale * <q[t, h], k_j>,  v_j = k_j[:512]
over the slots j that `indices` selects for token t, from one cache or from two under the same softmax.

One program serves one token and BLOCK_H heads: it gathers BLOCK_K rows at a time, uses each row for scores and for
values, and keeps a running maximum. With SPLIT the keys of a token are shared out over grid axis 1 and `combine.py`
merges the parts.

Validity of a key: its position is below clamp(length, 0, topk) and 0 <= index < slots. An index is clamped before an
address is formed, and a row that is not valid is never loaded: its bytes may be anything.
"""

import triton
import triton.language as tl

FAMILY = "portable"
LAYOUT = 'bf16_d512'
ARCH = 'sm120'
TEMPLATE_HASH = '07323bda6d0dcddd'
TRITON_RANGE = ('3.4', '4.0')

D_V = tl.constexpr(512)
ROW_BYTES = tl.constexpr(1024)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that a leading block without a valid key leaves no inf - inf


@triton.jit
def mma(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:  # Triton's interpreter multiplies the bits of bf16 operands; fp32 operands give the same products
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def cast(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 -> DTYPE, to nearest even. Triton's interpreter truncates to bf16: there the rounding is done on bits."""
    if UPCAST and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def dot_qk(q, k, s, SWAP_AB: tl.constexpr, UPCAST: tl.constexpr):
    if SWAP_AB:
        return mma(k, tl.trans(q), s, UPCAST)
    else:
        return mma(q, tl.trans(k), s, UPCAST)


@triton.jit
def dot_pv(p, v, acc, SWAP_AB: tl.constexpr, UPCAST: tl.constexpr):
    if SWAP_AB:
        return mma(tl.trans(v), p, acc, UPCAST)
    else:
        return mma(p, v, acc, UPCAST)


@triton.jit
def by_head(x, SWAP_AB: tl.constexpr):
    """A vector over heads, broadcast against scores or outputs."""
    if SWAP_AB:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def by_key(x, SWAP_AB: tl.constexpr):
    """A vector over keys, broadcast against scores."""
    if SWAP_AB:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def load_q(q_row, offs_h, stride_h, head_mask, D0: tl.constexpr, WIDTH: tl.constexpr):
    cols = D0 + tl.arange(0, WIDTH)
    return tl.load(q_row + (offs_h.to(tl.int64) * stride_h)[:, None] + cols[None, :], mask=head_mask[:, None], other=0.0)


@triton.jit
def store_rows(row, offs_h, stride_h, head_mask, x, D0: tl.constexpr, WIDTH: tl.constexpr,
               SWAP_AB: tl.constexpr, UPCAST: tl.constexpr):
    cols = D0 + tl.arange(0, WIDTH)
    if SWAP_AB:
        x = tl.trans(x)
    ptrs = row + (offs_h.to(tl.int64) * stride_h)[:, None] + cols[None, :]
    tl.store(ptrs, cast(x, row.dtype.element_ty, UPCAST), mask=head_mask[:, None])


@triton.jit
def load_chunk(row, valid, D0: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH bf16 dims of each row, from dim D0. Rows that are not valid read as zero, without a load."""
    cols = D0 + tl.arange(0, WIDTH)
    return tl.load(row[:, None] + cols[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def load_index(ids, extra_ids, tile, tiles_main, length, extra_length, DUAL: tl.constexpr, BLOCK_K: tl.constexpr):
    """Indices of one step; -1 beyond the length. The main cache's steps come first."""
    pos = tile * BLOCK_K
    bound = length
    if DUAL:
        in_extra = tile >= tiles_main
        pos = tl.where(in_extra, tile - tiles_main, tile) * BLOCK_K
        bound = tl.where(in_extra, extra_length, length)
        if in_extra:
            ids = extra_ids
    pos = pos + tl.arange(0, BLOCK_K)
    return tl.load(ids + pos, mask=pos < bound, other=-1)


@triton.jit(do_not_specialize=["n_heads", "s_q", "topk", "extra_topk", "slots", "extra_slots", "page", "extra_page",
                               "len_per", "has_len", "has_extra_len", "has_sink", "has_lse", "has_max"])
def attention_kernel(
    q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths, sink, out, lse, max_logits,
    part_out, part_lse, part_max,
    scale_log2, lse_scale, empty_lse,
    n_heads, s_q, topk, extra_topk, slots, extra_slots, page, extra_page,
    len_per, has_len, has_extra_len, has_sink, has_lse, has_max,
    page_stride, extra_page_stride,
    q_stride_b, q_stride_s, q_stride_h, idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s,
    out_stride_b, out_stride_s, out_stride_h,
    lse_stride_b, lse_stride_s, lse_stride_h, max_stride_b, max_stride_s, max_stride_h,
    BLOCK_H: tl.constexpr,  # heads per program (rows or columns of the MMA, see SWAP_AB)
    BLOCK_K: tl.constexpr,  # keys per step
    SWAP_AB: tl.constexpr,  # keys, not heads, on the M side of the MMA
    SCORE_SCALES: tl.constexpr,  # apply group scales to scores and probabilities instead of to K
    PREFETCH: tl.constexpr,  # load indices one step ahead
    DUAL: tl.constexpr,  # a second cache under the same softmax
    SPLIT: tl.constexpr,  # write normalised parts for combine.py
    HEADS: tl.constexpr,  # 0: n_heads, else the exact number
    TOPK: tl.constexpr,  # 0: topk, else the exact width; likewise the next three
    EXTRA_TOPK: tl.constexpr,
    PAGE: tl.constexpr,
    EXTRA_PAGE: tl.constexpr,
    UPCAST: tl.constexpr,  # only under the interpreter
):
    heads = HEADS if HEADS > 0 else n_heads
    width = TOPK if TOPK > 0 else topk
    head_blocks = tl.cdiv(heads, BLOCK_H)
    pid = tl.program_id(0)
    t = pid // head_blocks
    b = (t // s_q).to(tl.int64)
    s_pos = (t % s_q).to(tl.int64)
    offs_h = (pid % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = offs_h < heads

    # tiles of this program: the main cache's first, then the extra cache's, up to each length
    length = tl.load(lengths + t // len_per, mask=has_len != 0, other=width)
    length = tl.minimum(tl.maximum(length, 0), width)
    tiles_main = tl.cdiv(length, BLOCK_K)
    tiles = tiles_main
    extra_length = 0
    if DUAL:
        extra_width = EXTRA_TOPK if EXTRA_TOPK > 0 else extra_topk
        extra_length = tl.load(extra_lengths + t // len_per, mask=has_extra_len != 0, other=extra_width)
        extra_length = tl.minimum(tl.maximum(extra_length, 0), extra_width)
        tiles += tl.cdiv(extra_length, BLOCK_K)
    first = 0
    last = tiles
    part = 0
    if SPLIT:
        splits = tl.num_programs(1)
        split = tl.program_id(1)
        per_split = tl.cdiv(tiles, splits)
        first = split * per_split
        last = tl.minimum(first + per_split, tiles)
        part = (t.to(tl.int64) * splits + split) * heads
        if first >= last:  # no key for this split: the combine kernel reads nothing else of it
            tl.store(part_lse + part + offs_h, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=head_mask)
            return

    q_row = q + b * q_stride_b + s_pos * q_stride_s
    q0 = load_q(q_row, offs_h, q_stride_h, head_mask, 0, 256)
    q1 = load_q(q_row, offs_h, q_stride_h, head_mask, 256, 256)
    m = tl.full([BLOCK_H], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    acc0 = tl.zeros([256, BLOCK_H] if SWAP_AB else [BLOCK_H, 256], tl.float32)
    acc1 = tl.zeros([256, BLOCK_H] if SWAP_AB else [BLOCK_H, 256], tl.float32)
    idx_row = indices + b * idx_stride_b + s_pos * idx_stride_s
    extra_idx_row = idx_row
    if DUAL:
        extra_idx_row = extra_indices + b * extra_idx_stride_b + s_pos * extra_idx_stride_s

    index_ahead = load_index(idx_row, extra_idx_row, first, tiles_main, length, extra_length, DUAL, BLOCK_K)
    for tile in range(first, last):
        if PREFETCH:  # the next step's indices are on their way while this step's rows are used
            index = index_ahead
            index_ahead = load_index(idx_row, extra_idx_row, tile + 1, tiles_main, length, extra_length, DUAL, BLOCK_K)
        else:
            index = load_index(idx_row, extra_idx_row, tile, tiles_main, length, extra_length, DUAL, BLOCK_K)
        # which cache: scalar selects, so that both share one pipelined loop
        base = kv
        n_slots = slots
        rows_per_page = PAGE if PAGE > 0 else page
        in_extra = tile >= tiles_main
        if DUAL:
            extra_rows = EXTRA_PAGE if EXTRA_PAGE > 0 else extra_page
            n_slots = tl.where(in_extra, extra_slots, slots)
            if in_extra:
                base = extra_kv
        valid = (index >= 0) & (index < n_slots)
        index = tl.where(valid, index, 0)
        row = base + index.to(tl.int64) * page_stride

        s = tl.zeros([BLOCK_K, BLOCK_H] if SWAP_AB else [BLOCK_H, BLOCK_K], tl.float32)
        k0 = load_chunk(row, valid, 0, 256)
        s = dot_qk(q0, k0, s, SWAP_AB, UPCAST)
        k1 = load_chunk(row, valid, 256, 256)
        s = dot_qk(q1, k1, s, SWAP_AB, UPCAST)

        s = tl.where(by_key(valid, SWAP_AB), s * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0 if SWAP_AB else 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - by_head(m_new, SWAP_AB))
        l = l * alpha + tl.sum(p, 0 if SWAP_AB else 1)
        m = m_new
        pb = cast(p, tl.bfloat16, UPCAST)
        acc0 = dot_pv(pb, k0, acc0 * by_head(alpha, SWAP_AB), SWAP_AB, UPCAST)
        acc1 = dot_pv(pb, k1, acc1 * by_head(alpha, SWAP_AB), SWAP_AB, UPCAST)

    empty = l == 0.0
    lse2 = tl.where(empty, float("-inf"), m + tl.log2(l))
    # a NaN key leaves no trace in a maximum, but it does in the sum
    top = tl.where(l == l, tl.where(m == LOWEST, float("-inf"), m), float("nan"))
    if SPLIT:
        inv = tl.where(empty, 0.0, 1.0 / l)
        part_row = part_out + part * D_V
        store_rows(part_row, offs_h, D_V, head_mask, acc0 * by_head(inv, SWAP_AB), 0, 256, SWAP_AB, UPCAST)
        store_rows(part_row, offs_h, D_V, head_mask, acc1 * by_head(inv, SWAP_AB), 256, 256, SWAP_AB, UPCAST)
        tl.store(part_lse + part + offs_h, lse2, mask=head_mask)
        tl.store(part_max + part + offs_h, top, mask=head_mask & (has_max != 0))
    else:
        sink2 = tl.load(sink + offs_h, mask=head_mask & (has_sink != 0), other=float("-inf")) * LOG2E
        total = l + tl.exp2(sink2 - m)  # a sink far above every key makes it inf, and the output zero, as it should be
        inv = tl.where(empty, 0.0, 1.0 / total)
        out_row = out + b * out_stride_b + s_pos * out_stride_s
        store_rows(out_row, offs_h, out_stride_h, head_mask, acc0 * by_head(inv, SWAP_AB), 0, 256, SWAP_AB, UPCAST)
        store_rows(out_row, offs_h, out_stride_h, head_mask, acc1 * by_head(inv, SWAP_AB), 256, 256, SWAP_AB, UPCAST)
        lse_out = tl.where(empty, empty_lse, lse2 * (LN2 * lse_scale))
        lse_ptr = lse + b * lse_stride_b + s_pos * lse_stride_s + offs_h.to(tl.int64) * lse_stride_h
        tl.store(lse_ptr, lse_out, mask=head_mask & (has_lse != 0))
        max_ptr = max_logits + b * max_stride_b + s_pos * max_stride_s + offs_h.to(tl.int64) * max_stride_h
        tl.store(max_ptr, top * LN2, mask=head_mask & (has_max != 0))
