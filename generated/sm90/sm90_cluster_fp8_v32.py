"""Sparse-MLA attention over the v32 KV cache: family "sm90_cluster_fp8", Gluon for Hopper, emitted for sm90.

out[t, h] = sum_j exp(x_j) v_j / (sum_j exp(x_j) + exp(sink[h])),  x_j = sm_scale * <q[t, h], k_j>,  v_j = k_j[:512]
over the slots j that `indices` selects for token t, from one cache or from two under the same softmax. sm_scale must be
positive. 65 to 128 heads.

Two CTAs of a cluster serve one item (token, split): CTA r has heads 64 r .. 64 r + 63. Both need the same keys, so each gathers and
dequantises half of them, keys 32 r .. 32 r + 31 of every tile of 64, writes them into its own tile and copies them into
the other CTA's. A cluster walks over items with stride num_programs (programs are clusters here). An item's keys are
taken in pairs of tiles of 64; a tile belongs to one cache, the main cache's tiles come first. Tiles beyond the length are not
visited, but an item without a key has one pair, fully masked. Three partitions of warps in each CTA:

  producer     gathers fp8 rows through registers, dequantises them into four halves of 32 KB: tile 0 and tile 1, each cut
               into the left half (dims 0..255) and the right half (256..511, with the 64 rope dims). Shared
               memory is full: a half is refilled when its last reader in both CTAs has left it. The loads of the next half are in
               flight meanwhile, and the addresses of the next pair known, across items as well. Rope dims, indices and
               bits of validity are every CTA's own business
  left group   S0 = softmax(Q K0^T), holds O[:, :256]:  O += S0 V0 (S0 from registers), O += S1 V1 (S1 from shared memory)
  right group  S1 = softmax(Q K1^T), holds O[:, 256:]:  O += S0 V0 (S0 from shared memory), O += S1 V1

Both groups take tile 0 before tile 1, so that a pair needs two hand-overs: the left group publishes S0 and its maximum, the
right group derives its own maximum from that one and publishes S1. With fp16 latents each group turns its half of Q, which
is copied as bf16, into fp16 where it lies.

  barrier          signalled by                     when                                     read by
  free_q           both groups                      their last scores of the item are done   producer
  full_q           producer                         Q of an item has arrived                 left, right
  half_q_l, _r     left, right                      its half of Q is converted (fp16)        right, left
  full_0l .. _1r   producer, bytes of the other     a half is dequantised here and the       left 0l 0r, right 1l 1r
                   CTA's copy                       other CTA's rows of it are here; with
                                                    the right halves the rope dims, with
                                                    0r and 1l the validity bits
  free_0l          left, left of the other CTA      S0 V0 is done                            producer
  free_0r          right, right of the other CTA    S0 V0 is done: also frees S0             producer
  free_1l          left, left of the other CTA      S1 V1 is done (last pair: and the rows   producer
                                                    of O have left it): also frees S1
  free_1r          right, right of the other CTA    S1 V1 is done (last pair: likewise)      producer
  ready_s0, _s1    left, right                      S and the maximum are in shared memory   right, left
  ready_l0, _l1    left, right                      sum and true maximum of its tiles are    right, left
  sent             right of the other CTA           the copies of an item's last tile 1      left, right: before the
                                                    have arrived there                       rows of O go there

A producer that has waited for a half knows that its rows are free in both CTAs, so that it may write the one and copy to the other. S0
may be overwritten once the scores of the next tile 0 exist, which needs the right half of that tile, which needs free_0r;
S1 likewise through free_1l. Maxima and sums are overwritten later than that. Bits and addresses have two slots: a pair's are
written after free_0r of the pair before, which both groups signal or precede with their reads of the slot. The CTAs meet
before their first word to each other, when the barriers exist, and before they end: a CTA that has ended cannot be spoken to.

To the compiler both CTAs do the same (num_ctas=2, layouts that are replicated over the CTAs); only `cluster_rank` tells them
apart. Global stores go through a layout with the CTAs as first dim: from a replicated layout CTA 0 alone would store. Gluon 3.6
has no name for a place in shared memory, which a copy between CTAs needs: see `find_shared`.
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

FAMILY = "sm90_cluster_fp8"
LAYOUT = 'v32'
ARCH = 'sm90'
TEMPLATE_HASH = '4e8636c9372f7ff5'
TRITON_RANGE = ('3.6', '3.7')

D_V = gl.constexpr(512)
ROW_BYTES = gl.constexpr(656)
ROPE_WORD = gl.constexpr(132)
SCALE_WORD = gl.constexpr(128)
SCALE_WORDS = gl.constexpr(4)  # words of scales per key
GROUP_UNITS = gl.constexpr(8)  # 16-byte units of a row under one scale
GROUPS = gl.constexpr(4)  # scales kept per key
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
SHARE = gl.constexpr(1)  # -log2 of the share of its group's sum so far at which a key moves the lazy maximum: see limit()
LOWEST = gl.constexpr(-3.4028234663852886e38)  # finite, so that a leading tile without a valid key leaves no inf - inf

# Every layout is replicated over the two CTAs. Row i of a group's 64 x 64 scores and of its output lies in the same thread: all
# are accumulators of wgmma.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], cga_layout=[[0, 0]]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16], cga_layout=[[0, 0]]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16], cga_layout=[[0, 0]]))
PROBS = gl.constexpr(gl.DotOperandLayout(0, SCORES, 2))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
# The keys of the columns of SCORES (see key_of) as [word, bit], both words of validity bits in every thread.
BITS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [0, 16], [1, 0]], [[0, 8], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [[0, 0]], [2, 32]
))
# [CTA, row, column]: rows of O, 512 bytes side by side. To the compiler a CTA holds its own of two matrices here.
LEAVE = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, 4, 1], [2, 1, 0], cga_layout=[[1, 0, 0]]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[0, 0]]))  # 128-byte swizzle, 16-bit elements
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2, cga_layout=[[0, 0]]))  # the same bytes as 32-bit words
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[0]]))
PLANE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[0, 0]]))
CUBE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0], cga_layout=[[0, 0, 0]]))
WORD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[0]]))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout(cga_layout=[[0]]))

# Names of the newer API where it has them (the older ones then are stubs that raise)
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_SMEM = gl.shared_memory_descriptor
reinterpret = _SMEM.reinterpret if hasattr(_SMEM, "reinterpret") else _SMEM._reinterpret
sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


# ------------------------------------------------------------------------------------------------ PTX


@gluon.jit
def pack_half2(scale):
    """fp32 -> the same fp16 value twice."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [scale], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def dequantise_fp16(raw, scale2):
    """Four e4m3 times an fp16 pair -> two words of two fp16. One conversion per two values; NaN stays NaN. Not pure, although it is:
    the compiler would move it behind the wait that it stands before."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b; .reg .b32 c, d;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 c, a;
        cvt.rn.f16x2.e4m3x2 d, b;
        mul.rn.f16x2 $0, c, $3;
        mul.rn.f16x2 $1, d, $3;
        }""",
        "=r,=r,r,r", [raw, scale2], dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
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
        "=r,=r,r,f", [raw, scale], dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )


@gluon.jit
def prefetch_q_rows(rows, exists):
    """Fetch whole rows of Q into L2, where `exists` is not zero."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], 1152;
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
def rescale(acc, factor, L: gl.constexpr, COLS: gl.constexpr):
    """acc [64, COLS] times factor [64]; skipped by warps whose factors are all 1."""
    return rescale_voted(acc, gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, L)), 1), COLS)


@gluon.jit
def release_dependents():
    """Let the merge be launched now: it waits for all of this kernel by itself (griddepcontrol.wait) before it reads a part."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# ------------------------------------------------------------------------------------------------ cluster


