"""Sparse-MLA attention over the v4 KV cache: family "sm90_ws_fp8", Gluon for Hopper, emitted for sm90.

out[t, h] = sum_j exp(x_j) v_j / (sum_j exp(x_j) + exp(sink[h])),  x_j = sm_scale * <q[t, h], k_j>,  v_j = k_j[:512]
over the slots j that `indices` selects for token t, from one cache or from two under the same softmax.

An item is 64 heads of one token and one split of its keys; a program works on one item, or walks over several
(PERSISTENT). It has three partitions of warps that meet at tiles of 64 keys, dequantised in a ring of two stages:

  softmax group (4 warps)   scores, online softmax, output columns 384..511; lse and maximum
  value group   (4 warps)   output columns 0..383
  producer      (NW warps)  copies Q, resolves indices to addresses, gathers fp8 rows, dequantises them into the ring

The score MMA of tile j + 1 is issued before the softmax group waits for its own value MMA of tile j, so that both warpgroups
keep the tensor cores busy while P of tile j is consumed. A tile belongs to one cache; the main cache's tiles come first.

  barrier    arrivals                              says
  full[st]   1 + one per producer thread           a tile is in stage st (its rope rows arrive by cp.async)
  empty[st]  both groups                           nobody reads stage st any more
  p_full[st] softmax group                         P and the rescale factors of the tile in stage st are written
  q_full     one per producer thread               Q of the item is there, as bf16 (by cp.async)
  inv_full[] softmax group                         1 / denominator of the item is written; one for items in turn

What each barrier leaves out follows from the ring: P and factors of a stage are overwritten only after that stage has been
refilled. Q of the next item is copied once P of an item's last tile is there, since that follows all its scores; the softmax
group turns it into fp16 where it lies. 1 / denominator is overwritten two items later: by then the stage of the older item's
last tile was refilled, which the value group releases after reading it. Both groups stage their output in the stage of the
item's last tile, in the columns that they alone read, and release it late. An item without keys takes part in no barrier.

Validity of a key: its position is below clamp(length, 0, topk) and 0 <= index < slots. A row that is not valid is never
read: its loads are masked, and its part of the tile is zero. Needs q, out and caches aligned to 16 bytes in every stride.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

FAMILY = "sm90_ws_fp8"
LAYOUT = 'v4'
ARCH = 'sm90'
TEMPLATE_HASH = '6591293dfef5cdbc'
TRITON_RANGE = ('3.6', '4.0')

D_V = gl.constexpr(512)
ROW_BYTES = gl.constexpr(576)
ROPE_WORD = gl.constexpr(112)
SCALE_STRIDE = gl.constexpr(8)  # bytes per token in the footer of a page
SCALE_WORDS = gl.constexpr(2)
GROUP_UNITS = gl.constexpr(4)  # 16-byte units of a row under one scale
SLOTS = gl.constexpr(4)  # tiles whose addresses are kept: the one in use, the next two, and one being released
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
SHARE = gl.constexpr(1)  # -log2 of the share of its row's sum so far at which a key moves the lazy maximum: see limit()
LOWEST = gl.constexpr(-3.4028234663852886e38)  # finite, so that a leading tile without a valid key leaves no inf - inf

# Names of the newer API where it has them (the older ones then are stubs that raise)
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_SMEM = gl.shared_memory_descriptor
reinterpret = _SMEM.reinterpret if hasattr(_SMEM, "reinterpret") else _SMEM._reinterpret


# ------------------------------------------------------------------------------------------------ PTX


@gluon.jit
def pack_half2(scale):
    """fp32 -> the same fp16 value twice."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [scale], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def dequantise_fp16(raw, scale2):
    """Four e4m3 times an fp16 pair -> two words of two fp16. One conversion per two values; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b; .reg .b32 c, d;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 c, a;
        cvt.rn.f16x2.e4m3x2 d, b;
        mul.rn.f16x2 $0, c, $3;
        mul.rn.f16x2 $1, d, $3;
        }""",
        "=r,=r,r,r", [raw, scale2], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )


@gluon.jit
def dequantise_bf16(raw, scale):
    """Four e4m3 times an fp32 scale -> two words of two bf16, rounded once."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, e, f, g, h; .reg .b32 c, d; .reg .f32 w, x, y, z;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 c, a;
        cvt.rn.f16x2.e4m3x2 d, b;
        mov.b32 {e, f}, c;
        mov.b32 {g, h}, d;
        cvt.f32.f16 w, e;
        cvt.f32.f16 x, f;
        cvt.f32.f16 y, g;
        cvt.f32.f16 z, h;
        mul.rn.f32 w, w, $3;
        mul.rn.f32 x, x, $3;
        mul.rn.f32 y, y, $3;
        mul.rn.f32 z, z, $3;
        cvt.rn.bf16x2.f32 $0, x, w;
        cvt.rn.bf16x2.f32 $1, z, y;
        }""",
        "=r,=r,r,f", [raw, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )


@gluon.jit
def prefetch_rows(rows, offset):
    """Fetch whole rows into L2, for offsets that are not negative."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ge.s64 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], 576;
        mov.b32 $0, 0;
        }""",
        "=r,l,l", [rows, offset], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def prefetch_q_rows(rows, exists):
    """Fetch whole rows of Q into L2, where `exists` is not zero."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], 1024;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [rows, exists], dtype=gl.int32, is_pure=False, pack=1,
    )


def _rescale_asm(n):
    """n registers times n factors (equal in pairs of rows), skipped by a warp whose factors are all 1."""
    body = " ".join("mul.f32 $%d, $%d, $%d;" % (i, i, 2 * n + i) for i in range(n))
    return (
        "{ .reg .pred p, q; setp.neu.f32 p, $%d, 0f3F800000; setp.neu.f32 q, $%d, 0f3F800000; or.pred p, p, q; "
        "vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni SKIP; %s SKIP: }" % (2 * n, 2 * n + 2, body)
    )


def _rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


RESCALE_32 = gl.constexpr(_rescale_asm(32))
RESCALE_32_C = gl.constexpr(_rescale_constraints(32))
RESCALE_64 = gl.constexpr(_rescale_asm(64))
RESCALE_64_C = gl.constexpr(_rescale_constraints(64))
RESCALE_128 = gl.constexpr(_rescale_asm(128))
RESCALE_128_C = gl.constexpr(_rescale_constraints(128))


@gluon.jit
def rescale_voted(acc, factor, COLS: gl.constexpr):
    """acc [64, COLS] times factor [64, 1]. Gluon has no branch per warp, so this is one: most tiles move no maximum."""
    f = gl.broadcast(factor, acc)[0]
    if COLS == 64:
        return gl.inline_asm_elementwise(RESCALE_32, RESCALE_32_C, [acc, f], dtype=gl.float32, is_pure=True, pack=32)
    elif COLS == 128:
        return gl.inline_asm_elementwise(RESCALE_64, RESCALE_64_C, [acc, f], dtype=gl.float32, is_pure=True, pack=64)
    else:
        return gl.inline_asm_elementwise(RESCALE_128, RESCALE_128_C, [acc, f], dtype=gl.float32, is_pure=True, pack=128)


@gluon.jit
def rescale(acc, factor, ACC: gl.constexpr, COLS: gl.constexpr, SLACK: gl.constexpr):
    f = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, ACC)), 1)
    if SLACK > 0:
        return rescale_voted(acc, f, COLS)
    else:
        return acc * f


@gluon.jit
def release_dependents():
    """Let the merge be launched now: it waits for all of this kernel by itself (griddepcontrol.wait) before it reads a part."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# ------------------------------------------------------------------------------------------------ work


