"""Sparse-MLA attention over the v4 KV cache for few heads: family "sm90_few", Gluon, emitted for sm90.

out[t, h] = sum_j exp(x_j) v_j / (sum_j exp(x_j) + exp(sink[h])),  x_j = sm_scale * <q[t, h], k_j>,  v_j = k_j[:512]
over the slots j that `indices` selects for token t, from one cache or from two under the same softmax.

The matrix unit wants 64 rows on its M side. With few heads these rows are keys, and HB heads lie on the N side:
    S^T [64 keys, HB] = K [64, d] Q^T [d, HB]         O^T [512, HB] += V^T [512, 64] P^T [64, HB]
so that the output accumulator takes 4 * HB registers per thread and the kernel is a gather first of all.

An item is (token, split, block of HB heads), one per program; its keys are cut into tiles of 64, the main cache's first, or of
32 of a tile's 64 rows (TILE_KEYS), the others of which nobody reads but the scores. With one consumer and 128 registers per
thread (maxnreg) an SM holds two programs.

Four warps ask for the item's indices and for Q before anything else. Then the partitions start, and consumer 0, in the same
warps, checks the indices as they come, divides them by the page size and leaves the place of each row in shared
memory (`places`, PLACES tiles of 64), then Q. An item with more tiles gets the later places from the producer. Partitions:

    producer   PRODUCERS warps in 1 or 2 groups that take turns at the tiles: gather rows into registers, convert them to
               16 bits, publish tiles. Rope goes by cp.async into places of its own, a tile of the group ahead
    consumer   1 or 2 warpgroups, taking turns at the tiles: scores, softmax, values. With two, each has its own running
               maximum and sums; at the end they exchange them, and each writes one half of the output columns

Barriers (count of arrivals per phase):
    placed           1          consumer 0 -> producer: the first places are there
    q_there          1          consumer 0 -> consumer 1: Q is there, and so are all of the first PLACES places
    full[stage]      1 + threads of a group -> consumer: the tile is there (converted part: 1; cp.async: one per thread)
    empty[stage]     1          consumer -> producer: done with the tile, and with its places
    ready            1          consumer W -> the other: my accumulators are in my last stage
    turn             1          group G -> the other: I have asked for the rows of a tile, ask for those of the next

The producer writes over places of tiles that the consumers have ended: PLACES is at least twice STAGES.

Validity of a key: its position is below clamp(length, 0, topk) and 0 <= index < slots. A row that is not valid is never
loaded (masked loads give 0, masked cp.async fills with zero): its bytes may be anything. All control flow depends on item
numbers, lengths and tile counts only.
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

FAMILY = "sm90_few"
LAYOUT = 'v4'
ARCH = 'sm90'
TEMPLATE_HASH = '8c6f12e51730f23f'
TRITON_RANGE = ('3.6', '4.0')

# the same calls under the names of both API generations (ask for the new name: the old ones live on as stubs that raise)
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_SMEM = gl.shared_memory_descriptor
sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
reinterpret = _SMEM.reinterpret if hasattr(_SMEM, "reinterpret") else _SMEM._reinterpret

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)  # finite, so that a leading tile without a valid key leaves no inf - inf
ROW_BYTES = gl.constexpr(576)
LATENT = gl.constexpr(448)
ROPE = gl.constexpr(True)  # dims that have a tile of their own
V_ROPE = gl.constexpr(True)  # they belong to V as well
ROPE_OFFSET = gl.constexpr(448)
SCALE_OFFSET = gl.constexpr(-1)  # bytes from the row (inline)
SCALE_STRIDE = gl.constexpr(8)  # bytes per token in the footer; 0: inline
LANES = gl.constexpr(28)  # 16-byte pieces of a row's latent part
LANES_PER_GROUP = gl.constexpr(4)  # of which so many share a scale
SCALES = gl.constexpr(8)  # scales of a row, and of the columns without a dim


# ---------------------------------------------------------------------------------------------- items and tiles


@gluon.jit
def divided(x, by):
    """x // by for numbers from 0 to 2^22, without a branch and in a third of the time of a division, of which there are four before
    the first load: the rounded quotient of floats is at most 1 off. So (token, block) pairs and tiles must be fewer than 2^22."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a, b;
        .reg .b32 q, r;
        .reg .pred high, low;
        or.b32 q, $1, 0x4B000000;
        or.b32 r, $2, 0x4B000000;
        mov.b32 a, q;
        mov.b32 b, r;
        sub.f32 a, a, 0f4AFFFFFF;
        sub.f32 b, b, 0f4B000000;
        rcp.approx.ftz.f32 b, b;
        fma.rn.f32 a, a, b, 0fBF000000;
        add.f32 a, a, 0f4B400000;
        mov.b32 q, a;
        sub.s32 q, q, 0x4B400000;
        mul.lo.s32 r, q, $2;
        sub.s32 r, $1, r;
        setp.ge.s32 high, r, $2;
        setp.lt.s32 low, r, 0;
        @high add.s32 q, q, 1;
        @low sub.s32 q, q, 1;
        mov.b32 $0, q;
        }""",
        "=r,r,r", [x, by], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def tiles_of(t, split, splits, lens, DUAL: gl.constexpr, SPLIT: gl.constexpr, TILE_KEYS: gl.constexpr):
    """(first tile, number of tiles, tiles of the main cache, length, extra length): the main cache's tiles come first."""
    lengths, extra_lengths, topk, extra_topk, len_per, has_len, has_extra_len = lens
    length = gl.load(lengths + divided(t, len_per), mask=has_len != 0, other=topk)
    length = gl.minimum(gl.maximum(length, 0), topk)
    tiles_main = (length + (TILE_KEYS - 1)) // TILE_KEYS
    tiles = tiles_main
    extra_length = length
    if DUAL:
        extra_length = gl.load(extra_lengths + divided(t, len_per), mask=has_extra_len != 0, other=extra_topk)
        extra_length = gl.minimum(gl.maximum(extra_length, 0), extra_topk)
        tiles = tiles_main + (extra_length + (TILE_KEYS - 1)) // TILE_KEYS
    first = 0
    count = tiles
    if SPLIT:
        per_split = gl.maximum(divided(tiles + splits - 1, splits), 1)
        first = gl.minimum(split * per_split, tiles)
        count = gl.minimum(per_split, tiles - first)
    return first, count, tiles_main, length, extra_length