@gluon.jit
def cluster_rank():
    """0 or 1: which CTA of its cluster this is. The compiler takes it for the same number in both. Of %ctaid, and not of the registers of
    the cluster, ptxas knows that all threads of a CTA have the same, so that what depends on it stays in uniform registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x; and.b32 $0, $0, 1;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def cluster_number():
    """Which cluster of the grid this is: gl.program_id in uniform registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x; shr.u32 $0, $0, 1;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def cluster_count():
    return gl.inline_asm_elementwise("mov.u32 $0, %nctaid.x; shr.u32 $0, $0, 1;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def cluster_sync():
    """Wait until all warps of both CTAs are here. Barriers initialised before it exist for the other CTA, and its copies, behind it."""
    gl.inline_asm_elementwise(
        """{
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.b32 $0, 0;
        }""",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def arrive_at_peer(barrier):
    """One arrival, by the first thread of the partition, at the other CTA's barrier that lies at the address `barrier` there. Stands
    behind an mbarrier.arrive, for which the partition's threads have met: what they did before, they have all done. The number of a
    thread comes from Triton: where PTX reads %tid, ptxas takes every branch of the partition for one that warps may divide at,
    and keeps no loop counter, address or descriptor in uniform registers any more."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 t, to;
        setp.eq.s32 p, $1, 0;
        mov.u32 t, %ctaid.x;
        not.b32 t, t;
        and.b32 t, t, 1;
        mapa.shared::cluster.u32 to, $2, t;
        @p mbarrier.arrive.shared::cluster.b64 _, [to];
        mov.b32 $0, 0;
        }""",
        "=r,r,r", [gl.arange(0, 128, WORD), barrier], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def copy_to_peer(source, barrier, CHUNKS: gl.constexpr):
    """32 rows of CHUNKS times 64 columns of a tile, from the address `source` to the same place in the other CTA, one thread per 4 KB: rows
    of 128 bytes lie side by side, the next 64 columns 8 KB behind. The other CTA's `barrier` counts the bytes. The producer's
    threads have written the rows, fenced, and met."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 t, from, to, at;
        setp.lt.s32 p, $1, $4;
        mad.lo.u32 from, $1, 8192, $2;
        mov.u32 t, %ctaid.x;
        not.b32 t, t;
        and.b32 t, t, 1;
        mapa.shared::cluster.u32 to, from, t;
        mapa.shared::cluster.u32 at, $3, t;
        @p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [from], 4096, [at];
        mov.b32 $0, 0;
        }""",
        "=r,r,r,r,r", [gl.arange(0, 128, WORD), source, barrier, CHUNKS], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def peek(at):
    """The 8 bytes of shared memory at an offset from its start; 0 behind its end."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 a, n;
        mov.u32 n, %dynamic_smem_size;
        setp.lt.u32 p, $1, n;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        mov.b64 $0, 0;
        @p ld.volatile.shared.b64 $0, [a];
        }""",
        "=l,r", [at], dtype=gl.int64, is_pure=False, pack=1,
    )

@gluon.jit
def set_marks(tiles, barriers, MARK: gl.constexpr):
    """MARK + 1, MARK + 2 and so on into the first 8 bytes of every tile, then of every barrier."""
    at = gl.arange(0, 128, WORD)
    for i in gl.static_range(4):
        start = reinterpret(tiles[i], gl.int64, [32, 128], VECTOR).index(0)
        start.store(gl.where(at == 0, MARK + 1 + i, at.to(gl.int64)))
    for i in gl.static_range(9):
        barriers[i].store(gl.full([1], MARK + 5 + i, gl.int64, WORD))
    sync_threads()


@gluon.jit
def marked(at, MARK: gl.constexpr):
    """Which mark lies at each offset: 1 to 13, or 0."""
    found = peek(at) - MARK
    return gl.where((found > 0) & (found <= 13), found, 0).to(gl.int32)


@gluon.jit
def places_of(at, mark, WORD: gl.constexpr):
    """Offsets, in units of 8 bytes and 16 bits each, at which the marks 4 WORD + 1 to 4 WORD + 4 lie, as one number."""
    nth = mark - 1
    return gl.sum(gl.where((mark > 0) & ((nth >> 2) == WORD), (at >> 3).to(gl.int64) << ((nth & 3) * 16).to(gl.int64), 0), 0)


@gluon.jit
def shared_start():
    return gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def shared_end():
    return gl.inline_asm_elementwise("mov.u32 $0, %dynamic_smem_size;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def stop_unless(found):
    """Better no result than a wrong one."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 13; @p trap; mov.b32 $0, 0; }", "=r,r", [found], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def find_shared(tiles, barriers):
    """Addresses of four tiles and nine barriers in this CTA's shared memory, before the barriers are initialised. Gluon 3.6 cannot tell
    them, so they are looked for: marks are written and found again, twice with different marks, since memory that an
    earlier kernel has left may hold old ones. Tiles lie at multiples of 1 KB (their swizzle), barriers in the last 4 KB,
    behind everything that is larger; where Triton should place them otherwise, the kernel stops with a trap."""
    wide = gl.arange(0, 256, WORD) * 1024
    near = shared_end() - 8 - gl.arange(0, 512, WORD) * 8
    set_marks(tiles, barriers, 0x6B67656E00000000)
    wide_first = marked(wide, 0x6B67656E00000000)
    near_first = marked(near, 0x6B67656E00000000)
    sync_threads()
    set_marks(tiles, barriers, 0x6D61726B00000000)
    wide_second = marked(wide, 0x6D61726B00000000)
    near_second = marked(near, 0x6D61726B00000000)
    sync_threads()
    is_tile = (wide_first == wide_second) & (wide_first > 0) & (wide_first <= 4)
    is_barrier = (near_first == near_second) & (near_first > 4)
    stop_unless(gl.sum(is_tile.to(gl.int32), 0) + gl.sum(is_barrier.to(gl.int32), 0))
    base = shared_start()
    at_tiles = places_of(wide, gl.where(is_tile, wide_first, 0), 0)
    at_full = places_of(near, gl.where(is_barrier, near_first, 0), 1)
    at_free = places_of(near, gl.where(is_barrier, near_first, 0), 2)
    at_sent = places_of(near, gl.where(is_barrier, near_first, 0), 3)
    return (
        nth_place(base, at_tiles, 0), nth_place(base, at_tiles, 1), nth_place(base, at_tiles, 2), nth_place(base, at_tiles, 3),
        nth_place(base, at_full, 0), nth_place(base, at_full, 1), nth_place(base, at_full, 2), nth_place(base, at_full, 3),
        nth_place(base, at_free, 0), nth_place(base, at_free, 1), nth_place(base, at_free, 2), nth_place(base, at_free, 3),
        nth_place(base, at_sent, 0),
    )  # fmt: skip


@gluon.jit
def nth_place(base, places, N: gl.constexpr):
    return base + (((places >> (16 * N)) & 0xFFFF) << 3).to(gl.int32)


# ------------------------------------------------------------------------------------------------ items


@gluon.jit
def place(item, splits, SPLIT: gl.constexpr):
    """Token and split of an item."""
    token = item
    split = 0
    if SPLIT:
        split = item % splits
        token = item // splits
    return token, split


@gluon.jit
def nought(item):
    """Always 0, which the compiler cannot prove. What depends on the CTA alone would be computed before the loop over the items, and
    spilled: places of rows in Q and in the output."""
    return item >> 30


@gluon.jit
def block_of(item):
    """This CTA's first head."""
    return cluster_rank() * 64 + nought(item)


@gluon.jit
def load_lengths(
    lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits,
    DUAL: gl.constexpr, SPLIT: gl.constexpr,
):
    """The lengths of an item's token as they are stored; topk when there are none or no such item."""
    token, _ = place(item, splits, SPLIT)
    length = gl.load(lengths + token // len_per, mask=(has_len != 0) & (item < n_items), other=topk)
    extra = 0
    if DUAL:
        extra = gl.load(extra_lengths + token // len_per, mask=(has_extra_len != 0) & (item < n_items), other=extra_topk)
    return length, extra


@gluon.jit
def span(length, extra, item, topk, extra_topk, splits, DUAL: gl.constexpr, SPLIT: gl.constexpr):
    """Lengths clamped, tiles of the main cache, first pair and number of pairs of an item. At least one pair: beyond the
    lengths its keys are masked, so that an empty item needs no code of its own."""
    length = gl.minimum(gl.maximum(length, 0), topk)
    tiles_main = (length + 63) >> 6
    tiles = tiles_main
    if DUAL:
        extra = gl.minimum(gl.maximum(extra, 0), extra_topk)
        tiles += (extra + 63) >> 6
    pairs = (tiles + 1) >> 1
    first = 0
    if SPLIT:
        _, split = place(item, splits, SPLIT)
        per_split = (pairs + splits - 1) // splits
        first = split * per_split
        pairs = gl.minimum(per_split, pairs - first)
    return length, extra, tiles_main, first, gl.maximum(pairs, 1)


# ------------------------------------------------------------------------------------------------ producer


@gluon.constexpr_function
def piece_bases(units, warps):
    """Which of this CTA's 32 rows of a tile and which 16-byte unit of its row each bit of register, lane and warp stands for. Four
    units and two rows differ within eight lanes, so that the two 16-byte chunks that a unit becomes are stored without bank
    conflicts into a tile with 128-byte swizzle."""
    row_bits = [[1 << i, 0] for i in range(5)]
    unit_bits = [[0, 1 << i] for i in range(units.bit_length() - 1)]
    lanes = unit_bits[:2] + row_bits[:1] + unit_bits[2:]
    row_bits = row_bits[1:]
    while len(lanes) < 5:
        lanes.append(row_bits.pop(0))
    warp_bits = [row_bits.pop(0) for _ in range(warps.bit_length() - 1)]
    return row_bits, lanes, warp_bits


@gluon.constexpr_function
def key_of(row):
    """Row r of a tile holds the key whose lower five bits are those of r in reverse: so the rows of a thread, which differ in the upper
    ones of them, are neighbouring keys, whose addresses and scales it reads 16 bytes at a time. The sixth bit is the CTA's."""
    return (row & 32) | sum(((row >> i) & 1) << (4 - i) for i in range(5))


@gluon.constexpr_function
def piece_layout(units, warps, group):
    """[rows, scales, units of a scale, 4 words]: a lane holds a 16-byte unit (16 values)."""
    regs, lanes, warp_bits = piece_bases(units, warps)
    wide = lambda bits: [[r, u // group, u % group, 0] for r, u in bits]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]] + wide(regs), wide(lanes), wide(warp_bits), [[0, 0, 0, 0]], [32, units // group, group, 4]
    )


@gluon.constexpr_function
def scale_layout(units, warps, group):
    """[scales, keys] beside a piece."""
    regs, lanes, warp_bits = piece_bases(units, warps)
    narrow = lambda bits: [[u // group, key_of(r)] for r, u in bits]
    return gl.DistributedLinearLayout(narrow(regs[::-1]), narrow(lanes), narrow(warp_bits), [[0, 0]], [units // group, 32])


@gluon.constexpr_function
def key_layout(units, warps):
    """[keys] beside a piece."""
    regs, lanes, warp_bits = piece_bases(units, warps)
    narrow = lambda bits: [[key_of(r)] for r, u in bits]
    return gl.DistributedLinearLayout(narrow(regs[::-1]), narrow(lanes), narrow(warp_bits), [[0]], [32])


@gluon.constexpr_function
def rope_keys(warps):
    """[keys] beside the copy of the rope dims: four rows per warp and instruction."""
    rows = [1 << i for i in range(6)]
    narrow = lambda bits: [[key_of(r)] for r in bits]
    n = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        sorted(narrow(rows[2 + n :])), [[0], [0], [0]] + narrow(rows[:2]), narrow(rows[2 : 2 + n]), [[0]], [64]
    )


@gluon.constexpr_function
def own_rows(chunks):
    """The first or last 32 rows of a tile of 64, as words: what 128-byte swizzle makes of 32 words of a row, and 8 KB from there to the
    next 32 words, half of which are the other CTA's."""
    swizzled = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4], [2, 8], [4, 16], [8, 0], [16, 0]]
    wide = [[0, 32 << i] for i in range(chunks.bit_length() - 1)]
    return gl.SharedLinearLayout(swizzled + [[0, 0]] + wide, [[0, 0]], 1024)


@gluon.constexpr_function
def plain(rows, columns, threads, warps):
    """[rows, columns]: `threads` lanes side by side along the columns, in pieces of `columns`, replicated over the CTAs."""
    return gl.BlockedLayout([rows, columns], [32 // threads, threads], [warps, 1], [1, 0], cga_layout=[[0, 0]])


@gluon.constexpr_function
def line(warps):
    """[keys], one per thread, replicated over the CTAs."""
    return gl.BlockedLayout([1], [32], [warps], [0], cga_layout=[[0]])


@gluon.jit
def by_row(x):
    """[64] values by key -> by row of the tile. Moves nothing."""
    return x.reshape([2, 2, 2, 2, 2, 2]).permute((0, 5, 4, 3, 2, 1)).reshape([64])


@gluon.jit
def by_row_of_half(x):
    """The same for the 32 keys of one CTA."""
    return x.reshape([2, 2, 2, 2, 2]).permute((4, 3, 2, 1, 0)).reshape([32])


@gluon.jit
def first_keys(
    indices, extra_indices, item, first, tiles_main, s_q, splits,
    idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, DUAL: gl.constexpr, SPLIT: gl.constexpr,
):
    """Of an item's first pair: pointers to the index of its first key in both caches, and that key's number among the extra
    cache's keys (below zero: a key of the main cache). The next pair's are 128 further."""
    token, _ = place(item, splits, SPLIT)
    b = (token // s_q).to(gl.int64)
    s_pos = (token % s_q).to(gl.int64)
    at = indices + (b * idx_stride_b + s_pos * idx_stride_s) + first * 128
    extra_key = first * 128 - tiles_main * 64
    extra_at = at
    if DUAL:
        extra_at = extra_indices + (b * extra_idx_stride_b + s_pos * extra_idx_stride_s) + extra_key
    return at, extra_at, extra_key


@gluon.jit
def keys_of(at, extra_at, extra_key, below, extra, DUAL: gl.constexpr, NW: gl.constexpr):
    """Pointers to the indices of a pair's 128 keys, one per thread, and the cache of each: 0, 1, or -1 beyond the length.
    `below`: how many keys of the main cache are left."""
    key = gl.arange(0, 128, line(NW))
    index = at + key
    cache = gl.where(key < below, 0, -1)
    if DUAL:
        in_extra = extra_key + key >= 0
        index = gl.where(in_extra, extra_at + key, index)
        cache = gl.where(in_extra, gl.where(extra_key + key < extra, 1, -1), cache)
    return index, cache


@gluon.jit
def cache_start(words, extra_words, main_tiles, TILE: gl.constexpr, DUAL: gl.constexpr):
    """The cache of a tile of a pair that has `main_tiles` tiles of the main cache."""
    start = words
    if DUAL:
        start = gl.where(TILE < main_tiles, words, extra_words)
    return start


@gluon.jit
def resolve(
    raw, cache, words, extra_words, slots, extra_slots, page, extra_page, page_stride, extra_page_stride, offsets, landing, bits,
    DUAL: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, NW: gl.constexpr,
):
    """Where the rows of a pair lie, in units of 16 bytes from their cache's start (-1: not valid), once per key. The scales of
    the keys set out for `landing`. Bit k of word w: key 32 w + k is valid."""
    main_rows = PAGE if PAGE > 0 else page
    n_slots = slots
    if DUAL:
        n_slots = gl.where(cache == 1, extra_slots, slots)
    valid = (cache >= 0) & (raw >= 0) & (raw < n_slots)
    index = gl.where(valid, raw, 0)
    if DUAL:
        # dividing by each page size, not by a selected one, keeps a constant page a shift
        extra_rows = EXTRA_PAGE if EXTRA_PAGE > 0 else extra_page
        page_id = gl.where(cache == 1, index // extra_rows, index // main_rows)
        rows = gl.where(cache == 1, extra_rows, main_rows)
        page_row = page_id.to(gl.int64) * gl.where(cache == 1, extra_page_stride, page_stride)
    else:
        page_id = index // main_rows
        rows = main_rows
        page_row = page_id.to(gl.int64) * page_stride
    in_page = index - page_id * rows
    row = page_row + in_page * ROW_BYTES
    offsets.store(gl.where(valid, (row >> 4).to(gl.int32), -1))
    COPY: gl.constexpr = plain(1, SCALE_WORDS, 1, NW)
    scale_at = (row >> 2) + SCALE_WORD
    start = words
    if DUAL:
        start = gl.where(cache == 1, extra_words, words)
    at = gl.expand_dims(gl.multiple_of(gl.convert_layout(start + scale_at, gl.SliceLayout(1, COPY)), 4 * SCALE_WORDS), 1)
    exists = gl.expand_dims(gl.convert_layout(valid, gl.SliceLayout(1, COPY)), 1)
    at_word = at + gl.expand_dims(gl.arange(0, SCALE_WORDS, gl.SliceLayout(0, COPY)), 0)
    copy_async(landing, at_word, mask=gl.broadcast(exists, at_word)[0])
    key = gl.arange(0, 128, line(NW))
    bits.store(gl.sum((valid.to(gl.int32) << (key & 31)).reshape([4, 32]), 1))


@gluon.jit
def prepare_scales(landing, scales, FP16: gl.constexpr, NW: gl.constexpr):
    """The scales of a pair's keys, a key per thread, in the type that the dequantisation takes and in its order [tile and CTA, scale, key]:
    otherwise every lane would load and convert one per 16 bytes of a row, as many as the row loads."""
    COPY: gl.constexpr = plain(1, GROUPS, 1, NW)
    factor = landing.load(COPY).to(gl.float32, bitcast=True)
    if FP16:
        scales.store(factor.to(gl.float16).reshape([4, 32, GROUPS]).permute((0, 2, 1)))
    else:
        scales.store(factor.reshape([4, 32, GROUPS]).permute((0, 2, 1)))


@gluon.jit
def fetch(words, offsets, UNIT0: gl.constexpr, UNITS: gl.constexpr, NW: gl.constexpr):
    """UNITS 16-byte units of this CTA's 32 rows from unit UNIT0 on into registers; rows that are not valid read as zero, without a load."""
    L: gl.constexpr = piece_layout(UNITS, NW, GROUP_UNITS)
    G: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    U: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    W: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    group = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, UNITS // GROUP_UNITS, G), 0), 2), 3)
    unit = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, GROUP_UNITS, U), 0), 1), 3)
    word = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, W), 0), 1), 2)
    at = by_row_of_half(offsets.load(key_layout(UNITS, NW)))
    at = gl.convert_layout(at, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))), assert_trivial=True)
    at = gl.expand_dims(gl.expand_dims(gl.expand_dims(at, 1), 2), 3)
    # 32 bits as long as it lasts: a 64-bit address of its own for every lane would be spilled
    to = (at + (UNIT0 + group * GROUP_UNITS + unit)).to(gl.int64)
    return gl.load(words + (to * 4 + word), mask=at >= 0, other=0, cache_modifier=".cg")