@gluon.jit
def clamped_length(lengths, t, len_per, has_len, width):
    length = gl.load(lengths + t // len_per, mask=has_len != 0, other=width)
    return gl.minimum(gl.maximum(length, 0), width)


@gluon.jit
def plan(
    item, lengths, extra_lengths, len_per, has_len, has_extra_len, topk, extra_topk, head_blocks, splits,
    DUAL: gl.constexpr, SPLIT: gl.constexpr,
):
    """Token, split and head block of an item; its first tile and how many; where the main cache's tiles end; both lengths."""
    head_block = item % head_blocks
    rest = item // head_blocks
    split = 0
    t = rest
    if SPLIT:
        split = rest % splits
        t = rest // splits
    length = clamped_length(lengths, t, len_per, has_len, topk)
    tiles_main = (length + 63) // 64
    tiles = tiles_main
    extra_length = 0
    if DUAL:
        extra_length = clamped_length(extra_lengths, t, len_per, has_extra_len, extra_topk)
        tiles += (extra_length + 63) // 64
    first = 0
    last = tiles
    if SPLIT:
        per_split = (tiles + splits - 1) // splits
        first = split * per_split
        last = gl.minimum(first + per_split, tiles)
    count = gl.maximum(last - first, 0)
    return t, split, head_block, first, count, tiles_main, length, extra_length


# ------------------------------------------------------------------------------------------------ producer


@gluon.constexpr_function
def piece_bases(rows, units, warps):
    """Which row and unit each bit of register, lane and warp stands for. Four units and two rows differ within eight lanes, so
    that the two 16-byte chunks that a unit becomes are stored without bank conflicts into a tile with 128-byte swizzle."""
    row_bits = [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    unit_bits = [[0, 1 << i] for i in range(units.bit_length() - 1)]
    lanes = unit_bits[:2] + row_bits[:1] + unit_bits[2:]
    row_bits = row_bits[1:]
    while len(lanes) < 5:
        lanes.append(row_bits.pop(0) if row_bits else [0, 0])
    warp_bits = []
    while len(warp_bits) < warps.bit_length() - 1:
        warp_bits.append(row_bits.pop(0) if row_bits else [0, 0])
    return row_bits, lanes, warp_bits


@gluon.constexpr_function
def piece_layout(rows, units, warps, group):
    """[rows, scales, units of a scale, 4 words]: a lane holds a 16-byte unit (16 values)."""
    regs, lanes, warp_bits = piece_bases(rows, units, warps)
    wide = lambda bits: [[r, u // group, u % group, 0] for r, u in bits]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]] + wide(regs), wide(lanes), wide(warp_bits), [], [rows, units // group, group, 4]
    )


@gluon.constexpr_function
def scale_layout(rows, units, warps, group):
    """[rows, scales] beside a piece, each once per lane: a slice of the piece's layout would hold four copies."""
    regs, lanes, warp_bits = piece_bases(rows, units, warps)
    narrow = lambda bits: [[r, u // group] for r, u in bits]
    return gl.DistributedLinearLayout(narrow(regs), narrow(lanes), narrow(warp_bits), [], [rows, units // group])


@gluon.jit
def index_source(
    tile, last, indices, extra_indices, tiles_main, length, extra_length, DUAL: gl.constexpr, LAYOUT: gl.constexpr
):
    """Pointers to the indices of a tile, and which of them lie below the length. Tiles from `last` on have none."""
    pos = tile * 64
    bound = length
    row = indices
    if DUAL:
        in_extra = tile >= tiles_main
        pos = gl.where(in_extra, tile - tiles_main, tile) * 64
        bound = gl.where(in_extra, extra_length, length)
        if in_extra:
            row = extra_indices
    bound = gl.where(tile < last, bound, 0)
    at = pos + gl.arange(0, 64, LAYOUT)
    return row + at, at < bound


@gluon.jit
def resolve(
    raw, below, tile, tiles_main, kv, extra_kv, slots, extra_slots, page, extra_page, page_stride, extra_page_stride,
    offsets, scales, slot,
    DUAL: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, PREFETCH: gl.constexpr, NW: gl.constexpr,
    ADDRESS: gl.constexpr,
):
    """Where the rows of a tile lie, in words from the cache's start (-1: not valid), once per key, into `offsets`. The scales
    of the keys set out for `scales` (zero for a key that is not valid): as loads into registers, one per 16 bytes of a row,
    they would be as many instructions as the rows themselves."""
    rows_per_page = PAGE if PAGE > 0 else page
    n_slots = slots
    base = kv
    if DUAL:
        in_extra = tile >= tiles_main
        n_slots = gl.where(in_extra, extra_slots, slots)
        if in_extra:
            base = extra_kv
    valid = below & (raw >= 0) & (raw < n_slots)
    index = gl.where(valid, raw, 0)
    if DUAL:
        # dividing by each page size, not by a selected one, keeps a constant page a shift
        extra_rows = EXTRA_PAGE if EXTRA_PAGE > 0 else extra_page
        page_id = gl.where(in_extra, index // extra_rows, index // rows_per_page)
        rows = gl.where(in_extra, extra_rows, rows_per_page)
        stride = gl.where(in_extra, extra_page_stride, page_stride)
    else:
        page_id = index // rows_per_page
        rows = rows_per_page
        stride = page_stride
    in_page = index - page_id * rows
    page_row = page_id.to(gl.int64) * stride
    row = page_row + in_page * ROW_BYTES
    offset = gl.where(valid, row >> 2, -1)
    offsets.index(slot).store(offset)
    COPY: gl.constexpr = gl.BlockedLayout([1, SCALE_WORDS], [32, 1], [NW, 1], [1, 0])
    scale_at = gl.where(valid, (page_row + rows * ROW_BYTES + in_page * SCALE_STRIDE) >> 2, -1)
    at = gl.expand_dims(gl.multiple_of(gl.convert_layout(scale_at, gl.SliceLayout(1, COPY)), SCALE_WORDS), 1)
    at_word = at + gl.expand_dims(gl.arange(0, SCALE_WORDS, gl.SliceLayout(0, COPY)), 0)
    words = base.to(gl.pointer_type(gl.int32), bitcast=True)
    copy_async(scales.index(slot), words + at_word, mask=gl.broadcast(at >= 0, at_word)[0])
    if PREFETCH:
        prefetch_rows(base + row, offset)


@gluon.jit
def fetch_part(words, offset, UNIT0: gl.constexpr, UNITS: gl.constexpr, L: gl.constexpr):
    """UNITS 16-byte units of each row from unit UNIT0 on into registers; rows that are not valid read as zero, without a load."""
    G: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    U: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    W: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    group = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, UNITS // GROUP_UNITS, G), 0), 2), 3)
    unit = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP_UNITS, U), 0), 1), 3)
    word = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, W), 0), 1), 2)
    col = (UNIT0 + group * GROUP_UNITS + unit) * 4 + word
    row = gl.multiple_of(gl.convert_layout(offset, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))), 4)
    row = gl.expand_dims(gl.expand_dims(gl.expand_dims(row, 1), 2), 3)
    return gl.load(words + (row + col), mask=row >= 0, other=0, cache_modifier=".cg")


