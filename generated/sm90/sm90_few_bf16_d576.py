"""Sparse-MLA attention over the bf16_d576 KV cache for few heads: family "sm90_few", Gluon, emitted for sm90.

out[t, h] = sum_j exp(x_j) v_j / (sum_j exp(x_j) + exp(sink[h])),  x_j = sm_scale * <q[t, h], k_j>,  v_j = k_j[:512]
over the slots j that `indices` selects for token t, from one cache or from two under the same softmax.

The matrix unit wants 64 rows on its M side. With few heads these rows are keys, and HB heads lie on the N side:
    S^T [64 keys, HB] = K [64, d] Q^T [d, HB]         O^T [512, HB] += V^T [512, 64] P^T [64, HB]
so that the output accumulator takes 4 * HB registers per thread and the kernel is a gather first of all.

An item is (token, split, block of HB heads), one per program; its keys are cut into tiles of 64, the main cache's first, or of
32 of a tile's 64 rows (TILE_KEYS), the others of which nobody reads but the scores. With one consumer and 128 registers per
thread (maxnreg) an SM holds two programs.

Four warps ask for the item's indices and for Q before anything else. Then the partitions start, and consumer 0, in the same
warps, copies the first tile, checks the indices as they come, divides them by the page size and leaves the place of each row in shared
memory (`places`, PLACES tiles of 64), then Q. An item with more tiles gets the later places from the producer. Partitions:

    producer   PRODUCERS warps: issue cp.async of rows straight into the tiles; nothing to convert
    consumer   1 or 2 warpgroups, taking turns at the tiles: scores, softmax, values. With two, each has its own running
               maximum and sums; at the end they exchange them, and each writes one half of the output columns

Barriers (count of arrivals per phase):
    placed           1          consumer 0 -> producer: the first places are there
    q_there          1          consumer 0 -> consumer 1: Q is there, and so are all of the first PLACES places
    full_l[stage], full_r[stage]    threads of the producer -> consumer: the left half of the tile is there; the right one and rope
                                    (the first tile: as many threads of consumer 0, which copy it)
    empty_l[stage], empty_r[stage]  1, consumer -> producer: done with the left half; with the tile, and with its places
    ready            1          consumer W -> the other: my accumulators are in my last stage

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
LAYOUT = 'bf16_d576'
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
ROW_BYTES = gl.constexpr(1152)
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(True)  # dims that have a tile of their own
V_ROPE = gl.constexpr(False)  # they belong to V as well


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
    return col + 256 * h


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
    """Check indices and leave the place of each row, its index; -1: not valid."""
    first, n, tiles_main, length, extra_length = span
    slots, extra_slots = slot_counts
    VEC: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    in_extra = (first + tile) * 64 + gl.arange(0, TILES * 64, IL) >= tiles_main * 64
    n_slots = slots
    if DUAL:
        n_slots = gl.where(in_extra, extra_slots, slots)
    valid = (index >= 0) & (index < n_slots)
    at = (tile % PLACES) // TILES
    reinterpret(places, gl.int32, [PLACES // TILES, TILES * 64], VEC).index(at).store(gl.where(valid, index, -1))


@gluon.jit
def more_places(tile, refill, places, feet, DUAL: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, PLACES: gl.constexpr,
                TILES: gl.constexpr, TILE_KEYS: gl.constexpr, WARPS: gl.constexpr):
    """The producer's part, where an item has more than PLACES tiles: the places of TILES tiles from `tile` on."""
    span, ids, kv_io, slot_counts = refill
    IL: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    index = load_indices(tile, span, ids, DUAL, TILES, TILE_KEYS, IL)
    post_places(index, tile, span, kv_io, slot_counts, places, feet, DUAL, PAGE, EXTRA_PAGE, TILES, PLACES, IL)
    sync_threads()


# ---------------------------------------------------------------------------------------------- producer