@gluon.jit
def dequantise(
    raw, scales, place, UNIT0: gl.constexpr, UNITS: gl.constexpr, NW: gl.constexpr, FP16: gl.constexpr, SCALE_TYPE: gl.constexpr
):
    """The fetched units times the scales of a pair's tile and CTA `place`, as [32, UNITS * 8] words of two values."""
    L: gl.constexpr = piece_layout(UNITS, NW, GROUP_UNITS)
    KEY: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, L))
    N: gl.constexpr = UNITS // GROUP_UNITS
    G0: gl.constexpr = UNIT0 // GROUP_UNITS
    own = reinterpret(scales, SCALE_TYPE, [8 * GROUPS // N, N, 32], PLANE).index(place * (GROUPS // N) + G0 // N)
    factor = own.load(scale_layout(UNITS, NW, GROUP_UNITS))
    factor = factor.reshape([N, 2, 2, 2, 2, 2]).permute((5, 4, 3, 2, 1, 0)).reshape([32, N])
    factor = gl.convert_layout(factor, KEY, assert_trivial=True).to(gl.float32)
    if FP16:
        lo, hi = dequantise_fp16(raw, gl.expand_dims(gl.expand_dims(pack_half2(factor), 2), 3))
    else:
        lo, hi = dequantise_bf16(raw, gl.expand_dims(gl.expand_dims(factor, 2), 3))
    return gl.join(lo, hi).reshape([32, UNITS * 8])


@gluon.jit
def put_rows(x, half, rank, CHUNK0: gl.constexpr, CHUNKS: gl.constexpr):
    """Words into this CTA's rows of a half, from 64 CHUNK0 columns on."""
    rows = reinterpret(half, gl.int32, [8, 32, 32], WORDS).index(2 * CHUNK0 + rank)
    if CHUNKS > 1:
        rows = reinterpret(rows, gl.int32, [32, CHUNKS * 32], own_rows(CHUNKS))
    rows.store(x)


@gluon.jit
def fetch_left(words, offsets, NW: gl.constexpr):
    return fetch(words, offsets, 0, 16, NW)


@gluon.jit
def fetch_right(words, offsets, NW: gl.constexpr):
    return fetch(words, offsets, 16, 16, NW)


@gluon.jit
def dequantise_left(x, scales, place, NW: gl.constexpr, FP16: gl.constexpr, SCALE_TYPE: gl.constexpr):
    return dequantise(x, scales, place, 0, 16, NW, FP16, SCALE_TYPE)


@gluon.jit
def dequantise_right(x, scales, place, NW: gl.constexpr, FP16: gl.constexpr, SCALE_TYPE: gl.constexpr):
    return dequantise(x, scales, place, 16, 16, NW, FP16, SCALE_TYPE)


@gluon.jit
def put_left(x, half, rank):
    put_rows(x, half, rank, 0, 4)


@gluon.jit
def put_right(x, half, rank):
    put_rows(x, half, rank, 0, 4)


@gluon.jit
def publish(full, at, at_full, rank, CHUNKS: gl.constexpr):
    """This CTA's rows of a half (its first CHUNKS times 64 columns) are written: so much for this CTA's groups, and a copy for the other's.
    `full` waits for as many bytes of the other CTA's."""
    fence_async_shared()  # the copy reads by the async proxy; the groups fence after their wait
    sync_threads()  # Triton has one before an arrive, but none before an expect
    mbarrier.expect(full, CHUNKS * 4096)
    copy_to_peer(at + rank * 4096, at_full, CHUNKS)


@gluon.jit
def copy_rope(words, offsets, rope, NW: gl.constexpr):
    """The 64 bf16 dims of each row, straight into the tile: zero for rows that are not valid."""
    L: gl.constexpr = plain(1, 4, 8, NW)
    at = by_row(offsets.load(rope_keys(NW)))
    at = gl.expand_dims(gl.convert_layout(at, gl.SliceLayout(1, L), assert_trivial=True), 1)
    col = ROPE_WORD + gl.arange(0, 32, gl.SliceLayout(0, L))
    word = words + ((at + gl.expand_dims(col >> 2, 0)).to(gl.int64) * 4 + gl.expand_dims(col & 3, 0))
    copy_async(rope, word, mask=gl.broadcast(at >= 0, word)[0])


@gluon.jit
def q_rows(q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT: gl.constexpr, L: gl.constexpr):
    """Pointers to the 64 rows of Q of an item. A head that does not exist has the last one's row: its scores count nowhere, and
    a mask would be a predicate per row, which the compiler keeps and spills across the producer's whole loop."""
    token, _ = place(item, splits, SPLIT)
    head = gl.minimum(block_of(item) + gl.arange(0, 64, L), heads - 1)
    row = q + (token // s_q).to(gl.int64) * q_stride_b + (token % s_q).to(gl.int64) * q_stride_s
    return row + head.to(gl.int64) * q_stride_h


@gluon.jit
def copy_q(
    q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, q_l, q_r, q_x, SPLIT: gl.constexpr, NW: gl.constexpr
):
    """Start copying Q of an item, as bf16, to where it is used. Needs no registers to land in."""
    L: gl.constexpr = plain(1, 8, 32, NW)
    row = q_rows(q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT, gl.SliceLayout(1, L))
    at = gl.expand_dims(row, 1) + gl.expand_dims(gl.arange(0, 256, gl.SliceLayout(0, L)), 0)
    copy_async(q_l, at)
    copy_async(q_r, at + 256)
    X: gl.constexpr = plain(1, 8, 8, NW)
    row = q_rows(q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT, gl.SliceLayout(1, X))
    copy_async(q_x, gl.expand_dims(row, 1) + gl.expand_dims(512 + gl.arange(0, 64, gl.SliceLayout(0, X)), 0))


@gluon.jit
def prefetch_q(q, item, n_items, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT: gl.constexpr, NW: gl.constexpr):
    """Q of an item into L2, so that copying it at the switch of items does not wait for device memory."""
    row = q_rows(
        q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT, line(NW)
    )
    prefetch_q_rows(row, (item < n_items).to(gl.int32))


@gluon.jit
def producer(
    q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths,
    heads, s_q, topk, extra_topk, slots, extra_slots, page, extra_page, len_per, has_len, has_extra_len,
    page_stride, extra_page_stride, q_stride_b, q_stride_s, q_stride_h,
    idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, splits, n_items, first_item, stride,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, FP16: gl.constexpr, NW: gl.constexpr,
    SCALE_TYPE: gl.constexpr,
    q_l, q_r, q_x, k0_l, k0_r, k0_x, k1_l, k1_r, k1_x, raw_indices, offsets, landing, scales, bits,
    free_q, full_q, full_0l, full_0r, full_1l, full_1r, free_0l, free_0r, free_1l, free_1r,
    at_0l, at_0r, at_1l, at_1r, at_full_0l, at_full_0r, at_full_1l, at_full_1r,
):
    """Three places in the stream of pairs: pair g is dequantised, the addresses of pair g + 1 are found, the indices of pair
    g + 2 are copied, by cp.async since a plain load would share a scoreboard with the row loads in flight: waiting for an
    index would then mean waiting for these."""
    KEY: gl.constexpr = line(NW)
    RIGHT: gl.constexpr = 4  # chunks of 64 columns of a right half that are copied
    rank = cluster_rank()
    cluster_sync()
    words = kv.to(gl.pointer_type(gl.int32), bitcast=True)
    extra_words = extra_kv.to(gl.pointer_type(gl.int32), bitcast=True)
    by_tile = reinterpret(offsets, gl.int32, [4, 64], VECTOR)
    by_half = reinterpret(offsets, gl.int32, [8, 32], VECTOR)  # pair, tile, CTA
    # The place whose indices are copied, in scalars: what every lane would hold for itself would be spilled. An item, how many
    # pairs it has from there on, pointers to indices, keys and tiles of the main cache that are left.
    item = first_item
    length, extra = load_lengths(
        lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits, DUAL, SPLIT
    )
    length, extra, tiles_main, first, pairs = span(length, extra, item, topk, extra_topk, splits, DUAL, SPLIT)
    at, extra_at, extra_key = first_keys(
        indices, extra_indices, item, first, tiles_main, s_q, splits,
        idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, DUAL, SPLIT,
    )
    below = length - first * 128
    main_tiles = tiles_main - 2 * first
    index, cache = keys_of(at, extra_at, extra_key, below, extra, DUAL, NW)
    raw = gl.load(index, mask=cache >= 0, other=-1)
    copy_q(q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, q_l, q_r, q_x, SPLIT, NW)
    async_copy.mbarrier_arrive(full_q, increment_count=False)
    resolve(
        raw, cache, words, extra_words, slots, extra_slots, page, extra_page, page_stride, extra_page_stride,
        offsets.index(0), landing, bits.index(0), DUAL, PAGE, EXTRA_PAGE, NW,
    )
    main_tiles_0 = main_tiles  # of the pair that is dequantised
    begins = -1  # the item whose Q that pair is the first to need, and likewise the next pair
    next_begins = -1
    pairs -= 1
    if pairs == 0:
        item += stride
        next_begins = item
        length, extra = load_lengths(
            lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits, DUAL, SPLIT
        )
        length, extra, tiles_main, first, pairs = span(length, extra, item, topk, extra_topk, splits, DUAL, SPLIT)
        at, extra_at, extra_key = first_keys(
            indices, extra_indices, item, first, tiles_main, s_q, splits,
            idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, DUAL, SPLIT,
        )
        below = gl.where(item < n_items, length - first * 128, 0)
        extra = gl.where(item < n_items, extra, 0)
        main_tiles = tiles_main - 2 * first
    else:
        at += 128
        extra_at += 128
        extra_key += 128
        below -= 128
        main_tiles -= 2
    index, cache = keys_of(at, extra_at, extra_key, below, extra, DUAL, NW)
    copy_async(raw_indices.index(1), index, mask=cache >= 0)
    async_copy.commit_group()
    left = fetch_left(cache_start(words, extra_words, main_tiles_0, 0, DUAL), by_half.index(rank), NW)
    async_copy.wait_group(0)
    prepare_scales(landing, scales.index(0), FP16, NW)
    more = first_item < n_items
    g = 0
    it = 1  # items whose Q was copied
    while more:
        slot = (g & 1) * 2
        phase = (g & 1) ^ 1
        place_0 = slot * 2 + rank
        place_1 = place_0 + 2
        # ---- tile 0
        start = cache_start(words, extra_words, main_tiles_0, 0, DUAL)
        # Converted before the wait, since what follows it is waited for; and before later rows are asked for, since ptxas gives all
        # row loads one scoreboard, so that these would be waited for as well.
        left = dequantise_left(left, scales, place_0, NW, FP16, SCALE_TYPE)
        right = fetch_right(start, by_half.index(place_0), NW)
        mbarrier.wait(free_0l, phase)
        put_left(left, k0_l, rank)
        publish(full_0l, at_0l, at_full_0l, rank, 4)
        if begins >= 0:
            mbarrier.wait(free_q, (it & 1) ^ 1)
            copy_q(q, begins, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, q_l, q_r, q_x, SPLIT, NW)
            async_copy.mbarrier_arrive(full_q, increment_count=False)
            it += 1
        right = dequantise_right(right, scales, place_0, NW, FP16, SCALE_TYPE)
        left = fetch_left(cache_start(words, extra_words, main_tiles_0, 1, DUAL), by_half.index(place_1), NW)
        mbarrier.wait(free_0r, phase)
        copy_rope(start, by_tile.index(slot), k0_x, NW)
        async_copy.mbarrier_arrive(full_0r, increment_count=False)
        put_right(right, k0_r, rank)
        publish(full_0r, at_0r, at_full_0r, rank, RIGHT)
        # ---- tile 1
        start = cache_start(words, extra_words, main_tiles_0, 1, DUAL)
        left = dequantise_left(left, scales, place_1, NW, FP16, SCALE_TYPE)
        right = fetch_right(start, by_half.index(place_1), NW)
        # addresses of the next pair, indices of the one after it: while rows are on their way
        index, cache = keys_of(at, extra_at, extra_key, below, extra, DUAL, NW)
        resolve(
            raw_indices.index((g + 1) & 1).load(KEY), cache, words, extra_words, slots, extra_slots, page, extra_page,
            page_stride, extra_page_stride, offsets.index((g + 1) & 1), landing, bits.index((g + 1) & 1),
            DUAL, PAGE, EXTRA_PAGE, NW,
        )
        more = item < n_items
        main_tiles_0 = main_tiles
        begins = next_begins
        next_begins = -1
        pairs -= 1
        if pairs == 0:
            item += stride
            next_begins = item
            length, extra = load_lengths(
                lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits, DUAL, SPLIT
            )
            length, extra, tiles_main, first, pairs = span(length, extra, item, topk, extra_topk, splits, DUAL, SPLIT)
            at, extra_at, extra_key = first_keys(
                indices, extra_indices, item, first, tiles_main, s_q, splits,
                idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, DUAL, SPLIT,
            )
            below = gl.where(item < n_items, length - first * 128, 0)
            extra = gl.where(item < n_items, extra, 0)
            main_tiles = tiles_main - 2 * first
            prefetch_q(q, item, n_items, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT, NW)
        else:
            at += 128
            extra_at += 128
            extra_key += 128
            below -= 128
            main_tiles -= 2
        index, cache = keys_of(at, extra_at, extra_key, below, extra, DUAL, NW)
        copy_async(raw_indices.index(g & 1), index, mask=cache >= 0)
        async_copy.commit_group()
        mbarrier.wait(free_1l, phase)
        put_left(left, k1_l, rank)
        publish(full_1l, at_1l, at_full_1l, rank, 4)
        right = dequantise_right(right, scales, place_1, NW, FP16, SCALE_TYPE)
        left = fetch_left(cache_start(words, extra_words, main_tiles_0, 0, DUAL), by_half.index(place_0 ^ 4), NW)
        mbarrier.wait(free_1r, phase)
        copy_rope(start, by_tile.index(slot + 1), k1_x, NW)
        async_copy.mbarrier_arrive(full_1r, increment_count=False)
        put_right(right, k1_r, rank)
        async_copy.wait_group(0)  # scales of the next pair, indices of the one after it
        prepare_scales(landing, scales.index((g + 1) & 1), FP16, NW)
        publish(full_1r, at_1r, at_full_1r, rank, RIGHT)
        g += 1
    cluster_sync()


# ------------------------------------------------------------------------------------------------ groups


@gluon.jit
def columns(half, C0: gl.constexpr, COLS: gl.constexpr, z, TYPE: gl.constexpr):
    """Columns C0.. of a half [1, 64, 256]. Gluon 3.6 has no slices of shared memory where there are two CTAs."""
    return reinterpret(half, TYPE, [256 // COLS, 64, COLS], TILE).index(C0 // COLS + z)


@gluon.jit
def bits_of(bits, slot, TILE_OF_PAIR: gl.constexpr):
    """The validity bits of a tile, both words in every thread."""
    return reinterpret(bits, gl.int32, [4, 2], VECTOR).index(2 * slot + TILE_OF_PAIR).load(gl.SliceLayout(1, BITS))


@gluon.jit
def convert_columns(half, C0: gl.constexpr):
    """64 columns of Q, copied as bf16, into fp16 where they lie."""
    L: gl.constexpr = plain(1, 8, 8, 4)
    x = columns(half, C0, 64, 0, gl.bfloat16).load(L)
    columns(half, C0, 64, 0, gl.float16).store(x.to(gl.float16))


@gluon.jit
def take_q(half, full_q, mine, theirs, it, COLS: gl.constexpr, FP16: gl.constexpr):
    """Wait for Q of an item; with fp16 latents convert this group's half (the rope dims stay bf16) and wait for the other's."""
    mbarrier.wait(full_q, it & 1)
    if FP16:
        for i in gl.static_range(COLS // 64):
            convert_columns(half, i * 64)
        fence_async_shared()
        mbarrier.arrive(mine, count=1)
        mbarrier.wait(theirs, it & 1)


@gluon.jit
def scores_left(q_half, k_half, full, phase, pred):
    """S = Q K^T over the left half of the dims, once it has arrived; in flight afterwards."""
    p = gl.zeros([64, 64], gl.float32, SCORES)
    mbarrier.wait(full, phase, pred=pred)
    fence_async_shared()
    return warpgroup_mma(q_half, k_half.permute((1, 0)), p, use_acc=False, is_async=True)


@gluon.jit
def scores_right(q_r, q_x, k_r, k_x, z, p, full, phase, pred, FP16: gl.constexpr):
    """S += Q K^T over the right half and the rope dims, which are bf16 into the same accumulator."""
    mbarrier.wait(full, phase, pred=pred)
    fence_async_shared()
    p = warpgroup_mma(q_r.index(z), k_r.index(z).permute((1, 0)), p, is_async=True)
    return warpgroup_mma(q_x.index(z), k_x.index(z).permute((1, 0)), p, is_async=True)


@gluon.jit
def mask(p, bits):
    """-inf where the key is not valid. `bits`: the tile's two words, in every thread; splitting the shift leaves one that
    depends on the lane and masks that are constants."""
    key = gl.arange(0, 32, gl.SliceLayout(0, BITS))[None, :]
    bit = (bits[:, None] >> (key & 24)) & (1 << (key & 7))
    valid = gl.convert_layout(by_row((bit != 0).reshape([64])), gl.SliceLayout(0, SCORES), assert_trivial=True)
    return gl.where(valid[None, :], p, float("-inf"))


@gluon.jit
def rough_log2(x):
    """One instruction, where gl.log2 takes twenty."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def limit(m, before, l, SLACK: gl.constexpr, FP16: gl.constexpr):
    """What a tile's maximum must exceed to replace m (log2). Moving m rescales O, and a P of 2^SLACK is as good as 1, so that
    growth alone is no reason. But bf16 latents meet P in bf16, and where a key dominates its row,
    the rounding of its P would be most of the error. P of the maximum itself is exactly 1. So a key moves m as well if its P
    would be more than 2^-SHARE of l, the group's sum so far, which is relative to `before`."""
    if FP16:  # eight times finer
        return m + SLACK
    else:
        return gl.maximum(m, gl.minimum(m + SLACK, before + rough_log2(l) - SHARE))


@gluon.jit
def load_sink(sink, item, heads, has_sink):
    """Sinks of this CTA's heads; -inf when there are none."""
    head = block_of(item) + gl.arange(0, 64, ROW)
    return gl.load(sink + head, mask=(head < heads) & (has_sink != 0), other=float("-inf"))


@gluon.jit
def inverse(l, m, sinks, SPLIT: gl.constexpr):
    """What normalises a row; a sink far above every key makes it zero, as it should be."""
    total = l
    if not SPLIT:
        total = l + gl.exp2(sinks * LOG2E - m)
    return gl.where(l == 0.0, 0.0, 1.0 / total)


@gluon.jit
def put(half, acc, inv, L: gl.constexpr):
    half.store((acc * gl.convert_layout(inv, gl.SliceLayout(1, L))[:, None]).to(gl.bfloat16))


@gluon.constexpr_function
def beside_ctas(cols):
    """[CTA, row, column] of accumulators [64, cols] of wgmma, of which each CTA holds its own."""
    wide = [[0, 0, 8 << i] for i in range((cols // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0]] + wide, [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[0, 16, 0], [0, 32, 0]], [[1, 0, 0]],
        [2, 64, cols],
    )  # fmt: skip


@gluon.jit
def whereabouts(item, D0: gl.constexpr, COLS: gl.constexpr, OWN: gl.constexpr):
    """Heads [CTA, row, 1] and output dims [1, 1, column] of what both CTAs hold in the layout OWN."""
    cta = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, OWN)))[:, None, None]
    row = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    return cta * 64 + row + nought(item), D0 + gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, OWN)))[None, None, :]


@gluon.jit
def store_by_head(to, stride, x, item, heads, exists):
    """One value per head of both CTAs, if `exists`."""
    HEADS: gl.constexpr = gl.SliceLayout(2, beside_ctas(64))
    cta = gl.arange(0, 2, gl.SliceLayout(1, HEADS))[:, None]
    head = cta * 64 + gl.arange(0, 64, gl.SliceLayout(0, HEADS))[None, :] + nought(item)
    at = to + head.to(gl.int64) * stride
    own = gl.convert_layout(x.reshape([1, 64]), HEADS)  # moves nothing; from [64] the conversion fails in Gluon 3.6
    gl.store(at, gl.broadcast(own, at)[0], mask=(head < heads) & exists)


@gluon.jit
def leave(x, out, offset, item, out_stride_h, heads, D0: gl.constexpr):
    """Rows of O, 16 bytes per lane, to the output."""
    head, col = whereabouts(item, D0, 256, LEAVE)
    gl.store(out + offset + (head.to(gl.int64) * out_stride_h + col), x[None, :, :], mask=head < heads)


@gluon.jit
def leave_part(acc, inv, part_out, part, item, heads, splits, D0: gl.constexpr, COLS: gl.constexpr, L: gl.constexpr):
    """fp32 rows of a split, straight from the accumulators: a lane's 8 bytes are a quarter of a sector, its neighbours' the
    rest."""
    OWN: gl.constexpr = beside_ctas(COLS)
    head, col = whereabouts(item, D0, COLS, OWN)
    x = acc * gl.convert_layout(inv, gl.SliceLayout(1, L))[:, None]
    own = gl.convert_layout(x.reshape([1, 64, COLS]), OWN)  # as in store_by_head
    at = part_out + ((part + head) * D_V + col)
    gl.store(at, gl.broadcast(own, at)[0], mask=head < heads)


@gluon.jit
def left_group(
    lengths, extra_lengths, sink, out, lse, part_out, part_lse, scale_log2, lse_scale, empty_lse,
    heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len, has_sink, has_lse, out_stride_b, out_stride_s, out_stride_h,
    lse_stride_b, lse_stride_s, lse_stride_h, splits, n_items, first_item, stride,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, FP16: gl.constexpr, SLACK: gl.constexpr,
    q_l, q_r, q_x, k0_l, k0_r, k0_x, k1_l, k1_lb, s0_buf, s0_rope, s1_buf, m0_buf, m1_buf, l0_buf, l1_buf, best0_buf, bits,
    free_q, full_q, half_q_l, half_q_r, full_0l, full_0r, free_0l, free_1l, ready_s0, ready_s1, ready_l0, ready_l1, sent,
    at_free_0l, at_free_1l,
):
    HALF: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    cluster_sync()
    item = first_item
    length, extra = load_lengths(
        lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits, DUAL, SPLIT
    )
    next_length, next_extra = load_lengths(
        lengths, extra_lengths, item + stride, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits, DUAL, SPLIT
    )
    _, _, _, _, n = span(length, extra, item, topk, extra_topk, splits, DUAL, SPLIT)
    m = gl.full([64], LOWEST, gl.float32, ROW)
    best = gl.full([64], LOWEST, gl.float32, ROW)
    l = gl.zeros([64], gl.float32, ROW)
    acc = gl.zeros([64, 256], gl.float32, ACC)
    j = 0  # pair of the item
    it = 0  # items so far
    g = 0  # pairs so far
    # scores of the first tile 0; later ones are issued one pair ahead, at the end of the loop body
    more = item < n_items
    if more:
        take_q(q_l, full_q, half_q_l, half_q_r, 0, 256, FP16)
    p = scores_left(q_l.index(0), k0_l.index(0), full_0l, 0, more)
    p = scores_right(q_r, q_x, k0_r, k0_x, 0, p, full_0r, 0, more, FP16)
    word = bits_of(bits, 0, 0)
    p = warpgroup_mma_wait(0, deps=[p])
    x = mask(p, word)
    while item < n_items:
        # Always 0, which the compiler cannot prove: buffers indexed with it have descriptors that vary in the loop, so that
        # they are not hoisted out of it, a hundred of 64 bits each, and spilled.
        z = g >> 30
        phase = g & 1
        last = j + 1 == n
        sinks = m
        if last:
            mbarrier.arrive(free_q, count=1)
            if not SPLIT:
                sinks = load_sink(sink, item, heads, has_sink)
        # ---- tile 0: softmax, publish. The maximum moves only when it must (see limit): P is then at most 2^SLACK,
        #      and most rescales disappear.
        mx = gl.max(x, 1) * scale_log2
        best = gl.maximum(best, mx)
        m0 = gl.where(mx > limit(m, m, l, SLACK, FP16), mx, m)
        a = gl.exp2(m - m0)
        s = gl.exp2(x * scale_log2 - m0[:, None])
        sh = s.to(HALF)
        s0_buf.index(z).store(sh)
        m0_buf.store(m0)
        fence_async_shared()
        mbarrier.arrive(ready_s0, count=1)
        acc = rescale(acc, a, ACC, 256)
        acc = warpgroup_mma(gl.convert_layout(sh, PROBS), k0_l.index(z), acc, use_acc=j > 0, is_async=True)
        l = l * a + gl.sum(s, 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free_0l, count=1)
        arrive_at_peer(at_free_0l)
        # ---- tile 1, from the right group
        mbarrier.wait(ready_s1, phase)
        fence_async_shared()
        m = m1_buf.load(ROW)
        a = gl.exp2(m0 - m)
        acc = rescale(acc, a, ACC, 256)
        l = l * a
        acc = warpgroup_mma(s1_buf.index(z), k1_l.index(z), acc, is_async=True)
        # what the end of an item needs besides O, while the MMA runs
        inv = m
        offset = gl.full([], 0, gl.int64)
        if last:
            l0_buf.store(l)
            best0_buf.store(best)
            mbarrier.arrive(ready_l0, count=1)
            inv, offset = prepare_left(
                l, m, sinks, item, it, lse, part_lse, lse_scale, empty_lse, heads, s_q, has_lse,
                out_stride_b, out_stride_s, lse_stride_b, lse_stride_s, lse_stride_h, splits, SPLIT, l1_buf, ready_l1,
            )
        acc = warpgroup_mma_wait(0, deps=[acc])
        # ---- the rows of a finished item, and the scores of the next tile 0 (after the very last pair: not used)
        more = gl.where(last, item + stride, item) < n_items
        slot = (g + 1) & 1
        if last:
            if SPLIT:
                mbarrier.arrive(free_1l, count=1)
                arrive_at_peer(at_free_1l)
                leave_part(acc, inv, part_out, offset, item, heads, splits, 0, 256, ACC)
            else:
                # from the layout of the MMA a store of 16 bytes per lane needs shared memory: the half that nobody else reads
                mbarrier.wait(sent, it & 1)
                put(k1_lb.index(z), acc, inv, ACC)
                rows = k1_lb.index(z).load(gl.SliceLayout(0, LEAVE))
                mbarrier.arrive(free_1l, count=1)
                arrive_at_peer(at_free_1l)
                leave(rows, out, offset, item, out_stride_h, heads, 0)
            # The sums of the next item do not read these zeros, but a value that stays alive would take the registers.
            acc = gl.zeros([64, 256], gl.float32, ACC)
            if more:
                take_q(q_l, full_q, half_q_l, half_q_r, it + 1, 256, FP16)
        else:
            mbarrier.arrive(free_1l, count=1)
            arrive_at_peer(at_free_1l)
        p_next = scores_left(q_l.index(z), k0_l.index(z), full_0l, phase ^ 1, more)
        p_next = scores_right(q_r, q_x, k0_r, k0_x, z, p_next, full_0r, phase ^ 1, more, FP16)
        word = bits_of(bits, slot, 0)
        j += 1
        if last:
            m = gl.full([64], LOWEST, gl.float32, ROW)
            best = gl.full([64], LOWEST, gl.float32, ROW)
            l = gl.zeros([64], gl.float32, ROW)
            j = 0
            it += 1
            item += stride
            _, _, _, _, n = span(next_length, next_extra, item, topk, extra_topk, splits, DUAL, SPLIT)
            next_length, next_extra = load_lengths(
                lengths, extra_lengths, item + stride, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits,
                DUAL, SPLIT,
            )
        g += 1
        p = warpgroup_mma_wait(0, deps=[p_next])
        x = mask(p, word)
    cluster_sync()


@gluon.jit
def prepare_left(
    l, m, sinks, item, it, lse, part_lse, lse_scale, empty_lse, heads, s_q, has_lse, out_stride_b, out_stride_s,
    lse_stride_b, lse_stride_s, lse_stride_h, splits, SPLIT: gl.constexpr, l1_buf, ready_l1,
):
    """Writes lse. Returns the factors of the rows, and where the rows go: an offset in the output, or the first part."""
    mbarrier.wait(ready_l1, it & 1)
    l_all = l + l1_buf.load(ROW)
    inv = inverse(l_all, m, sinks, SPLIT)
    token, split = place(item, splits, SPLIT)
    empty = l_all == 0.0
    lse2 = gl.where(empty, float("-inf"), m + gl.log2(l_all))
    if SPLIT:
        offset = (token.to(gl.int64) * splits + split) * heads
        store_by_head(part_lse + offset, 1, lse2, item, heads, True)
    else:
        b = (token // s_q).to(gl.int64)
        s_pos = (token % s_q).to(gl.int64)
        offset = b * out_stride_b + s_pos * out_stride_s
        lse_row = lse + (b * lse_stride_b + s_pos * lse_stride_s)
        lse_out = gl.where(empty, empty_lse, lse2 * (LN2 * lse_scale))
        store_by_head(lse_row, lse_stride_h, lse_out, item, heads, has_lse != 0)
    return inv, offset


@gluon.jit
def right_group(
    lengths, extra_lengths, sink, out, max_logits, part_out, part_max, scale_log2,
    heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len, has_sink, has_max, out_stride_b, out_stride_s, out_stride_h,
    max_stride_b, max_stride_s, max_stride_h, splits, n_items, first_item, stride,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, FP16: gl.constexpr, SLACK: gl.constexpr,
    q_l, q_r, q_x, k0_r, k0_rb, k1_l, k1_r, k1_rb, k1_x, s0_buf, s0_rope, s1_buf, m0_buf, m1_buf, l0_buf, l1_buf, best0_buf, bits,
    free_q, full_q, half_q_l, half_q_r, full_1l, full_1r, free_0r, free_1r, ready_s0, ready_s1, ready_l0, ready_l1, sent,
    at_free_0r, at_free_1r, at_sent,
):
    HALF: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    Q_COLS: gl.constexpr = 256
    cluster_sync()
    item = first_item
    length, extra = load_lengths(
        lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits, DUAL, SPLIT
    )
    next_length, next_extra = load_lengths(
        lengths, extra_lengths, item + stride, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits, DUAL, SPLIT
    )
    _, _, _, _, n = span(length, extra, item, topk, extra_topk, splits, DUAL, SPLIT)
    m = gl.full([64], LOWEST, gl.float32, ROW)
    best = gl.full([64], LOWEST, gl.float32, ROW)
    l = gl.zeros([64], gl.float32, ROW)
    acc = gl.zeros([64, 256], gl.float32, ACC)
    j = 0
    it = 0
    g = 0
    if item < n_items:
        take_q(q_r, full_q, half_q_r, half_q_l, 0, Q_COLS, FP16)
    while item < n_items:
        z = g >> 30
        phase = g & 1
        last = j + 1 == n
        # ---- tile 0, from the left group: before the scores of tile 1, which is dequantised meanwhile
        mbarrier.wait(ready_s0, phase)
        fence_async_shared()
        m0 = m0_buf.load(ROW)
        a = gl.exp2(m - m0)
        acc = rescale(acc, a, ACC, 256)
        acc = warpgroup_mma(s0_buf.index(z), k0_r.index(z), acc, use_acc=j > 0, is_async=True)
        # ---- scores of tile 1
        p = scores_left(q_l.index(z), k1_l.index(z), full_1l, phase, True)
        word = bits_of(bits, phase, 1)  # before free_0r, behind which the slot is refilled
        acc, p = warpgroup_mma_wait(1, deps=[acc, p])
        mbarrier.arrive(free_0r, count=1)
        arrive_at_peer(at_free_0r)
        p = scores_right(q_r, q_x, k1_r, k1_x, z, p, full_1r, phase, True, FP16)
        p = warpgroup_mma_wait(0, deps=[p])
        sinks = m
        if last:
            mbarrier.arrive(free_q, count=1)
            if not SPLIT:
                arrive_at_peer(at_sent)
                sinks = load_sink(sink, item, heads, has_sink)
        x = mask(p, word)
        mx = gl.max(x, 1) * scale_log2
        best = gl.maximum(best, mx)
        # ---- tile 1: softmax, publish
        m = gl.where(mx > limit(m0, m, l, SLACK, FP16), mx, m0)
        s = gl.exp2(x * scale_log2 - m[:, None])
        sh = s.to(HALF)
        s1_buf.index(z).store(sh)
        m1_buf.store(m)
        fence_async_shared()
        mbarrier.arrive(ready_s1, count=1)
        c = gl.exp2(m0 - m)
        l = l * (a * c) + gl.sum(s, 1)
        if last:
            l1_buf.store(l)
            mbarrier.arrive(ready_l1, count=1)
        acc = rescale(acc, c, ACC, 256)
        acc = warpgroup_mma(gl.convert_layout(sh, PROBS), k1_r.index(z), acc, is_async=True)
        inv = m
        offset = gl.full([], 0, gl.int64)
        if last:
            inv, offset = prepare_right(
                l, m, best, sinks, item, it, max_logits, part_max, heads, s_q, has_max, out_stride_b, out_stride_s,
                max_stride_b, max_stride_s, max_stride_h, splits, SPLIT, l0_buf, best0_buf, ready_l0,
            )
        acc = warpgroup_mma_wait(0, deps=[acc])
        j += 1
        if last:
            if SPLIT:
                mbarrier.arrive(free_1r, count=1)
                arrive_at_peer(at_free_1r)
                leave_part(acc, inv, part_out, offset, item, heads, splits, 256, 256, ACC)
            else:
                mbarrier.wait(sent, it & 1)
                put(k1_rb.index(z), acc, inv, ACC)
                rows = k1_rb.index(z).load(gl.SliceLayout(0, LEAVE))
                mbarrier.arrive(free_1r, count=1)
                arrive_at_peer(at_free_1r)
                leave(rows, out, offset, item, out_stride_h, heads, 256)
            acc = gl.zeros([64, 256], gl.float32, ACC)
            m = gl.full([64], LOWEST, gl.float32, ROW)
            best = gl.full([64], LOWEST, gl.float32, ROW)
            l = gl.zeros([64], gl.float32, ROW)
            j = 0
            it += 1
            item += stride
            if item < n_items:
                take_q(q_r, full_q, half_q_r, half_q_l, it, Q_COLS, FP16)
            _, _, _, _, n = span(next_length, next_extra, item, topk, extra_topk, splits, DUAL, SPLIT)
            next_length, next_extra = load_lengths(
                lengths, extra_lengths, item + stride, n_items, topk, extra_topk, len_per, has_len, has_extra_len, splits,
                DUAL, SPLIT,
            )
        else:
            mbarrier.arrive(free_1r, count=1)
            arrive_at_peer(at_free_1r)
        g += 1
    cluster_sync()


@gluon.jit
def prepare_right(
    l, m, best, sinks, item, it, max_logits, part_max, heads, s_q, has_max, out_stride_b, out_stride_s,
    max_stride_b, max_stride_s, max_stride_h, splits, SPLIT: gl.constexpr, l0_buf, best0_buf, ready_l0,
):
    """Writes max_logits. Returns what prepare_left does."""
    mbarrier.wait(ready_l0, it & 1)
    l_all = l + l0_buf.load(ROW)
    best = gl.maximum(best, best0_buf.load(ROW))
    inv = inverse(l_all, m, sinks, SPLIT)
    token, split = place(item, splits, SPLIT)
    # a NaN key leaves no trace in a maximum, but it does in the sum
    top = gl.where(l_all == l_all, gl.where(best == LOWEST, float("-inf"), best), float("nan"))
    if SPLIT:
        offset = (token.to(gl.int64) * splits + split) * heads
        store_by_head(part_max + offset, 1, top, item, heads, has_max != 0)
    else:
        b = (token // s_q).to(gl.int64)
        s_pos = (token % s_q).to(gl.int64)
        offset = b * out_stride_b + s_pos * out_stride_s
        max_row = max_logits + (b * max_stride_b + s_pos * max_stride_s)
        store_by_head(max_row, max_stride_h, top * LN2, item, heads, has_max != 0)
    return inv, offset


# ------------------------------------------------------------------------------------------------ kernel


@gluon.jit
def new_barrier(COUNT: gl.constexpr):
    """One allocation per barrier, and per buffer below: Triton looks at whole allocations when it decides where warps must
    wait for each other, and an array of barriers would have them wait almost everywhere."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(barrier, count=COUNT)
    return barrier


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
    HB: gl.constexpr,  # heads per CTA
    FP16: gl.constexpr,  # latent dims of Q, K and P in fp16 (scales within 6e-5..146), else bf16
    PERSISTENT: gl.constexpr,  # the grid is smaller than the items
    NW: gl.constexpr,  # producer warps
    R_RIGHT: gl.constexpr,  # registers per thread of the right group and of the producer; the left group has what is left
    R_PRODUCER: gl.constexpr,
    SLACK: gl.constexpr,  # growth in log2 at which a row maximum is always taken up
):
    gl.static_assert(HB == 64, "a CTA has 64 heads")
    if SPLIT:
        release_dependents()
    HALF: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    q_l = gl.allocate_shared_memory(HALF, [1, 64, 256], TILE)
    q_r = gl.allocate_shared_memory(HALF, [1, 64, 256], TILE)
    k0_l = gl.allocate_shared_memory(HALF, [1, 64, 256], TILE)
    k0_r = gl.allocate_shared_memory(HALF, [1, 64, 256], TILE)
    k1_l = gl.allocate_shared_memory(HALF, [1, 64, 256], TILE)
    k1_r = gl.allocate_shared_memory(HALF, [1, 64, 256], TILE)
    k0_rb = reinterpret(k0_r, gl.bfloat16, [1, 64, 256], TILE)
    k1_rb = reinterpret(k1_r, gl.bfloat16, [1, 64, 256], TILE)
    # S shares its buffer with the rope dims of its tile, or shared memory would not suffice: those are dead once S exists, and
    # are refilled with the right half, whose release says that S has been read.
    q_x = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
    k0_x = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
    k1_x = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
    s0_buf = reinterpret(k0_x, HALF, [1, 64, 64], TILE)
    s1_buf = reinterpret(k1_x, HALF, [1, 64, 64], TILE)
    s0_rope = s0_buf
    rope_0 = reinterpret(k0_x, gl.int32, [1, 64, 32], WORDS).index(0)
    rope_1 = reinterpret(k1_x, gl.int32, [1, 64, 32], WORDS).index(0)
    m0_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    m1_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    l0_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    l1_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    best0_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    bits = gl.allocate_shared_memory(gl.int32, [2, 4], VECTOR)
    raw_indices = gl.allocate_shared_memory(gl.int32, [2, 128], VECTOR)
    offsets = gl.allocate_shared_memory(gl.int32, [2, 128], VECTOR)
    landing = gl.allocate_shared_memory(gl.int32, [128, SCALE_WORDS], PLANE)
    SCALE_TYPE: gl.constexpr = gl.float16 if FP16 else gl.float32
    scales = gl.allocate_shared_memory(SCALE_TYPE, [2, 4, GROUPS, 32], CUBE)
    # barriers that the other CTA signals too: where they lie must be found before they are used
    full_0l = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full_0r = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full_1l = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full_1r = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    free_0l = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    free_0r = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    free_1l = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    free_1r = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    sent = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    (
        at_0l, at_0r, at_1l, at_1r,
        at_full_0l, at_full_0r, at_full_1l, at_full_1r,
        at_free_0l, at_free_0r, at_free_1l, at_free_1r, at_sent,
    ) = find_shared(
        (k0_l, k0_r, k1_l, k1_r), (full_0l, full_0r, full_1l, full_1r, free_0l, free_0r, free_1l, free_1r, sent)
    )  # fmt: skip
    mbarrier.init(full_0l, count=1)
    mbarrier.init(full_0r, count=1 + 32 * NW)  # what is dequantised, and the rope dims
    mbarrier.init(full_1l, count=1)
    mbarrier.init(full_1r, count=1 + 32 * NW)
    mbarrier.init(free_0l, count=2)  # a group of each CTA
    mbarrier.init(free_0r, count=2)
    mbarrier.init(free_1l, count=2)
    mbarrier.init(free_1r, count=2)
    if not SPLIT:
        mbarrier.init(sent, count=1)
    full_q = new_barrier(32 * NW)  # every thread of the producer arrives when its own copies have
    # No barrier is initialised that no partition uses: it would be dead from there on, and what Triton hands over at warp_specialize
    # would lie in its place. Parts of a split are not staged where copies may be read from, and bf16 latents convert no Q.
    half_q_l = full_q
    half_q_r = full_q
    if FP16:
        half_q_l = new_barrier(1)
        half_q_r = new_barrier(1)
    free_q = new_barrier(2)
    ready_s0 = new_barrier(1)
    ready_s1 = new_barrier(1)
    ready_l0 = new_barrier(1)
    ready_l1 = new_barrier(1)

    n_items = tokens
    if SPLIT:
        n_items = n_items * splits
    first_item = cluster_number()
    stride = cluster_count() if PERSISTENT else n_items
    # What Triton hands over lies where find_shared had its sums, and Triton puts no barrier of its own before it.
    sync_threads()
    gl.warp_specialize(
        [
            (left_group, (
                lengths, extra_lengths, sink, out, lse, part_out, part_lse, scale_log2, lse_scale, empty_lse,
                n_heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len, has_sink, has_lse,
                out_stride_b, out_stride_s, out_stride_h, lse_stride_b, lse_stride_s, lse_stride_h,
                splits, n_items, first_item, stride, DUAL, SPLIT, FP16, SLACK,
                q_l, q_r, q_x, k0_l, k0_r, k0_x, k1_l, reinterpret(k1_l, gl.bfloat16, [1, 64, 256], TILE),
                s0_buf, s0_rope, s1_buf, m0_buf, m1_buf, l0_buf, l1_buf, best0_buf, bits,
                free_q, full_q, half_q_l, half_q_r, full_0l, full_0r, free_0l, free_1l, ready_s0, ready_s1, ready_l0, ready_l1, sent,
                at_free_0l, at_free_1l,
            )),
            (right_group, (
                lengths, extra_lengths, sink, out, max_logits, part_out, part_max, scale_log2,
                n_heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len, has_sink, has_max,
                out_stride_b, out_stride_s, out_stride_h, max_stride_b, max_stride_s, max_stride_h,
                splits, n_items, first_item, stride, DUAL, SPLIT, FP16, SLACK,
                q_l, q_r, q_x, k0_r, k0_rb, k1_l, k1_r, k1_rb, k1_x,
                s0_buf, s0_rope, s1_buf, m0_buf, m1_buf, l0_buf, l1_buf, best0_buf, bits,
                free_q, full_q, half_q_l, half_q_r, full_1l, full_1r, free_0r, free_1r, ready_s0, ready_s1, ready_l0, ready_l1, sent,
                at_free_0r, at_free_1r, at_sent,
            )),
            (producer, (
                q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths,
                n_heads, s_q, topk, extra_topk, slots, extra_slots, page, extra_page, len_per, has_len, has_extra_len,
                page_stride, extra_page_stride, q_stride_b, q_stride_s, q_stride_h,
                idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, splits, n_items, first_item, stride,
                DUAL, SPLIT, PAGE, EXTRA_PAGE, FP16, NW, SCALE_TYPE,
                reinterpret(q_l, gl.bfloat16, [1, 64, 256], TILE).index(0), reinterpret(q_r, gl.bfloat16, [1, 64, 256], TILE).index(0),
                q_x.index(0),
                reinterpret(k0_l, gl.int32, [1, 64, 128], WORDS), reinterpret(k0_r, gl.int32, [1, 64, 128], WORDS), rope_0,
                reinterpret(k1_l, gl.int32, [1, 64, 128], WORDS), reinterpret(k1_r, gl.int32, [1, 64, 128], WORDS), rope_1,
                raw_indices, offsets, landing, scales, bits,
                free_q, full_q, full_0l, full_0r, full_1l, full_1r, free_0l, free_0r, free_1l, free_1r,
                at_0l, at_0r, at_1l, at_1r, at_full_0l, at_full_0r, at_full_1l, at_full_1r,
            )),
        ],
        [4, NW],
        [R_RIGHT, R_PRODUCER],
    )