@gluon.jit
def convert_part(
    raw, scales, tile, Q: gl.constexpr, RP: gl.constexpr, UNIT0: gl.constexpr, UNITS: gl.constexpr, NW: gl.constexpr, FP16: gl.constexpr
):
    """Dequantise the fetched units into rows Q * RP .. of `tile`, a view of 32-bit words."""
    L: gl.constexpr = piece_layout(RP, UNITS, NW, GROUP_UNITS)
    S: gl.constexpr = scale_layout(RP, UNITS, NW, GROUP_UNITS)
    KEY: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, L))
    part = scales.slice(Q * RP, RP, dim=0)
    if UNIT0 > 0 or UNITS // GROUP_UNITS < scales.shape[1]:
        part = part.slice(UNIT0 // GROUP_UNITS, UNITS // GROUP_UNITS, dim=1)
    # 2^(byte - 127); byte 0 is the subnormal 2^-127 and 255 is NaN, which a plain shift gets wrong
    b = part.load(S).to(gl.int32)
    bits = gl.where(b == 0, 0x00400000, b << 23)
    factor = gl.where(b == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    if FP16:
        half = gl.convert_layout(pack_half2(factor), KEY)
        lo, hi = dequantise_fp16(raw, gl.expand_dims(gl.expand_dims(half, 2), 3))
    else:
        lo, hi = dequantise_bf16(raw, gl.expand_dims(gl.expand_dims(gl.convert_layout(factor, KEY), 2), 3))
    tile.slice(Q * RP, RP, dim=0).store(gl.join(lo, hi).reshape([RP, UNITS * 8]))


@gluon.jit
def fetch_piece(
    tile, tiles_main, kv, extra_kv, offsets, piece,
    DUAL: gl.constexpr, RP: gl.constexpr, NW: gl.constexpr,
):
    """RP rows of a tile into registers. `piece` names them in the ring of addresses."""
    base = kv
    if DUAL:
        if tile >= tiles_main:
            base = extra_kv
    words = base.to(gl.pointer_type(gl.int32), bitcast=True)
    L0: gl.constexpr = piece_layout(RP, 16, NW, GROUP_UNITS)
    R0: gl.constexpr = scale_layout(RP, 16, NW, GROUP_UNITS)
    o0 = offsets.index(piece).load(gl.SliceLayout(1, R0))
    L1: gl.constexpr = piece_layout(RP, 8, NW, GROUP_UNITS)
    R1: gl.constexpr = scale_layout(RP, 8, NW, GROUP_UNITS)
    o1 = offsets.index(piece).load(gl.SliceLayout(1, R1))
    L2: gl.constexpr = piece_layout(RP, 4, NW, GROUP_UNITS)
    R2: gl.constexpr = scale_layout(RP, 4, NW, GROUP_UNITS)
    o2 = offsets.index(piece).load(gl.SliceLayout(1, R2))
    x0 = fetch_part(words, o0, 0, 16, L0)
    x1 = fetch_part(words, o1, 16, 8, L1)
    x2 = fetch_part(words, o2, 24, 4, L2)
    return x0, x1, x2


@gluon.jit
def copy_rope(tile, tiles_main, kv, extra_kv, offsets, slot, rope, DUAL: gl.constexpr, NW: gl.constexpr):
    """The 64 bf16 dims of each row, straight into the tile: zero for rows that are not valid."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [NW, 1], [1, 0])
    base = kv
    if DUAL:
        if tile >= tiles_main:
            base = extra_kv
    words = base.to(gl.pointer_type(gl.int32), bitcast=True)
    row = gl.expand_dims(gl.multiple_of(offsets.index(slot).load(gl.SliceLayout(1, L)), 4), 1)
    col = gl.expand_dims(ROPE_WORD + gl.arange(0, 32, gl.SliceLayout(0, L)), 0)
    copy_async(rope, words + (row + col), mask=gl.broadcast(row >= 0, row + col)[0])


@gluon.jit
def producer(
    q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths,
    n_heads, s_q, topk, extra_topk, slots, extra_slots, page, extra_page, len_per, has_len, has_extra_len,
    page_stride, extra_page_stride, q_stride_b, q_stride_s, q_stride_h,
    idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s,
    head_blocks, splits, item_first, item_stop, item_step,
    ql, qr, qx, kl, kr, kx, raw_indices, offsets, scales, full, empty, p_full, q_full,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, FP16: gl.constexpr,
    NW: gl.constexpr, RP: gl.constexpr, PREFETCH: gl.constexpr,
):
    """Fill the ring. The two register sets (this piece, next piece) swap names without moves because the pieces of a tile
    are unrolled: moving a register that a load is still filling would stall the warp. Indices reach shared memory by cp.async:
    as plain loads they would share a scoreboard with the rows in flight, and every wait for an index would wait for these."""
    NP: gl.constexpr = 64 // RP
    ADDRESS: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])  # one key per thread
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    by_piece = reinterpret(offsets, gl.int64, [SLOTS * NP, RP], FLAT)
    g0 = 0  # tiles published by this program: stage and phase run on across items
    for item in range(item_first, item_stop, item_step):
        t, split, head_block, first, count, tiles_main, length, extra_length = plan(
            item, lengths, extra_lengths, len_per, has_len, has_extra_len, topk, extra_topk, head_blocks, splits, DUAL, SPLIT
        )
        if count > 0:
            b = (t // s_q).to(gl.int64)
            s_pos = (t % s_q).to(gl.int64)
            idx = indices + b * idx_stride_b + s_pos * idx_stride_s
            extra_idx = idx
            if DUAL:
                extra_idx = extra_indices + b * extra_idx_stride_b + s_pos * extra_idx_stride_s
            last = first + count
            # addresses of the first two tiles; the indices of the third are on their way
            async_copy.wait_group(0)
            at0, below0 = index_source(first, last, idx, extra_idx, tiles_main, length, extra_length, DUAL, ADDRESS)
            at1, below1 = index_source(first + 1, last, idx, extra_idx, tiles_main, length, extra_length, DUAL, ADDRESS)
            raw0 = gl.load(at0, mask=below0, other=-1)
            raw1 = gl.load(at1, mask=below1, other=-1)
            if g0 == 0:
                copy_q(q, item, n_heads, s_q, q_stride_b, q_stride_s, q_stride_h, head_blocks, splits, ql, qr, qx, SPLIT, NW)
                async_copy.mbarrier_arrive(q_full, increment_count=False)
            at2, below2 = index_source(first + 2, last, idx, extra_idx, tiles_main, length, extra_length, DUAL, ADDRESS)
            copy_async(raw_indices.index((g0 + 2) % SLOTS), at2, mask=below2)
            async_copy.commit_group()
            resolve(
                raw0, below0, first, tiles_main, kv, extra_kv, slots, extra_slots, page, extra_page, page_stride, extra_page_stride,
                offsets, scales, g0 % SLOTS, DUAL, PAGE, EXTRA_PAGE, PREFETCH, NW, ADDRESS,
            )
            resolve(
                raw1, below1, first + 1, tiles_main, kv, extra_kv, slots, extra_slots, page, extra_page, page_stride, extra_page_stride,
                offsets, scales, (g0 + 1) % SLOTS, DUAL, PAGE, EXTRA_PAGE, PREFETCH, NW, ADDRESS,
            )
            async_copy.commit_group()
            rows = fetch_piece(first, tiles_main, kv, extra_kv, by_piece, (g0 % SLOTS) * NP, DUAL, RP, NW)
            async_copy.wait_group(0)  # the scales of the first two tiles
            if g0 > 0:
                # once P of the last tile before is there, all scores with the Q before are done
                mbarrier.wait(p_full.index((g0 - 1) % 2), ((g0 - 1) // 2) & 1)
                copy_q(q, item, n_heads, s_q, q_stride_b, q_stride_s, q_stride_h, head_blocks, splits, ql, qr, qx, SPLIT, NW)
                async_copy.mbarrier_arrive(q_full, increment_count=False)
            for j in range(count):
                for part in gl.static_range(NP):
                    rows = producer_step(
                        rows, first + j, last, g0 + j, tiles_main, length, extra_length, idx, extra_idx,
                        kv, extra_kv, slots, extra_slots, page, extra_page, page_stride, extra_page_stride,
                        kl, kr, kx, raw_indices, offsets, scales, by_piece, full, empty,
                        part, DUAL, PAGE, EXTRA_PAGE, FP16, NW, RP, PREFETCH,
                    )
            g0 += count


@gluon.jit
def producer_step(
    rows, tile, last, g, tiles_main, length, extra_length, idx, extra_idx,
    kv, extra_kv, slots, extra_slots, page, extra_page, page_stride, extra_page_stride,
    kl, kr, kx, raw_indices, offsets, scales, by_piece, full, empty,
    Q: gl.constexpr, DUAL: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, FP16: gl.constexpr,
    NW: gl.constexpr, RP: gl.constexpr, PREFETCH: gl.constexpr,
):
    """Piece Q of `tile` (tile number g of this program): start the loads of the next piece, then dequantise this one."""
    NP: gl.constexpr = 64 // RP
    ADDRESS: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    st = g % 2
    # beyond the item's last tile the ring says -1, and nothing is loaded
    ahead = rows
    if NP == 1:
        ahead = rows
    elif Q + 1 < NP:
        ahead = fetch_piece(tile, tiles_main, kv, extra_kv, by_piece, (g % SLOTS) * NP + (Q + 1), DUAL, RP, NW)
    else:
        ahead = fetch_piece(tile + 1, tiles_main, kv, extra_kv, by_piece, ((g + 1) % SLOTS) * NP, DUAL, RP, NW)
    if Q == 0:
        mbarrier.wait(empty.index(st), ((g // 2) & 1) ^ 1)
        copy_rope(tile, tiles_main, kv, extra_kv, offsets, g % SLOTS, kx.index(st).slice(96, 32, dim=1), DUAL, NW)
        async_copy.mbarrier_arrive(full.index(st), increment_count=False)
    scale = reinterpret(scales, gl.uint8, [SLOTS, 64, 4 * SCALE_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(g % SLOTS)
    convert_part(rows[0], scale, kl.index(st), Q, RP, 0, 16, NW, FP16)
    convert_part(rows[1], scale, kr.index(st).slice(0, 64, dim=1), Q, RP, 16, 8, NW, FP16)
    convert_part(rows[2], scale, kr.index(st).slice(64, 32, dim=1), Q, RP, 24, 4, NW, FP16)
    if Q == NP - 1:
        mbarrier.arrive(full.index(st), count=1)  # no proxy fence here: the readers fence after their wait
        if NP == 1:
            # one set of registers for a whole tile: half as many loads would be in flight with two sets of half a tile
            ahead = fetch_piece(tile + 1, tiles_main, kv, extra_kv, by_piece, (g + 1) % SLOTS, DUAL, RP, NW)
        # the addresses of the tile after the next one, while the readers work. Its slot in the ring is that of tile g - 2, whose
        # validity the softmax group has read: stage st was empty
        at3, below3 = index_source(tile + 3, last, idx, extra_idx, tiles_main, length, extra_length, DUAL, ADDRESS)
        copy_async(raw_indices.index((g + 3) % SLOTS), at3, mask=below3)
        async_copy.commit_group()
        async_copy.wait_group(1)
        at2, below2 = index_source(tile + 2, last, idx, extra_idx, tiles_main, length, extra_length, DUAL, ADDRESS)
        resolve(
            raw_indices.index((g + 2) % SLOTS).load(ADDRESS), below2, tile + 2, tiles_main, kv, extra_kv, slots, extra_slots,
            page, extra_page, page_stride, extra_page_stride, offsets, scales, (g + 2) % SLOTS,
            DUAL, PAGE, EXTRA_PAGE, PREFETCH, NW, ADDRESS,
        )
        async_copy.commit_group()  # its scales, which the next tile's wait takes in
    return ahead


# ------------------------------------------------------------------------------------------------ consumers


@gluon.jit
def rough_log2(x):
    """One instruction, where gl.log2 takes twenty."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def limit(m, l, SLACK: gl.constexpr, FP16: gl.constexpr):
    """What a tile's maximum must exceed to replace m (log2). Moving m rescales O, and a P of 2^SLACK is as good as 1, so that
    growth alone is no reason. But the rope dims, whatever the others are, meet P in bf16, and where a key dominates its row,
    the rounding of its P would be most of the error. P of the maximum itself is exactly 1. So a key moves m as well if its P
    would be more than 2^-SHARE of l, the sum so far, which is relative to m."""
    return gl.maximum(m, gl.minimum(m + SLACK, m + rough_log2(l) - SHARE))


@gluon.jit
def scores(ql, qr, qx, kl, kr, kx, FP16: gl.constexpr, SL: gl.constexpr):
    """Start S = Q K^T [64 heads, 64 keys]: SCORE_MMAS asynchronous MMAs."""
    p = gl.zeros([64, 64], gl.float32, SL)
    p = warpgroup_mma(ql, kl.permute((1, 0)), p, use_acc=False, is_async=True)
    if FP16:
        p = warpgroup_mma(qr.slice(0, 128, dim=1), kr.slice(0, 128, dim=1).permute((1, 0)), p, is_async=True)
        p = warpgroup_mma(qr.slice(128, 64, dim=1), kr.slice(128, 64, dim=1).permute((1, 0)), p, is_async=True)
        p = warpgroup_mma(qx.slice(192, 64, dim=1), kx.slice(192, 64, dim=1).permute((1, 0)), p, is_async=True)  # bf16
    else:
        p = warpgroup_mma(qr, kr.permute((1, 0)), p, is_async=True)
    return p


@gluon.jit
def softmax_group(
    lengths, extra_lengths, sink, out, lse, max_logits, part_out, part_lse, part_max,
    scale_log2, lse_scale, empty_lse, n_heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len, has_sink, has_lse, has_max,
    out_stride_b, out_stride_s, out_stride_h,
    lse_stride_b, lse_stride_s, lse_stride_h, max_stride_b, max_stride_s, max_stride_h,
    head_blocks, splits, item_first, item_stop, item_step,
    ql, qr, qx, kl, kr, kx, krb, kp, factors, inverse, offsets, full, empty, p_full, q_full, inv_full,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, FP16: gl.constexpr, SLACK: gl.constexpr,
):
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SL)
    A: gl.constexpr = gl.DotOperandLayout(0, SL, 2)
    HALF: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    SCORE_MMAS: gl.constexpr = 4 if FP16 else 2
    head = gl.arange(0, 64, ROW)
    g0 = 0
    used = 0  # items with keys
    for item in range(item_first, item_stop, item_step):
        t, split, head_block, first, count, tiles_main, length, extra_length = plan(
            item, lengths, extra_lengths, len_per, has_len, has_extra_len, topk, extra_topk, head_blocks, splits, DUAL, SPLIT
        )
        m = gl.full([64], LOWEST, gl.float32, ROW)
        top = gl.full([64], float("-inf"), gl.float32, ROW)  # the true maximum; m may lag behind it by SLACK
        l = gl.zeros([64], gl.float32, ROW)
        oa = gl.zeros([64, 64], gl.float32, SL)
        ob = gl.zeros([64, 64], gl.float32, SL)
        p = gl.zeros([64, 64], gl.float32, SL)
        valid = gl.full([64], False, gl.int1, gl.SliceLayout(0, SL))
        if count > 0:
            mbarrier.wait(q_full, used & 1)
            convert_q(ql, qr, FP16)
            mbarrier.wait(full.index(g0 % 2), (g0 // 2) & 1)
            fence_async_shared()
            x = scores(ql, qr, qx, kl.index(g0 % 2), kr.index(g0 % 2), kx.index(g0 % 2), FP16, SL)
            valid = offsets.index(g0 % SLOTS).load(gl.SliceLayout(0, SL)) >= 0
            p = warpgroup_mma_wait(0, deps=[x])
        for j in range(count):
            g = g0 + j
            st = g % 2
            p = gl.where(gl.expand_dims(valid, 0), p, float("-inf"))
            high = gl.max(p, 1) * scale_log2  # the launcher sends scales that are not positive elsewhere
            top = gl.maximum(top, high)
            m_new = gl.where(high > limit(m, l, SLACK, FP16), high, m)  # a lazy maximum: P stays below 2^SLACK
            alpha = gl.exp2(m - m_new)
            s = gl.exp2(p * scale_log2 - gl.expand_dims(m_new, 1))
            ph = s.to(HALF)
            factors.index(st).store(alpha)
            kp.index(st).store(ph)
            fence_async_shared()
            mbarrier.arrive(p_full.index(st), count=1)
            l = l * alpha + gl.sum(s, 1)
            m = m_new
            oa = rescale(oa, alpha, SL, 64, SLACK)
            ob = rescale(ob, alpha, SL, 64, SLACK)
            # The rope dims are values too, and stay bf16. They go first: the compiler sinks the conversion to its use, and one
            # between two MMAs would make ptxas run every MMA of the kernel one by one. Two copies of P in registers would too.
            pb = gl.convert_layout(s.to(gl.bfloat16), A)
            yb = warpgroup_mma(pb, krb.index(st).slice(192, 64, dim=1), ob, is_async=True)
            ya = warpgroup_mma(kp.index(st), kr.index(st).slice(128, 64, dim=1), oa, is_async=True)
            if j + 1 < count:
                sn = (g + 1) % 2
                mbarrier.wait(full.index(sn), ((g + 1) // 2) & 1)
                fence_async_shared()
                x = scores(ql, qr, qx, kl.index(sn), kr.index(sn), kx.index(sn), FP16, SL)
                oa, ob, p = warpgroup_mma_wait(SCORE_MMAS, deps=[ya, yb, x])
                mbarrier.arrive(empty.index(st), count=1)
                valid = offsets.index((g + 1) % SLOTS).load(gl.SliceLayout(0, SL)) >= 0
            else:
                oa, ob, p = warpgroup_mma_wait(0, deps=[ya, yb, p])
                if SPLIT:
                    mbarrier.arrive(empty.index(st), count=1)
            p = warpgroup_mma_wait(0, deps=[p])

        h = head_block * 64 + head
        exists = h < n_heads
        h64 = h.to(gl.int64)
        none = l == 0.0
        lse2 = gl.where(none, float("-inf"), m + gl.log2(l))
        # a NaN key leaves no trace in a maximum, but it does in the sum
        top = gl.where(l == l, top, float("nan"))
        b = (t // s_q).to(gl.int64)
        s_pos = (t % s_q).to(gl.int64)
        if SPLIT:
            inv = gl.where(none, 0.0, 1.0 / l)
        else:
            sink2 = gl.load(sink + h, mask=exists & (has_sink != 0), other=float("-inf")) * LOG2E
            # a sink far above every key makes the sum inf, and the output zero, as it should be
            inv = gl.where(none, 0.0, 1.0 / (l + gl.exp2(sink2 - m)))
        if count > 0:
            inverse.index(used % 2).store(inv)
            mbarrier.arrive(inv_full.index(used % 2), count=1)
            used += 1
        oa = oa * gl.expand_dims(inv, 1)
        ob = ob * gl.expand_dims(inv, 1)
        if SPLIT:
            part = (t.to(gl.int64) * splits + split) * n_heads
            gl.store(part_lse + part + h, lse2, mask=exists)
            gl.store(part_max + part + h, top, mask=exists & (has_max != 0))
            if count > 0:
                store_part(part_out + part * D_V, head_block, n_heads, oa, 384, 64, SL)
                store_part(part_out + part * D_V, head_block, n_heads, ob, 448, 64, SL)
        else:
            lse_out = gl.where(none, empty_lse, lse2 * (LN2 * lse_scale))
            gl.store(lse + b * lse_stride_b + s_pos * lse_stride_s + h64 * lse_stride_h, lse_out, mask=exists & (has_lse != 0))
            gl.store(max_logits + b * max_stride_b + s_pos * max_stride_s + h64 * max_stride_h, top * LN2, mask=exists & (has_max != 0))
            out_row = out + b * out_stride_b + s_pos * out_stride_s
            if count > 0:
                st = (g0 + count - 1) % 2
                krb.index(st).slice(128, 64, dim=1).store(oa.to(gl.bfloat16))
                krb.index(st).slice(192, 64, dim=1).store(ob.to(gl.bfloat16))
                copy_out(krb.index(st).slice(128, 128, dim=1), out_row, out_stride_h, head_block, n_heads, 384, 128)
                mbarrier.arrive(empty.index(st), count=1)
            else:
                zero_out(out_row, out_stride_h, head_block, n_heads, 384, 128)
        g0 += count


@gluon.jit
def value_group(
    q, lengths, extra_lengths, out, part_out, n_heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len,
    q_stride_b, q_stride_s, q_stride_h, out_stride_b, out_stride_s, out_stride_h,
    head_blocks, splits, item_first, item_stop, item_step,
    ql, qr, qx, kl, kr, klb, krb, kp, factors, inverse, empty, p_full, q_full, inv_full,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, FP16: gl.constexpr, SLACK: gl.constexpr, N_VALUE: gl.constexpr,
):
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N_VALUE, 16])  # columns 0..255
    OM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])  # columns 256..383
    g0 = 0
    used = 0
    for item in range(item_first, item_stop, item_step):
        t, split, head_block, first, count, tiles_main, length, extra_length = plan(
            item, lengths, extra_lengths, len_per, has_len, has_extra_len, topk, extra_topk, head_blocks, splits, DUAL, SPLIT
        )
        following = item + item_step
        if following < item_stop:
            prefetch_q(q, following, n_heads, s_q, q_stride_b, q_stride_s, q_stride_h, head_blocks, splits, SPLIT)
        ol = gl.zeros([64, 256], gl.float32, OL)
        om = gl.zeros([64, 128], gl.float32, OM)
        for j in range(count):
            g = g0 + j
            st = g % 2
            mbarrier.wait(p_full.index(st), (g // 2) & 1)
            fence_async_shared()
            ol = rescale(ol, factors.index(st).load(gl.SliceLayout(1, OL)), OL, 256, SLACK)
            om = rescale(om, factors.index(st).load(gl.SliceLayout(1, OM)), OM, 128, SLACK)
            yl = warpgroup_mma(kp.index(st), kl.index(st), ol, is_async=True)
            ym = warpgroup_mma(kp.index(st), kr.index(st).slice(0, 128, dim=1), om, is_async=True)
            ol, om = warpgroup_mma_wait(0, deps=[yl, ym])
            mbarrier.arrive(empty.index(st), count=1, pred=j + 1 < count)
        b = (t // s_q).to(gl.int64)
        s_pos = (t % s_q).to(gl.int64)
        out_row = out + b * out_stride_b + s_pos * out_stride_s
        st = (g0 + count - 1) % 2
        if count > 0:
            mbarrier.wait(inv_full.index(used % 2), (used // 2) & 1)
            ol = ol * gl.expand_dims(inverse.index(used % 2).load(gl.SliceLayout(1, OL)), 1)
            om = om * gl.expand_dims(inverse.index(used % 2).load(gl.SliceLayout(1, OM)), 1)
            if SPLIT:
                mbarrier.arrive(empty.index(st), count=1)
                part = (t.to(gl.int64) * splits + split) * n_heads
                store_part(part_out + part * D_V, head_block, n_heads, ol, 0, 256, OL)
                store_part(part_out + part * D_V, head_block, n_heads, om, 256, 128, OM)
            else:
                klb.index(st).store(ol.to(gl.bfloat16))
                krb.index(st).slice(0, 128, dim=1).store(om.to(gl.bfloat16))
                copy_out(klb.index(st), out_row, out_stride_h, head_block, n_heads, 0, 256)
                copy_out(krb.index(st).slice(0, 128, dim=1), out_row, out_stride_h, head_block, n_heads, 256, 128)
                mbarrier.arrive(empty.index(st), count=1)
            used += 1
        elif not SPLIT:
            zero_out(out_row, out_stride_h, head_block, n_heads, 0, 256)
            zero_out(out_row, out_stride_h, head_block, n_heads, 256, 128)
        g0 += count


@gluon.jit
def q_rows(
    q, item, n_heads, s_q, q_stride_b, q_stride_s, q_stride_h, head_blocks, splits, SPLIT: gl.constexpr, ROW: gl.constexpr
):
    """Pointers to the 64 rows of Q of an item, and which of them exist."""
    rest = item // head_blocks
    t = rest
    if SPLIT:
        t = rest // splits
    h = (item % head_blocks) * 64 + gl.arange(0, 64, ROW)
    row = q + (t // s_q).to(gl.int64) * q_stride_b + (t % s_q).to(gl.int64) * q_stride_s
    return row + h.to(gl.int64) * q_stride_h, h < n_heads


@gluon.jit
def prefetch_q(
    q, item, n_heads, s_q, q_stride_b, q_stride_s, q_stride_h, head_blocks, splits, SPLIT: gl.constexpr
):
    """Q of an item into L2, so that loading it at the switch of items does not wait for device memory."""
    row, exists = q_rows(
        q, item, n_heads, s_q, q_stride_b, q_stride_s, q_stride_h, head_blocks, splits, SPLIT, gl.BlockedLayout([1], [32], [4], [0])
    )
    prefetch_q_rows(row, exists.to(gl.int32))


@gluon.jit
def copy_q(
    q, item, n_heads, s_q, q_stride_b, q_stride_s, q_stride_h, head_blocks, splits, ql, qr, qx, SPLIT: gl.constexpr, NW: gl.constexpr
):
    """Start copying Q of an item, as bf16, to where it is used. Needs no registers to land in."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    B16: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ptr, exists = q_rows(q, item, n_heads, s_q, q_stride_b, q_stride_s, q_stride_h, head_blocks, splits, SPLIT, gl.SliceLayout(1, L))
    col = gl.expand_dims(gl.arange(0, 256, gl.SliceLayout(0, L)), 0)
    at = gl.expand_dims(ptr, 1) + col
    mask = gl.broadcast(gl.expand_dims(exists, 1), at)[0]
    copy_async(reinterpret(ql, gl.bfloat16, [64, 256], B16), at, mask=mask)
    copy_async(reinterpret(qr, gl.bfloat16, [64, 256], B16), at + 256, mask=mask)


@gluon.jit
def convert_q(ql, qr, FP16: gl.constexpr):
    """Turn the latent dims of Q into fp16 where they lie; the rope dims stay bf16."""
    if FP16:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        B16: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        lb = reinterpret(ql, gl.bfloat16, [64, 256], B16)
        rb = reinterpret(qr, gl.bfloat16, [64, 256], B16)
        for i in gl.static_range(4):
            convert_columns(lb, ql, i * 64, L)
        for i in gl.static_range(3):
            convert_columns(rb, qr, i * 64, L)


@gluon.jit
def convert_columns(source, target, C0: gl.constexpr, L: gl.constexpr):
    x = source.slice(C0, 64, dim=1).load(L)
    target.slice(C0, 64, dim=1).store(x.to(gl.float16))


@gluon.jit
def copy_out(tile, row, stride_h, head_block, n_heads, C0: gl.constexpr, WIDTH: gl.constexpr):
    """A staged tile of bf16 outputs to columns C0.. of the existing heads, 16 bytes per lane."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    h = head_block * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    col = gl.expand_dims(C0 + gl.arange(0, WIDTH, gl.SliceLayout(0, L)), 0)
    gl.store(row + gl.expand_dims(h.to(gl.int64) * stride_h, 1) + col, tile.load(L), mask=gl.expand_dims(h < n_heads, 1))


@gluon.jit
def zero_out(row, stride_h, head_block, n_heads, C0: gl.constexpr, WIDTH: gl.constexpr):
    """Outputs of an item without keys."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    h = head_block * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    col = gl.expand_dims(C0 + gl.arange(0, WIDTH, gl.SliceLayout(0, L)), 0)
    zeros = gl.zeros([64, WIDTH], gl.bfloat16, L)
    gl.store(row + gl.expand_dims(h.to(gl.int64) * stride_h, 1) + col, zeros, mask=gl.expand_dims(h < n_heads, 1))


@gluon.constexpr_function
def half_way(COLS):
    """Between the accumulators' order and `by_eight`: one of two exchanges among the four lanes of a row is done. One at a time is
    made of shuffles; for both at once the compiler would take shared memory, of which there is none left."""
    regs = [[0, 1], [0, 2], [0, 16], [8, 0]] + [[0, 32 << i] for i in range((COLS // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, COLS])


@gluon.constexpr_function
def by_eight(COLS):
    """[64, COLS]: the accumulators' order, but that a lane has 8 neighbouring columns, and the lanes of a row 32."""
    regs = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, 32 << i] for i in range((COLS // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, COLS])


@gluon.jit
def in_eights(x, COLS: gl.constexpr):
    """Accumulators as fp16, in `by_eight`: 16 bytes of a lane, two lanes to a sector. As they lie, four lanes would fill half of
    one, and half sectors cost more than whole ones of twice as many bytes."""
    y = gl.convert_layout(x.to(gl.float16), half_way(COLS))
    # two conversions in a row would become one
    y = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [y], dtype=gl.float16, is_pure=True, pack=2)
    return gl.convert_layout(y, by_eight(COLS))


@gluon.jit
def store_part(row, head_block, n_heads, x, C0: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr):
    """Columns C0.. of the rows of a split, fp32 straight from the accumulators, or fp16."""
    if row.dtype.element_ty == gl.float16:
        store_columns(row, head_block, n_heads, in_eights(x, WIDTH), C0, WIDTH, by_eight(WIDTH))
    else:
        store_columns(row, head_block, n_heads, x, C0, WIDTH, L)


@gluon.jit
def store_columns(row, head_block, n_heads, x, C0: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr):
    h = head_block * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    col = gl.expand_dims(C0 + gl.arange(0, WIDTH, gl.SliceLayout(0, L)), 0)
    gl.store(row + gl.expand_dims(h.to(gl.int64) * D_V, 1) + col, x, mask=gl.expand_dims(h < n_heads, 1))


# ------------------------------------------------------------------------------------------------ kernel


@gluon.jit(do_not_specialize=["n_heads", "s_q", "topk", "extra_topk", "slots", "extra_slots", "page", "extra_page",
                              "len_per", "has_len", "has_extra_len", "has_sink", "has_lse", "has_max", "tokens", "splits"])
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
    tokens, splits,
    DUAL: gl.constexpr,  # a second cache under the same softmax
    SPLIT: gl.constexpr,  # write normalised parts for combine.py
    PAGE: gl.constexpr,  # 0: page, else the exact page size
    EXTRA_PAGE: gl.constexpr,
    HB: gl.constexpr,  # heads per item: 64
    FP16: gl.constexpr,  # latent dims of Q, K and P in fp16 (scales within 6e-5..146), else bf16
    PERSISTENT: gl.constexpr,  # a program walks over items, else it has one
    NW: gl.constexpr,  # producer warps
    RP: gl.constexpr,  # rows that a producer fetches at a time
    R_VALUE: gl.constexpr,  # registers per thread of the value group, then of the producer
    R_PROD: gl.constexpr,
    N_VALUE: gl.constexpr,  # columns per MMA of the value group: 256 needs a kernel of at most 384 threads
    SLACK: gl.constexpr,  # how far, in log2, the running maximum may lag at most (see limit); 0: never, and always rescale
    PREFETCH: gl.constexpr,  # fetch rows into L2 two tiles ahead
):
    if SPLIT:
        release_dependents()
    HALF: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # 128-byte swizzle, 16-bit elements
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)  # the same bytes as 32-bit words
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ql = gl.allocate_shared_memory(HALF, [64, 256], TILE)
    qr = gl.allocate_shared_memory(HALF, [64, 256], TILE)
    kl = gl.allocate_shared_memory(HALF, [2, 64, 256], TILE)
    kr = gl.allocate_shared_memory(HALF, [2, 64, 256], TILE)
    klb = reinterpret(kl, gl.bfloat16, [2, 64, 256], TILE)
    krb = reinterpret(kr, gl.bfloat16, [2, 64, 256], TILE)
    # the rope dims are the last 64 columns of the tile, in bf16 whatever the rest is
    qx = reinterpret(qr, gl.bfloat16, [64, 256], TILE)
    kx = krb
    kp = gl.allocate_shared_memory(HALF, [2, 64, 64], TILE)
    kx_words = reinterpret(kr, gl.int32, [2, 64, 128], WORDS)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    inverse = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    raw_indices = gl.allocate_shared_memory(gl.int32, [SLOTS, 64], FLAT)
    offsets = gl.allocate_shared_memory(gl.int64, [SLOTS, 64], FLAT)
    scales = gl.allocate_shared_memory(gl.int32, [SLOTS, 64, SCALE_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    inv_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1 + 32 * NW)  # one for what is dequantised, one per thread for its cp.async
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(inv_full.index(i), count=1)
    mbarrier.init(q_full, count=32 * NW)

    head_blocks = (n_heads + 63) // 64
    item_first = gl.program_id(0)
    item_step = gl.num_programs(0)
    item_stop = item_first + 1
    if PERSISTENT:
        item_stop = tokens * splits * head_blocks
    gl.warp_specialize(
        [
            (softmax_group, (
                lengths, extra_lengths, sink, out, lse, max_logits, part_out, part_lse, part_max,
                scale_log2, lse_scale, empty_lse, n_heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len,
                has_sink, has_lse, has_max, out_stride_b, out_stride_s, out_stride_h,
                lse_stride_b, lse_stride_s, lse_stride_h, max_stride_b, max_stride_s, max_stride_h,
                head_blocks, splits, item_first, item_stop, item_step,
                ql, qr, qx, kl, kr, kx, krb, kp, factors, inverse, offsets, full, empty, p_full, q_full, inv_full,
                DUAL, SPLIT, FP16, SLACK,
            )),
            (value_group, (
                q, lengths, extra_lengths, out, part_out, n_heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len,
                q_stride_b, q_stride_s, q_stride_h, out_stride_b, out_stride_s, out_stride_h,
                head_blocks, splits, item_first, item_stop, item_step,
                ql, qr, qx, kl, kr, klb, krb, kp, factors, inverse, empty, p_full, q_full, inv_full,
                DUAL, SPLIT, FP16, SLACK, N_VALUE,
            )),
            (producer, (
                q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths,
                n_heads, s_q, topk, extra_topk, slots, extra_slots, page, extra_page, len_per, has_len, has_extra_len,
                page_stride, extra_page_stride, q_stride_b, q_stride_s, q_stride_h,
                idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s,
                head_blocks, splits, item_first, item_stop, item_step, ql, qr, qx,
                reinterpret(kl, gl.int32, [2, 64, 128], WORDS), reinterpret(kr, gl.int32, [2, 64, 128], WORDS), kx_words,
                raw_indices, offsets, scales, full, empty, p_full, q_full,
                DUAL, SPLIT, PAGE, EXTRA_PAGE, FP16, NW, RP, PREFETCH,
            )),
        ],
        [4, NW],
        [R_VALUE, R_PROD],
    )