@gluon.jit
def dim_of(col, h: gl.constexpr):
    """The dim of column `col` of the left (0) or right (1) latent tile."""
    # Lane c of a warp reads bytes 16c .. 16c+15 of a row. As 16-bit values they are two chunks of 16 bytes: the first goes
    # to the left tile, the second to the right one, both at chunk c. The 8 lanes of one store phase then hit 8 different
    # bank groups. Scores do not mind the order as long as Q has the same; the final store puts the dims back in order.
    return (col // 8) * 16 + 8 * h + (col % 8)


# ---------------------------------------------------------------------------------------------- inline PTX


@gluon.jit
def opaque_zero(i):
    """A 0 that the compiler cannot see through. Used in tile indices: loop-invariant wgmma descriptors would be hoisted out
    of the loop, more than a hundred of them, and spilled."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [i], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """ex2.approx: results below 2^-126 are 0. gl.exp2 keeps them, with three more instructions each."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    """lg2.approx, good to 2^-22. gl.log2 is 25 instructions per head, between the last values and the stores of a part."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def release_dependents():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_merge_start(SPLIT: gl.constexpr):
    """Let the merge be launched when all programs have come here: it waits for all of this kernel by itself
    (griddepcontrol.wait) before it reads a part. Its launch takes about as long as the end of a program of one consumer; earlier,
    its programs would crowd onto the SMs that have none of this kernel's."""
    if SPLIT:
        release_dependents()


@gluon.jit
def scale_to_f16x2(scale):
    """An fp32 scale, twice in fp16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [scale], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def e4m3_to_f16(raw, scale2):
    """Four e4m3 values times a scale -> two words of fp16 pairs: one conversion and one multiply per pair; NaN stays NaN."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        .reg .b32 c, d;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 c, a;
        cvt.rn.f16x2.e4m3x2 d, b;
        mul.rn.f16x2 $0, c, $3;
        mul.rn.f16x2 $1, d, $3;
        }""",
        "=r,=r,r,r", [raw, scale2], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def e4m3_to_bf16(raw, scale):
    """Four e4m3 values times an fp32 scale -> two words of bf16 pairs, rounded once; right for every scale."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, h0, h1, h2, h3;
        .reg .b32 c, d;
        .reg .f32 f0, f1, f2, f3;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 c, a;
        cvt.rn.f16x2.e4m3x2 d, b;
        mov.b32 {h0, h1}, c;
        mov.b32 {h2, h3}, d;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.f32.f16 f2, h2;
        cvt.f32.f16 f3, h3;
        mul.f32 f0, f0, $3;
        mul.f32 f1, f1, $3;
        mul.f32 f2, f2, $3;
        mul.f32 f3, f3, $3;
        cvt.rn.bf16x2.f32 $0, f1, f0;
        cvt.rn.bf16x2.f32 $1, f3, f2;
        }""",
        "=r,=r,r,f", [raw, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- places of rows


@gluon.jit
def load_indices(tile, span, ids, DUAL: gl.constexpr, TILES: gl.constexpr, TILE_KEYS: gl.constexpr, IL: gl.constexpr):
    """Indices of TILES tiles of the item from `tile` on; -1 beyond the length."""
    first, n, tiles_main, length, extra_length = span
    main_ids, extra_ids = ids
    e = tile * 64 + gl.arange(0, TILES * 64, IL)
    exists = e < n * 64
    if TILE_KEYS == 64:
        pos = first * 64 + e
    else:
        exists = exists & (e % 64 < TILE_KEYS)  # a tile's other rows are padding
        pos = (first + e // 64) * TILE_KEYS + e % 64
    bound = length
    ptr = main_ids + pos
    if DUAL:
        in_extra = pos >= tiles_main * TILE_KEYS
        if TILE_KEYS < 64:
            in_extra = first + e // 64 >= tiles_main
        pos = gl.where(in_extra, pos - tiles_main * TILE_KEYS, pos)
        bound = gl.where(in_extra, extra_length, length)
        ptr = gl.where(in_extra, extra_ids + pos, main_ids + pos)
    return gl.load(ptr, mask=(pos < bound) & exists, other=-1)


@gluon.jit
def page_of(index, page, PAGE: gl.constexpr):
    if PAGE > 0:
        if PAGE & (PAGE - 1) == 0:
            # a shift in so many words: of two constant divisions and a choice LLVM makes one division by what was chosen
            return index >> (PAGE.bit_length() - 1)
        else:
            return index // PAGE
    else:
        return index // page


@gluon.jit
def post_places(index, tile, span, kv_io, slot_counts, places, feet, DUAL: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr,
                TILES: gl.constexpr, PLACES: gl.constexpr, IL: gl.constexpr):
    """Check indices and leave the place of each row, its offset in 16 bytes; -1: not valid."""
    first, n, tiles_main, length, extra_length = span
    slots, extra_slots = slot_counts
    VEC: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    in_extra = (first + tile) * 64 + gl.arange(0, TILES * 64, IL) >= tiles_main * 64
    n_slots = slots
    if DUAL:
        n_slots = gl.where(in_extra, extra_slots, slots)
    valid = (index >= 0) & (index < n_slots)
    at = (tile % PLACES) // TILES
    kv, page_stride, page, extra_kv, extra_page_stride, extra_page = kv_io
    safe = gl.where(valid, index, 0)
    page_id = page_of(safe, page, PAGE)
    rows = page if PAGE == 0 else PAGE
    stride = page_stride.to(gl.int64)
    if DUAL:
        # dividing by each page size, not by a selected one, keeps a constant page a shift
        page_id = gl.where(in_extra, page_of(safe, extra_page, EXTRA_PAGE), page_id)
        rows = gl.where(in_extra, extra_page if EXTRA_PAGE == 0 else EXTRA_PAGE, rows)
        stride = gl.where(in_extra, extra_page_stride.to(gl.int64), stride)
    slot = (safe - page_id * rows).to(gl.int64)
    begin = page_id.to(gl.int64) * stride
    # in 16 bytes, so that the compiler sees the alignment
    place = gl.where(valid, (begin + slot * ROW_BYTES) >> 4, -1)
    reinterpret(places, gl.int64, [PLACES // TILES, TILES * 64], VEC).index(at).store(place)
    reinterpret(feet, gl.int64, [PLACES // TILES, TILES * 64], VEC).index(at).store(begin + (rows * ROW_BYTES + slot * SCALE_STRIDE))


# ---------------------------------------------------------------------------------------------- producer


@gluon.jit
def cache_of(tile, tiles_main, kv_io, DUAL: gl.constexpr):
    """The cache that a tile belongs to: a scalar select."""
    kv, page_stride, page, extra_kv, extra_page_stride, extra_page = kv_io
    base = kv
    if DUAL:
        if tile >= tiles_main:
            base = extra_kv
    return base


@gluon.jit
def ue8m0_to_fp32(byte):
    """2^(byte - 127); byte 0 is the subnormal 2^-127 and 255 is NaN, which a plain shift gets wrong."""
    b = byte.to(gl.int32)
    bits = gl.where(b == 0, 0x00400000, b << 23)
    return gl.where(b == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def scale_layout(ROWS, WARPS, SPREAD):
    """[ROWS, SCALES, lanes of a scale]: each lane has the scales of its 16 bytes, as `fetch` lays rows out. Not SPREAD, over
    [ROWS, SCALES]: the same rows of a warp, but each scale once, so that a load brings the scales of many rows."""
    count = 8
    near = 4 if ROWS // WARPS >= 4 else ROWS // WARPS
    scales = count.bit_length() - 1
    own = [1 << i for i in range(near.bit_length() - 1)]
    own += [near * WARPS << i for i in range((ROWS // (near * WARPS)).bit_length() - 1)]
    warps = [near << i for i in range(WARPS.bit_length() - 1)]
    if SPREAD:
        lanes = [[0, 0, 1 << i] for i in range(5 - scales)] + [[0, 1 << i, 0] for i in range(scales)]
        return gl.DistributedLinearLayout([[r, 0, 0] for r in own], lanes, [[w, 0, 0] for w in warps], [], [ROWS, count, 32 // count])
    across = own[: 5 - scales]
    lanes = [[0, 1 << i] for i in range(scales)] + [[r, 0] for r in across] + [[0, 0]] * (5 - scales - len(across))
    return gl.DistributedLinearLayout([[r, 0] for r in own[len(across) :]], lanes, [[w, 0] for w in warps], [], [ROWS, count])


@gluon.jit
def fetch_piece(piece, exists, places, feet, base, SCALES_ONCE: gl.constexpr, L3: gl.constexpr, LS: gl.constexpr):
    """Start the loads of a piece: raw int32 [ROWS, 32 lanes, 4 words], one LDG.128 of a warp per row, and each lane's scale, or
    (SCALES_ONCE) the rows' scales, each once."""
    IL: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    offset = gl.expand_dims(places.index(piece).load(IL), 1)
    valid = (offset >= 0) & exists
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, L3))), 0)
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L3))), 0), 1)
    valid = valid & (lane < LANES)  # the other lanes write the tile's columns without a dim: zeros
    words = base.to(gl.pointer_type(gl.int32), bitcast=True)
    # the lane's part of the address first: it does not change from row to row
    raw = gl.load((words + (gl.expand_dims(lane, 2) * 4 + word)) + gl.expand_dims(offset * 4, 2), mask=gl.expand_dims(valid, 2), other=0, cache_modifier=".cg")
    if SCALES_ONCE:
        group = gl.expand_dims(gl.arange(0, SCALES, gl.SliceLayout(0, LS)), 0)
        row = gl.expand_dims(places.index(piece).load(gl.SliceLayout(1, LS)), 1)
        valid = (row >= 0) & exists
    else:
        group = lane // LANES_PER_GROUP
        row = offset
    # the footer of the page: SCALE_STRIDE bytes per slot behind all rows
    if SCALES_ONCE:
        valid = valid & (group * LANES_PER_GROUP < LANES)
        foot = gl.expand_dims(feet.index(piece).load(gl.SliceLayout(1, LS)), 1)
    else:
        foot = gl.expand_dims(feet.index(piece).load(IL), 1)
    scale = gl.load((base + group) + foot, mask=valid, other=0, cache_modifier=".cg")
    return raw, scale