@gluon.jit
def producer(refill, places, tiles, bars, placed, STAGES: gl.constexpr, PRODUCERS: gl.constexpr, COPIES_FIRST: gl.constexpr, TILE_KEYS: gl.constexpr, DUAL: gl.constexpr, PLACES: gl.constexpr):
    span, ids, kv_io, slot_counts = refill
    first, n, tiles_main, length, extra_length = span
    kv, row_stride, extra_kv, extra_row_stride = kv_io
    full_l, full_r, empty_l, empty_r = bars
    left, right, rope = tiles
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PRODUCERS, 1], [1, 0])  # 16 bytes per thread, 128 per row segment
    col = gl.arange(0, 256, gl.SliceLayout(0, LR))
    mbarrier.wait(placed, 0)
    for j in range(1 if COPIES_FIRST else 0, n):
        if (j >= PLACES) & (j % (PLACES // 2) == 0):
            more_places(j, refill, places, places, DUAL, 0, 0, PLACES, PLACES // 2, TILE_KEYS, PRODUCERS)
        base = kv
        stride = row_stride.to(gl.int64)
        if DUAL:
            in_extra = first + j >= tiles_main
            stride = gl.where(in_extra, extra_row_stride.to(gl.int64), stride)
            if in_extra:
                base = extra_kv
        index = places.index(j % PLACES).slice(0, TILE_KEYS).load(gl.SliceLayout(1, LR))
        valid = (index >= 0)[:, None]
        row = (base + gl.where(index >= 0, index, 0).to(gl.int64) * stride)[:, None]
        st = j % STAGES
        free = ((j // STAGES) & 1) ^ 1
        mbarrier.wait(empty_l.index(st), free)
        copy_async(left.index(st).slice(0, TILE_KEYS), row + col[None, :], mask=valid)
        async_copy.mbarrier_arrive(full_l.index(st), increment_count=False)
        mbarrier.wait(empty_r.index(st), free)
        copy_async(right.index(st).slice(0, TILE_KEYS), row + (256 + col)[None, :], mask=valid)
        if ROPE:
            copy_async(rope.index(st).slice(0, TILE_KEYS), row + (512 + gl.arange(0, 64, gl.SliceLayout(0, LR)))[None, :], mask=valid)
        async_copy.mbarrier_arrive(full_r.index(st), increment_count=False)


@gluon.jit
def copy_first(refill, tiles, full_l, full_r, TILE_KEYS: gl.constexpr, DUAL: gl.constexpr):
    """The item's first tile, by the warps that ask for its indices: these go into the copies' addresses without a hand-over
    through shared memory."""
    span, ids, kv_io, slot_counts = refill
    first, n, tiles_main, length, extra_length = span
    kv, row_stride, extra_kv, extra_row_stride = kv_io
    n_slots, extra_slots = slot_counts
    left, right, rope = tiles
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pos = first * TILE_KEYS + gl.arange(0, TILE_KEYS, gl.SliceLayout(1, LR))
    bound = length
    base = kv
    stride = row_stride.to(gl.int64)
    ptr = ids[0]
    if DUAL:
        if first >= tiles_main:
            pos -= tiles_main * TILE_KEYS
            bound = extra_length
            n_slots = extra_slots
            base = extra_kv
            stride = extra_row_stride.to(gl.int64)
            ptr = ids[1]
    index = gl.load(ptr + pos, mask=pos < bound, other=-1)
    exists = (index >= 0) & (index < n_slots)
    valid = exists[:, None]
    col = gl.arange(0, 256, gl.SliceLayout(0, LR))
    row = (base + gl.where(exists, index, 0).to(gl.int64) * stride)[:, None]
    copy_async(left.index(0).slice(0, TILE_KEYS), row + col[None, :], mask=valid)
    async_copy.mbarrier_arrive(full_l.index(0), increment_count=False)
    copy_async(right.index(0).slice(0, TILE_KEYS), row + (256 + col)[None, :], mask=valid)
    if ROPE:
        copy_async(rope.index(0).slice(0, TILE_KEYS), row + (512 + gl.arange(0, 64, gl.SliceLayout(0, LR)))[None, :], mask=valid)
    async_copy.mbarrier_arrive(full_r.index(0), increment_count=False)


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
    if COPIES_FIRST:
        if n > 0:
            copy_first(refill, tiles, bars[0], bars[1], TILE_KEYS, DUAL)
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
        full_l, full_r, empty_l, empty_r, ready_mine, ready_other, q_there = bars
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
    full_l, full_r, empty_l, empty_r, ready_mine, ready_other, q_there = bars
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
    for i in range(own):
        z = opaque_zero(i)
        j = CONSUMERS * i + W
        st = j % STAGES + z
        s = gl.zeros([64, HB], gl.float32, SL)
        there = (j // STAGES) & 1
        mbarrier.wait(full_l.index(st), there)
        fence_async_shared()  # the producer's writes by the generic proxy -> reads of wgmma
        s = warpgroup_mma(left.index(st), ql.index(z).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(full_r.index(st), there)
        fence_async_shared()
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
        fence_async_shared()
        al = al * alpha[None, :]
        al = warpgroup_mma(left.index(st).slice(0, TILE_KEYS).permute((1, 0)), p_latent.slice(0, TILE_KEYS), al, is_async=True)
        ar = ar * alpha[None, :]
        ar = warpgroup_mma(right.index(st).slice(0, TILE_KEYS).permute((1, 0)), p_latent.slice(0, TILE_KEYS), ar, is_async=True)
        al = warpgroup_mma_wait(1, deps=[al])  # the right half goes on
        mbarrier.arrive(empty_l.index(st), count=1)
        if SUM_EACH:
            l = l * alpha + sum_of_keys(p, sums, HB, HL)
        else:
            alpha_rows, _ = row_pairs(gl.broadcast(alpha[None, :], p)[0], HB)
            p_rows, p_others = row_pairs(p, HB)
            l = l * alpha_rows + (p_rows + p_others)
        m = m_new
        ar = warpgroup_mma_wait(0, deps=[ar])
        mbarrier.arrive(empty_r.index(st), count=1)

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
        PAIRS: gl.constexpr = False
        if PAIRS:
            pass
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
    ROWS: gl.constexpr,  # not used: bf16 rows go by cp.async
    FP16: gl.constexpr,  # not used: bf16 rows stay bf16
    GROUPS: gl.constexpr,  # not used
    PLACES: gl.constexpr,  # tiles whose rows' places are in shared memory: 4, 8, 16 or 32, at least twice STAGES
    DUAL: gl.constexpr,  # a second cache under the same softmax
    SPLIT: gl.constexpr,  # write normalised parts for combine.py
    PAGE: gl.constexpr,  # 0: page, else the exact number; likewise the next
    EXTRA_PAGE: gl.constexpr,
    SCALES_ONCE: gl.constexpr,  # not used
    TILE_KEYS: gl.constexpr,  # keys of a tile: 64, or 32 of the 64 rows, where items are few and of one tile
):
    KT: gl.constexpr = gl.bfloat16
    WARPS: gl.constexpr = PRODUCERS // GROUPS
    # Rope tiles that are on their way or in use: those of the stages

    ROPES: gl.constexpr = STAGES
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
    COPIES_FIRST: gl.constexpr = STAGES % CONSUMERS == 0 and PRODUCERS == 4
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
    places = gl.allocate_shared_memory(gl.int32, [PLACES, 64], VEC)
    feet = places
    stats = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, HB], VEC)
    full_l = new_barriers(STAGES, 32 * WARPS)
    full_r = new_barriers(STAGES, 32 * WARPS)
    empty_l = new_barriers(STAGES, 1)
    empty_r = new_barriers(STAGES, 1)
    p0 = gl.allocate_shared_memory(KT, [64, HB], PL)
    probs0 = (p0, p0)

    slot_counts = (slots, extra_slots)
    kv_io = (kv, page_stride, extra_kv, extra_page_stride)
    tiles_out = (left, right, rope)
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
    R_PRODUCER: gl.constexpr = 72
    R_CONSUMER: gl.constexpr = 216

    if CONSUMERS == 2:
        q_there = new_barriers(1, 1).index(0)
        ready0 = new_barriers(1, 1)
        ready1 = new_barriers(1, 1)
        p1 = gl.allocate_shared_memory(KT, [64, HB], PL)
        probs1 = (p1, p1)
        bars0 = (full_l, full_r, empty_l, empty_r, ready0.index(0), ready1.index(0), q_there)
        bars1 = (full_l, full_r, empty_l, empty_r, ready1.index(0), ready0.index(0), q_there)
        gl.warp_specialize([
            (first_consumer, (early, refill, feet, placed, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs0, stats, bars0, FP16, HB, CONSUMERS, STAGES,
                        ROPES, TILE_KEYS, SPLIT, PLACES, FIRST, COPIES_FIRST, DUAL, PAGE, EXTRA_PAGE)),
            (consumer, (1, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs1, stats, bars1, FP16, HB, CONSUMERS, STAGES,
                        ROPES, TILE_KEYS, SPLIT, PLACES)),
            (producer, (refill, places, tiles_out, (full_l, full_r, empty_l, empty_r), placed, STAGES, PRODUCERS, COPIES_FIRST, TILE_KEYS, DUAL, PLACES)),
        ], [4, WARPS], [R_CONSUMER, R_PRODUCER])
    else:
        bars = (full_l, full_r, empty_l, empty_r, placed, placed, placed)
        gl.warp_specialize([
            (first_consumer, (early, refill, feet, placed, scale_log2, out_io, stat_io, sink_io, item, places, tiles, queries, probs0, stats, bars, FP16, HB, CONSUMERS, STAGES,
                        ROPES, TILE_KEYS, SPLIT, PLACES, FIRST, COPIES_FIRST, DUAL, PAGE, EXTRA_PAGE)),
            (producer, (refill, places, tiles_out, (full_l, full_r, empty_l, empty_r), placed, STAGES, PRODUCERS, COPIES_FIRST, TILE_KEYS, DUAL, PLACES)),
        ], [WARPS], [R_PRODUCER])