@gluon.jit
def spread(factor, ROWS: gl.constexpr, WARPS: gl.constexpr, L3: gl.constexpr):
    """The scales that were loaded once -> each lane's of each of its rows, by shuffles."""
    P3: gl.constexpr = scale_layout(ROWS, WARPS, True)
    one = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(2, P3)), 2)
    every = gl.broadcast(one, gl.zeros([ROWS, SCALES, 32 // SCALES], one.dtype, P3))[0]
    return gl.convert_layout(every.reshape([ROWS, 32]), gl.SliceLayout(2, L3), assert_trivial=True)


@gluon.jit
def convert_piece(raw, scale, left, right, q: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, SCALES_ONCE: gl.constexpr, FP16: gl.constexpr):
    RW: gl.constexpr = 4 if ROWS // WARPS >= 4 else ROWS // WARPS
    L3: gl.constexpr = gl.BlockedLayout([RW, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    factor = ue8m0_to_fp32(scale)
    if FP16:
        factor = scale_to_f16x2(factor)
    if SCALES_ONCE:
        factor = spread(factor, ROWS, WARPS, L3)
    if FP16:
        lo, hi = e4m3_to_f16(raw, gl.expand_dims(factor, 2))
    else:
        lo, hi = e4m3_to_bf16(raw, gl.expand_dims(factor, 2))
    words = gl.join(lo, hi).reshape([ROWS, 32, 2, 4]).permute((0, 1, 3, 2))  # 8 words per lane -> [ROWS, lane, 4, half]
    wl, wr = gl.split(words)
    left.slice(q * ROWS, ROWS, dim=0).store(wl.reshape([ROWS, 128]))
    right.slice(q * ROWS, ROWS, dim=0).store(wr.reshape([ROWS, 128]))


@gluon.jit
def copy_rope(place, base, rope, LR: gl.constexpr):
    """Rope dims need no conversion: cp.async straight into the tile."""
    offset = place.load(gl.SliceLayout(1, LR))
    words = base.to(gl.pointer_type(gl.int32), bitcast=True)
    ptr = (words + (ROPE_OFFSET // 4 + gl.arange(0, 32, gl.SliceLayout(0, LR)))[None, :]) + (offset * 4)[:, None]
    copy_async(rope, ptr, mask=(offset >= 0)[:, None])


@gluon.jit
def fetch(j, refill, places, feet, rope, q: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, ROPES: gl.constexpr,
WARPS: gl.constexpr, SCALES_ONCE: gl.constexpr, DUAL: gl.constexpr, PLACES: gl.constexpr):
    """Start the loads of piece q of tile j, and with the first piece the copies of the tile's rope."""
    PIECES: gl.constexpr = 64 // ROWS
    RW: gl.constexpr = 4 if ROWS // WARPS >= 4 else ROWS // WARPS
    L3: gl.constexpr = gl.BlockedLayout([RW, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    VEC: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    span, ids, kv_io, slot_counts = refill
    first, n, tiles_main, length, extra_length = span
    exists = j < n  # else nothing is loaded
    at = gl.where(exists, j, j - GROUPS)  # a tile of the group in any case: another's places may be changing
    base = cache_of(first + at, tiles_main, kv_io, DUAL)
    pieces = reinterpret(places, gl.int64, [PLACES * PIECES, ROWS], VEC)
    foot_pieces = reinterpret(feet, gl.int64, [PLACES * PIECES, ROWS], VEC)
    raw, scale = fetch_piece((at % PLACES) * PIECES + q, exists, pieces, foot_pieces, base, SCALES_ONCE, L3, scale_layout(ROWS, WARPS, False))
    if q == 0:
        if exists:
            copy_rope(places.index(at % PLACES), base, rope.index(j % ROPES), LR)
    return raw, scale


@gluon.jit
def produce_piece(i, raw, scale, ahead, refill, places, feet, tiles, bars, turns, G: gl.constexpr, q: gl.constexpr, ROWS: gl.constexpr,
                  STAGES: gl.constexpr, GROUPS: gl.constexpr, ROPES: gl.constexpr, WARPS: gl.constexpr, REFILL: gl.constexpr, TILE_KEYS: gl.constexpr, SCALES_ONCE: gl.constexpr, FP16: gl.constexpr,
                  DUAL: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, PLACES: gl.constexpr):
    """Convert and publish a piece, then start the loads of the group's next one into the same registers."""
    IL: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    PIECES: gl.constexpr = TILE_KEYS // ROWS
    full, empty = bars
    left, right, rope = tiles
    j = GROUPS * i + G
    st = j % STAGES
    if q == 0:
        mbarrier.wait(empty.index(st), ((j // STAGES) & 1) ^ 1)
    convert_piece(raw, scale, left.index(st), right.index(st), q, ROWS, WARPS, SCALES_ONCE, FP16)
    if q == PIECES - 1:
        # The rope's copies were asked for with the first rows, into a place of their own, so that their latency does not
        # begin when the stage is empty. No proxy fence here: the consumer fences after its wait.
        async_copy.mbarrier_arrive(full.index(st), increment_count=False)
        mbarrier.arrive(full.index(st), count=1)
        next_j = j + GROUPS
        if next_j % REFILL == 0:
            if (next_j >= PLACES) & (next_j < refill[0][1]):
                post_places(ahead, next_j, refill[0], refill[2], refill[3], places, feet, DUAL, PAGE, EXTRA_PAGE, REFILL, PLACES, IL)
                sync_threads()
            # the indices of the group's next refill: they are there before the rows that are asked for next
            later = next_j + REFILL * GROUPS
            if (later >= PLACES) & (later < refill[0][1]):
                ahead = load_indices(later, refill[0], refill[1], DUAL, REFILL, TILE_KEYS, IL)
        # The turn of a tile follows from the fetch of the tile before. Past the last tile nothing is asked for or told.
        my_turn, other_turn = turns
        if GROUPS == 2:
            if next_j < refill[0][1]:
                mbarrier.wait(my_turn, (i + G) & 1)
        raw, scale = fetch(next_j, refill, places, feet, rope, 0, ROWS, GROUPS, ROPES, WARPS, SCALES_ONCE, DUAL, PLACES)
        if GROUPS == 2:
            if next_j < refill[0][1]:
                mbarrier.arrive(other_turn, count=1)
        return raw, scale, ahead
    else:
        raw, scale = fetch(j, refill, places, feet, rope, q + 1, ROWS, GROUPS, ROPES, WARPS, SCALES_ONCE, DUAL, PLACES)
        return raw, scale, ahead


@gluon.jit
def producer(G: gl.constexpr, refill, places, feet, tiles, bars, placed, turns, ROWS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
             ROPES: gl.constexpr, WARPS: gl.constexpr, TILE_KEYS: gl.constexpr, SCALES_ONCE: gl.constexpr, FP16: gl.constexpr, DUAL: gl.constexpr, PAGE: gl.constexpr,
             EXTRA_PAGE: gl.constexpr, PLACES: gl.constexpr):
    """Group G of GROUPS takes every GROUPS-th tile. A warp never waits for a row while it asks for later ones: ptxas gives
    loads that overlap within a warp one scoreboard, so that the wait for the older would be one for the younger as well.

    Two groups ask for rows one after the other. Together they would halve the rate at which the first tile comes, while nothing
    else can be done, and later drift apart, so that one of them ends alone."""
    span, ids, kv_io, slot_counts = refill
    first, n, tiles_main, length, extra_length = span
    left, right, rope = tiles
    REFILL: gl.constexpr = PLACES // 2 if GROUPS == 1 else 1  # tiles whose places are looked up at a time
    ahead = gl.full([REFILL * 64], -1, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    if n > G:
        mbarrier.wait(placed, 0)
        my_turn, other_turn = turns
        if GROUPS == 2 and G == 1:
            mbarrier.wait(my_turn, 0)
        raw, scale = fetch(G, refill, places, feet, rope, 0, ROWS, GROUPS, ROPES, WARPS, SCALES_ONCE, DUAL, PLACES)
        if GROUPS == 2:
            mbarrier.arrive(other_turn, count=1)
        for i in range((n - G + GROUPS - 1) // GROUPS):
            for q in gl.static_range(TILE_KEYS // ROWS):
                raw, scale, ahead = produce_piece(i, raw, scale, ahead, refill, places, feet, tiles, bars, turns, G, q, ROWS, STAGES, GROUPS,
                                           ROPES, WARPS, REFILL, TILE_KEYS, SCALES_ONCE, FP16, DUAL, PAGE, EXTRA_PAGE, PLACES)


# ---------------------------------------------------------------------------------------------- consumers


@gluon.jit
def as_output(tile, ROWS: gl.constexpr, COLS: gl.constexpr, HB: gl.constexpr):
    """A 16-bit tile [64, COLS] of a stage as fp32 [ROWS, HB], rows fastest. The swizzle keeps both sides free of bank conflicts:
    accumulators are written 8 rows x 4 heads at a time, and read 16 bytes to a lane, 4 x 8 rows of 2 heads at a time."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [0, 1])
    return reinterpret(tile, gl.float32, [32 * COLS // HB // ROWS, ROWS, HB], layout).index(0)


@gluon.jit
def merged(tile, mine, other, has_mine, has_other, w_mine, w_other, ROWS: gl.constexpr, COLS: gl.constexpr, HB: gl.constexpr, CONSUMERS: gl.constexpr, OL: gl.constexpr):
    """Weighted sum of what the consumers left in their stages, in a layout that stores 16 bytes per thread."""
    o = gl.zeros([ROWS, HB], gl.float32, OL)
    if has_mine:
        o = as_output(tile.index(mine), ROWS, COLS, HB).load(OL) * gl.convert_layout(w_mine, gl.SliceLayout(0, OL))[None, :]
    if CONSUMERS == 2:
        if has_other:
            o += as_output(tile.index(other), ROWS, COLS, HB).load(OL) * gl.convert_layout(w_other, gl.SliceLayout(0, OL))[None, :]
    return o


@gluon.jit
def write_columns(row, stride_h, head, n_heads, o, dims, keep, OL: gl.constexpr):
    """o [columns, HB] to out[head, dim of the column]."""
    ptr = row + ((head.to(gl.int64) * stride_h)[None, :] + dims[:, None])
    gl.store(ptr, o.to(row.dtype.element_ty), mask=(head < n_heads)[None, :] & keep[:, None])


@gluon.constexpr_function
def pairs_layout(HB):
    """[512 dims, HB]: the accumulators' order of both latent tiles, but that a lane has two neighbouring dims, so that 8 lanes
    fill a sector of 16 dims in 16 bits: 8 of each tile."""
    heads = [[0, 8 << i] for i in range((HB // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1, 0], [0, 1], [16, 0], *heads, [128, 0], [256, 0]], [[0, 2], [0, 4], [8, 0], [2, 0], [4, 0]], [[32, 0], [64, 0]], [], [512, HB]
    )


@gluon.jit
def write_pairs(row, block, n_heads, ol, o_r, HB: gl.constexpr):
    """A part's latent columns in 16 bits, in the order of the dims."""
    o = gl.join(ol.to(row.dtype.element_ty), o_r.to(row.dtype.element_ty)).reshape([32, 8, HB, 2]).permute((0, 3, 1, 2)).reshape([512, HB])
    PL: gl.constexpr = pairs_layout(HB)
    o = gl.convert_layout(o, PL)
    head = block * HB + gl.arange(0, HB, gl.SliceLayout(0, PL))
    dim = gl.arange(0, 512, gl.SliceLayout(1, PL))
    gl.store(row + ((head.to(gl.int64) * 512)[None, :] + dim[:, None]), o, mask=(head < n_heads)[None, :] & (dim < LATENT)[:, None])


@gluon.jit
def row_pairs(x, HB: gl.constexpr):
    """[64, HB] -> two of [4, 8, HB]: the rows that a thread holds, apart. Their sum stays in its registers."""
    return gl.split(x.reshape([4, 2, 8, HB]).permute((0, 2, 3, 1)))


@gluon.constexpr_function
def warps_layout(HB):
    """[4 warps, HB]: a lane has all warps' values of the heads that it has in an accumulator."""
    heads = [[0, 1]] + [[0, 8 << i] for i in range((HB // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout([[1, 0], [2, 0], *heads], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, HB])


@gluon.jit
def max_of_keys(x, room, HB: gl.constexpr, HL: gl.constexpr):
    """gl.max(x, 0), which meets twice, with one meeting of the warps: each leaves its maxima, and each lane takes all four."""
    room.store(gl.max(x.reshape([4, 16, HB]), 1))
    return gl.convert_layout(gl.max(room.load(warps_layout(HB)), 0), HL)


@gluon.jit
def sum_of_keys(x, room, HB: gl.constexpr, HL: gl.constexpr):
    """gl.sum(x, 0), likewise."""
    room.store(gl.sum(x.reshape([4, 16, HB]), 1))
    return gl.convert_layout(gl.sum(room.load(warps_layout(HB)), 0), HL)


@gluon.jit
def first_consumer(early, refill, feet, placed, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs, stats, bars,
                   FP16: gl.constexpr, HB: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROPES: gl.constexpr,
                   TILE_KEYS: gl.constexpr, SPLIT: gl.constexpr, PLACES: gl.constexpr, FIRST: gl.constexpr, COPIES_FIRST: gl.constexpr, DUAL: gl.constexpr,
                   PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr):
    """Consumer 0, in the warps that asked for the indices and for Q: as these arrive, places and Q go to shared memory."""
    IL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index0, index1, index2, xl, xr, xo = early
    span, ids, kv_io, slot_counts = refill
    first, n, tiles_main, length, extra_length = span
    post_places(index0, 0, span, kv_io, slot_counts, places, feet, DUAL, PAGE, EXTRA_PAGE, FIRST, PLACES, IL)
    mbarrier.arrive(placed, count=1)
    if PLACES > FIRST:
        if n > FIRST:
            post_places(index1, FIRST, span, kv_io, slot_counts, places, feet, DUAL, PAGE, EXTRA_PAGE, FIRST, PLACES, IL)
            if PLACES >= 32:
                if n > 16:
                    post_places(index2, 16, span, kv_io, slot_counts, places, feet, DUAL, PAGE, EXTRA_PAGE, 16, PLACES, IL)
    ql, qr, qo = queries
    # In a branch, so that the compiler does not move the conversion up: the places, and the meeting that starts the other
    # partitions, would wait for Q.
    if n > 0:
        ql.index(0).store(xl.to(ql.dtype))
        qr.index(0).store(xr.to(qr.dtype))
        if ROPE:
            qo.index(0).store(xo)
    fence_async_shared()
    if CONSUMERS == 2:
        full, empty, ready_mine, ready_other, q_there = bars
        mbarrier.arrive(q_there, count=1)
    consumer(0, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs, stats, bars, FP16, HB, CONSUMERS, STAGES,
             ROPES, TILE_KEYS, SPLIT, PLACES)


@gluon.jit
def consumer(W: gl.constexpr, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs, stats, bars, FP16: gl.constexpr, HB: gl.constexpr,
             CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ROPES: gl.constexpr, TILE_KEYS: gl.constexpr, SPLIT: gl.constexpr, PLACES: gl.constexpr):
    """Consumer W takes every CONSUMERS-th tile of the item."""
    t, split, splits, block, n = item
    left, right, rope = tiles
    ql, qr, qo = queries
    p_latent, p_rope = probs
    full, empty, ready_mine, ready_other, q_there = bars
    s_q, n_heads, out, out_stride_b, out_stride_s, out_stride_h, part_out = out_io
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HB, 16])
    HL: gl.constexpr = gl.SliceLayout(0, SL)
    # One consumer writes a part's columns as they lie in its accumulators, 32 bytes of fp32 at a time
    DIRECT: gl.constexpr = SPLIT and CONSUMERS == 1
    # Lanes side by side fill whole sectors of 32 bytes: 16 bytes each, in fp32 two lanes to 8 neighbouring dims
    WIDE: gl.constexpr = SPLIT and part_out.dtype.element_ty == gl.float32
    OL: gl.constexpr = SL if DIRECT else gl.BlockedLayout([4 if WIDE else 8, 1], [8 if WIDE else 4, 4 if WIDE else 8], [4, 1], [0, 1])
    OH: gl.constexpr = gl.SliceLayout(0, OL)
    if W == 1:
        mbarrier.wait(q_there, 0)
    # The sum of an item of a tile or two is taken while values are multiplied; else per thread, and once across them at the end
    SUM_EACH: gl.constexpr = CONSUMERS == 1 and PLACES <= 4
    own = n if CONSUMERS == 1 else (n + 1 - W) // 2  # my tiles
    m = gl.full([HB], LOWEST, gl.float32, HL)
    ROWS4: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    maxima = gl.allocate_shared_memory(gl.float32, [4, HB], ROWS4)
    sums = maxima
    if SUM_EACH:
        sums = gl.allocate_shared_memory(gl.float32, [4, HB], ROWS4)
    if SUM_EACH:
        l = gl.zeros([HB], gl.float32, HL)  # summed up in each tile, while its values are multiplied
    else:
        l, _ = row_pairs(gl.zeros([64, HB], gl.float32, SL), HB)  # per thread, summed up once at the end
    al = gl.zeros([256, HB], gl.float32, SL)
    ar = gl.zeros([256, HB], gl.float32, SL)
    ax = gl.zeros([64, HB], gl.float32, SL)
    for i in range(own):
        z = opaque_zero(i)
        j = CONSUMERS * i + W
        st = j % STAGES + z
        s = gl.zeros([64, HB], gl.float32, SL)
        there = (j // STAGES) & 1
        mbarrier.wait(full.index(st), there)
        fence_async_shared()  # the producer's writes by the generic proxy -> reads of wgmma
        s = warpgroup_mma(left.index(st), ql.index(z).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(right.index(st), qr.index(z).permute((1, 0)), s, is_async=True)
        if ROPE:
            s = warpgroup_mma(rope.index(j % ROPES + z), qo.index(z).permute((1, 0)), s, is_async=True)
        valid = places.index(j % PLACES).load(gl.SliceLayout(1, SL)) >= 0
        s = warpgroup_mma_wait(0, deps=[s])
        x = gl.where(valid[:, None], s * scale_log2, float("-inf"))
        m_new = gl.maximum(m, max_of_keys(x, maxima, HB, HL))
        alpha = exp2(m - m_new)
        p = exp2(x - m_new[None, :])
        p_latent.store(p.to(p_latent.dtype))
        if FP16:
            p_rope.store(p.to(gl.bfloat16))  # rope stays bf16
        fence_async_shared()
        al = al * alpha[None, :]
        al = warpgroup_mma(left.index(st).slice(0, TILE_KEYS).permute((1, 0)), p_latent.slice(0, TILE_KEYS), al, is_async=True)
        ar = ar * alpha[None, :]
        ar = warpgroup_mma(right.index(st).slice(0, TILE_KEYS).permute((1, 0)), p_latent.slice(0, TILE_KEYS), ar, is_async=True)
        ax = ax * alpha[None, :]
        ax = warpgroup_mma(rope.index(j % ROPES + z).slice(0, TILE_KEYS).permute((1, 0)), p_rope.slice(0, TILE_KEYS), ax, is_async=True)
        if SUM_EACH:
            l = l * alpha + sum_of_keys(p, sums, HB, HL)
        else:
            alpha_rows, _ = row_pairs(gl.broadcast(alpha[None, :], p)[0], HB)
            p_rows, p_others = row_pairs(p, HB)
            l = l * alpha_rows + (p_rows + p_others)
        m = m_new
        al, ar, ax = warpgroup_mma_wait(0, deps=[al, ar, ax])
        mbarrier.arrive(empty.index(st), count=1)

    if CONSUMERS == 1:
        let_merge_start(SPLIT)
    # ---- the item's end: accumulators through my last stage, half of the columns for each consumer
    mine = (W + CONSUMERS * (own - 1)) % STAGES
    mine_rope = (W + CONSUMERS * (own - 1)) % ROPES
    other = mine
    other_rope = mine_rope
    others = 0
    if CONSUMERS == 2:
        others = n - own
        other = (1 - W + 2 * (others - 1)) % STAGES
        other_rope = (1 - W + 2 * (others - 1)) % ROPES
    if (own > 0) & (not DIRECT):
        as_output(left.index(mine), 256, 256, HB).store(al)
        as_output(right.index(mine), 256, 256, HB).store(ar)
        as_output(rope.index(mine_rope), 64, 64, HB).store(ax)
    w0 = gl.full([HB], 1.0, gl.float32, OH)
    w1 = w0
    if CONSUMERS == 2:
        stats.index(2 * W).store(m)
        stats.index(2 * W + 1).store(gl.sum(gl.sum(l, 1), 0))
        mbarrier.arrive(ready_mine, count=1)
        mbarrier.wait(ready_other, 0)
        m0 = stats.index(0).load(OH)
        m1 = stats.index(2).load(OH)
        top = gl.maximum(m0, m1)
        w0 = exp2(m0 - top)
        w1 = exp2(m1 - top)
        total = stats.index(1).load(OH) * w0 + stats.index(3).load(OH) * w1
    else:
        top = gl.convert_layout(m, OH)
        total = gl.convert_layout(l if SUM_EACH else gl.sum(gl.sum(l, 1), 0), OH)
    nothing = total == 0.0
    head = block * HB + gl.arange(0, HB, OH)
    batch = divided(t, s_q)
    b = batch.to(gl.int64)
    s_pos = (t - batch * s_q).to(gl.int64)
    if SPLIT:
        inv = gl.where(nothing, 0.0, reciprocal(total))
    else:
        sink, has_sink = sink_io
        sink2 = gl.load(sink + head, mask=(head < n_heads) & (has_sink != 0), other=float("-inf")) * LOG2E
        # a sink far above every key makes the total inf, and the output zero, as it should be
        inv = gl.where(nothing, 0.0, reciprocal(total + exp2(sink2 - top)))
    w_mine = (w0 if W == 0 else w1) * inv
    w_other = (w1 if W == 0 else w0) * inv
    if SPLIT:
        row = part_out + ((t.to(gl.int64) * splits + split) * n_heads) * 512
        stride_h = 512
    else:
        row = out + b * out_stride_b + s_pos * out_stride_s
        stride_h = out_stride_h
    if (n > 0) | (not SPLIT):  # a part without keys is not read
        col = gl.arange(0, 256, gl.SliceLayout(1, OL))
        PAIRS: gl.constexpr = DIRECT and part_out.dtype.element_ty == gl.float16
        if PAIRS:
            write_pairs(row, block, n_heads, al * w_mine[None, :], ar * w_mine[None, :], HB)
        else:
            if W == 0:
                d = dim_of(col, 0)
                if DIRECT:
                    o = al * w_mine[None, :]
                else:
                    o = merged(left, mine, other, own > 0, others > 0, w_mine, w_other, 256, 256, HB, CONSUMERS, OL)
                write_columns(row, stride_h, head, n_heads, o, d, d < LATENT, OL)
            if W == CONSUMERS - 1:
                d = dim_of(col, 1)
                if DIRECT:
                    o = ar * w_mine[None, :]
                else:
                    o = merged(right, mine, other, own > 0, others > 0, w_mine, w_other, 256, 256, HB, CONSUMERS, OL)
                write_columns(row, stride_h, head, n_heads, o, d, d < LATENT, OL)
        if W == CONSUMERS - 1:
            OX: gl.constexpr = SL if DIRECT else gl.BlockedLayout([4 if WIDE else 8, 1], [8 if WIDE else 4, 4 if WIDE else 8], [2, 2], [0, 1])
            if DIRECT:
                o = ax * w_mine[None, :]
            else:
                o = merged(rope, mine_rope, other_rope, own > 0, others > 0, w_mine, w_other, 64, 64, HB, CONSUMERS, OX)
            d = LATENT + gl.arange(0, 64, gl.SliceLayout(1, OX))
            write_columns(row, stride_h, gl.convert_layout(head, gl.SliceLayout(0, OX)), n_heads, o, d, d >= LATENT, OX)
    if W == 0:
        # a NaN key leaves no trace in a maximum, but it does in the sum
        true_max = gl.where(total == total, gl.where(top == LOWEST, float("-inf"), top), float("nan"))
        lse2 = gl.where(nothing, float("-inf"), top + log2(total))
        write_stats(lse2, true_max, nothing, head, n_heads, t, split, splits, b, s_pos, stat_io, SPLIT)
        if CONSUMERS == 2:
            let_merge_start(SPLIT)


@gluon.jit
def write_stats(lse2, true_max, nothing, head, n_heads, t, split, splits, b, s_pos, stat_io, SPLIT: gl.constexpr):
    (lse, lse_stride_b, lse_stride_s, lse_stride_h, max_logits, max_stride_b, max_stride_s, max_stride_h, part_lse, part_max,
     lse_scale, empty_lse, has_lse, has_max) = stat_io
    exists = head < n_heads
    if SPLIT:
        part = (t.to(gl.int64) * splits + split) * n_heads + head
        gl.store(part_lse + part, lse2, mask=exists)
        gl.store(part_max + part, true_max, mask=exists & (has_max != 0))
    else:
        at = lse + b * lse_stride_b + s_pos * lse_stride_s + head.to(gl.int64) * lse_stride_h
        gl.store(at, gl.where(nothing, empty_lse, lse2 * (LN2 * lse_scale)), mask=exists & (has_lse != 0))
        at = max_logits + b * max_stride_b + s_pos * max_stride_s + head.to(gl.int64) * max_stride_h
        gl.store(at, true_max * LN2, mask=exists & (has_max != 0))


# ---------------------------------------------------------------------------------------------- kernel


@gluon.jit
def new_barriers(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


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
    HB: gl.constexpr,  # heads per item: 16 or 32
    CONSUMERS: gl.constexpr,  # 2, or 1 where an item is a tile or two
    STAGES: gl.constexpr,  # tiles in shared memory, at least CONSUMERS
    PRODUCERS: gl.constexpr,  # warps that gather
    ROWS: gl.constexpr,  # rows of a tile that a group holds in registers at a time
    FP16: gl.constexpr,  # latent part in fp16: only for scales in [6e-5, 146]; else bf16, right for every scale
    GROUPS: gl.constexpr,  # partitions that the producer's warps form, which take turns at the tiles
    PLACES: gl.constexpr,  # tiles whose rows' places are in shared memory: 4, 8, 16 or 32, at least twice STAGES
    DUAL: gl.constexpr,  # a second cache under the same softmax
    SPLIT: gl.constexpr,  # write normalised parts for combine.py
    PAGE: gl.constexpr,  # 0: page, else the exact number; likewise the next
    EXTRA_PAGE: gl.constexpr,
    SCALES_ONCE: gl.constexpr,  # each scale of a row is loaded by one lane, which gives it to the others; else by all lanes that want it
    TILE_KEYS: gl.constexpr,  # keys of a tile: 64, or 32 of the 64 rows, where items are few and of one tile
):
    KT: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    WARPS: gl.constexpr = PRODUCERS // GROUPS
    # Rope tiles that are on their way or in use: those of the stages, and one that each group has asked for ahead

    ROPES: gl.constexpr = STAGES + GROUPS
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)  # the same bytes, seen as int32
    VEC: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HB], gl.float16)
    BL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    IL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])

    # What everything waits for: the item's length, then its indices, and Q beside them.
    head_blocks = (n_heads + HB - 1) // HB
    t = divided(gl.program_id(0), head_blocks)
    block = gl.program_id(0) - t * head_blocks
    split = gl.program_id(1)
    lens = (lengths, extra_lengths, topk, extra_topk, len_per, has_len, has_extra_len)
    first, n, tiles_main, length, extra_length = tiles_of(t, split, splits, lens, DUAL, SPLIT, TILE_KEYS)
    span = (first, n, tiles_main, length, extra_length)
    batch = divided(t, s_q)
    b = batch.to(gl.int64)
    s_pos = (t - batch * s_q).to(gl.int64)
    main_ids = indices + b * idx_stride_b + s_pos * idx_stride_s
    ids = (main_ids, main_ids)
    if DUAL:
        ids = (main_ids, extra_indices + b * extra_idx_stride_b + s_pos * extra_idx_stride_s)
    # The producers start when the first of these are there. They ask for a later tile's when a consumer has ended a tile, which
    # it began behind all of them: STAGES + 2 tiles on at most.
    FIRST: gl.constexpr = 8 if PLACES >= 8 else PLACES
    # bf16: consumer 0 copies the first tile. With three stages the other consumer would wait for a later tile of its stage, and
    # nothing but the order of the producer's copies tells it that the first was there before.
    COPIES_FIRST: gl.constexpr = False
    index0 = load_indices(0, span, ids, DUAL, FIRST, TILE_KEYS, IL)
    index1 = index0
    index2 = index0
    if PLACES >= 16:
        index1 = load_indices(8, span, ids, DUAL, 8, TILE_KEYS, IL)
    if PLACES >= 32:
        index2 = load_indices(16, span, ids, DUAL, 16, TILE_KEYS, IL)
    head = block * HB + gl.arange(0, HB, gl.SliceLayout(1, BL))
    mask = (head < n_heads)[:, None]
    col = gl.arange(0, 256, gl.SliceLayout(0, BL))
    row = q + b * q_stride_b + s_pos * q_stride_s + (head.to(gl.int64) * q_stride_h)[:, None]
    # columns without a dim (v4 has 448 in 512) are zero in Q and in K
    xl = gl.load(row + dim_of(col, 0)[None, :], mask=mask & (dim_of(col, 0) < LATENT)[None, :], other=0.0)
    xr = gl.load(row + dim_of(col, 1)[None, :], mask=mask & (dim_of(col, 1) < LATENT)[None, :], other=0.0)

    left = gl.allocate_shared_memory(KT, [STAGES, 64, 256], TILE)
    right = gl.allocate_shared_memory(KT, [STAGES, 64, 256], TILE)
    ql = gl.allocate_shared_memory(KT, [1, HB, 256], TILE)
    qr = gl.allocate_shared_memory(KT, [1, HB, 256], TILE)
    rope = left
    qo = ql
    xo = xl
    if ROPE:
        rope = gl.allocate_shared_memory(gl.bfloat16, [ROPES, 64, 64], TILE)
        qo = gl.allocate_shared_memory(gl.bfloat16, [1, HB, 64], TILE)
        xo = gl.load(row + (LATENT + gl.arange(0, 64, gl.SliceLayout(0, BL)))[None, :], mask=mask, other=0.0)
    places = gl.allocate_shared_memory(gl.int64, [PLACES, 64], VEC)
    feet = places
    feet = gl.allocate_shared_memory(gl.int64, [PLACES, 64], VEC)
    stats = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, HB], VEC)
    full = new_barriers(STAGES, 1 + 32 * WARPS)
    empty = new_barriers(STAGES, 1)
    p0 = gl.allocate_shared_memory(KT, [64, HB], PL)
    probs0 = (p0, p0)
    if FP16:
        probs0 = (p0, gl.allocate_shared_memory(gl.bfloat16, [64, HB], PL))

    slot_counts = (slots, extra_slots)
    kv_io = (kv, page_stride, page, extra_kv, extra_page_stride, extra_page)
    tiles_out = (reinterpret(left, gl.int32, [STAGES, 64, 128], WORDS), reinterpret(right, gl.int32, [STAGES, 64, 128], WORDS),
                 reinterpret(rope, gl.int32, [ROPES, 64, 32], WORDS))
    item = (t, split, splits, block, n)
    out_io = (s_q, n_heads, out, out_stride_b, out_stride_s, out_stride_h, part_out)
    stat_io = (lse, lse_stride_b, lse_stride_s, lse_stride_h, max_logits, max_stride_b, max_stride_s, max_stride_h, part_lse, part_max,
               lse_scale, empty_lse, has_lse, has_max)
    sink_io = (sink, has_sink)
    tiles = (left, right, rope)
    queries = (ql, qr, qo)
    early = (index0, index1, index2, xl, xr, xo)
    placed = new_barriers(1, 1).index(0)
    refill = (span, ids, kv_io, slot_counts)
    # Registers per thread: 64 K over all warps. The default partition, consumer 0, gets what the others leave.
    R_PRODUCER: gl.constexpr = 120 if GROUPS == 2 or (CONSUMERS == 1 and PRODUCERS == 8) else 112 if PRODUCERS == 8 or CONSUMERS == 1 else (120 if HB == 16 else 72 if V_ROPE else 88)
    R_CONSUMER: gl.constexpr = 136 if GROUPS == 2 else 144 if PRODUCERS == 8 else (192 if HB == 16 else 216 if V_ROPE else 208)

    if CONSUMERS == 2:
        q_there = new_barriers(1, 1).index(0)
        ready0 = new_barriers(1, 1)
        ready1 = new_barriers(1, 1)
        p1 = gl.allocate_shared_memory(KT, [64, HB], PL)
        probs1 = (p1, p1)
        if FP16:
            probs1 = (p1, gl.allocate_shared_memory(gl.bfloat16, [64, HB], PL))
        bars0 = (full, empty, ready0.index(0), ready1.index(0), q_there)
        bars1 = (full, empty, ready1.index(0), ready0.index(0), q_there)
        if GROUPS == 2:
            turn0 = new_barriers(1, 1).index(0)
            turn1 = new_barriers(1, 1).index(0)
            gl.warp_specialize([
                (first_consumer, (early, refill, feet, placed, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs0, stats, bars0, FP16, HB, CONSUMERS, STAGES,
                            ROPES, TILE_KEYS, SPLIT, PLACES, FIRST, COPIES_FIRST, DUAL, PAGE, EXTRA_PAGE)),
                (consumer, (1, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs1, stats, bars1, FP16, HB, CONSUMERS, STAGES,
                            ROPES, TILE_KEYS, SPLIT, PLACES)),
                (producer, (0, refill, places, feet, tiles_out, (full, empty), placed, (turn0, turn1), ROWS, STAGES, GROUPS, ROPES, WARPS, TILE_KEYS, SCALES_ONCE, FP16, DUAL, PAGE, EXTRA_PAGE,
                       PLACES)),
                (producer, (1, refill, places, feet, tiles_out, (full, empty), placed, (turn1, turn0), ROWS, STAGES, GROUPS, ROPES, WARPS, TILE_KEYS, SCALES_ONCE, FP16, DUAL, PAGE, EXTRA_PAGE,
                       PLACES)),
            ], [4, WARPS, WARPS], [R_CONSUMER, R_PRODUCER, R_PRODUCER])
        else:
            gl.warp_specialize([
                (first_consumer, (early, refill, feet, placed, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs0, stats, bars0, FP16, HB, CONSUMERS, STAGES,
                            ROPES, TILE_KEYS, SPLIT, PLACES, FIRST, COPIES_FIRST, DUAL, PAGE, EXTRA_PAGE)),
                (consumer, (1, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs1, stats, bars1, FP16, HB, CONSUMERS, STAGES,
                            ROPES, TILE_KEYS, SPLIT, PLACES)),
                (producer, (0, refill, places, feet, tiles_out, (full, empty), placed, (placed, placed), ROWS, STAGES, GROUPS, ROPES, WARPS, TILE_KEYS, SCALES_ONCE, FP16, DUAL, PAGE, EXTRA_PAGE,
                       PLACES)),
            ], [4, WARPS], [R_CONSUMER, R_PRODUCER])
    else:
        bars = (full, empty, placed, placed, placed)
        gl.warp_specialize([
            (first_consumer, (early, refill, feet, placed, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs0, stats, bars, FP16, HB, CONSUMERS, STAGES,
                        ROPES, TILE_KEYS, SPLIT, PLACES, FIRST, COPIES_FIRST, DUAL, PAGE, EXTRA_PAGE)),
            (producer, (0, refill, places, feet, tiles_out, (full, empty), placed, (placed, placed), ROWS, STAGES, GROUPS, ROPES, WARPS, TILE_KEYS, SCALES_ONCE, FP16, DUAL, PAGE, EXTRA_PAGE,
                       PLACES)),
        ], [WARPS], [R_PRODUCER])
