"""Sparse-MLA attention over the v4 KV cache: family "sm90_rs_fp8", Gluon for Hopper, emitted for sm90.

out[t, h] = sum_j exp(x_j) v_j / (sum_j exp(x_j) + exp(sink[h])),  x_j = sm_scale * <q[t, h], k_j>,  v_j = k_j[:512]
over the slots j that `indices` selects for token t, from one cache or from two under the same softmax. sm_scale must be
positive.

Rows stay fp8 in shared memory. Keys, and the dims of values, lie on the M side of the MMA, whose left operand wgmma also takes
from registers ("RS"): the two groups that multiply read a fragment of the rows as it lies, dequantise it in registers and
multiply, while the fragment before is being multiplied. Nothing dequantised is ever stored.

    S^T [64 keys, heads] = K [64, d] Q^T          O^T [512, heads] += V^T [512, 64 keys] P^T [64 keys, heads]

One program serves items (token, split, block of HB heads), head block fastest, with stride num_programs. An item's keys are
taken in pairs of tiles of 64; a tile belongs to one cache, the main cache's tiles come first. Tiles beyond the length are not
visited, but an item without a key has one pair, fully masked. Three partitions of warps:

  producer     copies rows by cp.async into a ring of STAGES tiles, and what is wanted per key: where its row is (-1: not valid)
               and its scales, converted once
  left group   S0 = softmax(Q K0^T), holds O[:, :256]:  O += S1 V1 of the pair before, O += S0 V0
  right group  S1 = softmax(Q K1^T), holds O[:, 256:]:  O += S0 V0, O += S1 V1

Both groups take tile after tile, so that a pair needs two hand-overs: the left group publishes S0 and its maximum, the right
group derives its own maximum from that one and publishes S1. The left group multiplies the values of tile 1 a pair later, behind
its next softmax (those of an item's last tile at the item's end): it need not wait for S1 before its next scores, so that the
groups can be half a pair apart, and one multiplies while the other takes exponentials. The left group finishes an item's
statistics for both. Each group copies its chunks of Q, as bf16, where they are used: those of the next item as soon as it has
multiplied this item's last values, and turns them into the order of the fragments, where they lie, before the output leaves.

  barrier        signalled by            when                                                  read by
  half_q_l, _r   left, right             its chunks of an item's Q are in order                right, left
  full[h][stage] producer                rows, scales and (left half) places of half a tile    left (tile 0), right (tile 1)
  empty[h][..]   left (h = 0), right     the rows of its half are in registers as values       producer
  ready_s0, _s1  left, right             S and the maximum are in shared memory                right, left
  free_s0, _s1   right, left             S V of that tile is done                              left, right
  ready_l1       right                   sum and true maximum of its tiles are there           left
  ready_l0       left                    factors and rows of the output are there              right

A maximum may be overwritten once the other group's next S is there, and Q once its last one is. A tile's readers that did not wait
for it have waited for an S that comes of it, and whoever releases a half has an S of all that read it before. The left half of
tile 1 is released last, by the left group's late values. It makes room for a tile 0: there the right half comes first, in the
producer and in the scores.
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

FAMILY = "sm90_rs_fp8"
LAYOUT = 'v4'
ARCH = 'sm90'
TEMPLATE_HASH = 'bf567d63019e3a19'
TRITON_RANGE = ('3.6', '4.0')

D_V = gl.constexpr(512)
ROW_BYTES = gl.constexpr(576)
ROPE_WORD = gl.constexpr(112)
SCALE_STRIDE = gl.constexpr(8)  # bytes per token in the footer of a page
SCALE_WORDS = gl.constexpr(2)
HALF_SCALES = gl.constexpr(4)  # scales per key and half of the dims; the very last is unused
GROUP_WORDS = gl.constexpr(16)  # words of a row under one scale
CHUNKS = gl.constexpr(7)  # of 64 dequantised dims
V_ROPE = gl.constexpr(True)  # the rope dims are values too, in bf16
ROPE_TILE = gl.constexpr(3)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)  # finite, so that a leading tile without a valid key leaves no inf - inf

# Names of the newer API where it has them (the older ones then are stubs that raise)
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_SMEM = gl.shared_memory_descriptor
reinterpret = _SMEM.reinterpret if hasattr(_SMEM, "reinterpret") else _SMEM._reinterpret

# A group arrives by sync_threads() and mbarrier.expect(barrier, 0), which is what mbarrier.arrive does: its threads meet, and one
# arrives. But Triton takes an mbarrier.arrive for a read and a write of all shared memory, and so has the threads meet once more
# before whatever touches shared memory next.
sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


# ------------------------------------------------------------------------------------------------ layouts
#
# A fragment of wgmma's left operand, 64 rows x 16 columns per step: lane 4 g + c of warp w holds rows 16 w + g and 8 more, and
# columns 2 c, 2 c + 1, and 8 more. The order of the columns of K is free as long as Q has the same, and so is the order of the
# rows of V^T, the dims of the output. Both are chosen so that a lane reads neighbouring bytes of a row, and that the lanes of a
# read hit all banks, together with the rows: key r of the MMA, bits r2 r1 r0, is row r0 r2 r1 of its eight in memory. Bits of an
# index are written from the highest to the lowest.


@gluon.jit
def by_key(x):
    """[64] by row in memory -> by key of the MMA. Moves nothing."""
    return x.reshape([8, 2, 2, 2]).permute((0, 2, 3, 1)).reshape([64])


@gluon.jit
def by_row(x):
    """The way back."""
    return x.reshape([8, 2, 2, 2]).permute((0, 3, 1, 2)).reshape([64])


@gluon.constexpr_function
def scores_layout(HB):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HB, 16])


@gluon.constexpr_function
def fragment_layout(HB):
    return gl.DotOperandLayout(0, scores_layout(HB), 2)


@gluon.constexpr_function
def warp_layout(HB):
    """[4 warps, HB heads]: what the warps of a group have found out about each head, all four in one lane. Its slice along the
    heads is how statistics of a head are kept: two registers, where the columns of the scores would have them take 16."""
    heads = [[0, 2 << i] if 2 << i < HB else [0, 0] for i in range(5)]
    return gl.DistributedLinearLayout([[0, 1], [1, 0], [2, 0]], heads, [[0, 0], [0, 0]], [], [4, HB])


@gluon.constexpr_function
def dealt_layout(BIT):
    """[4 warps, 2 << BIT keys, 64 heads]: bit BIT of the keys has changed places with a bit of the heads, so that a lane has both
    keys of half of its heads: each step of a reduction over the keys then has half as much to pass between lanes as the one
    before, where it would always be all of it."""
    keys = [[0, 1 << i, 0] for i in range(BIT)]
    heads = [[0, 0, 8 << i] for i in range(BIT)]
    dealt = [[0, 0, 8 << i] for i in range(BIT, 3)]
    return gl.DistributedLinearLayout(
        [[0, 0, 1]] + heads + [[0, 1 << BIT, 0]], [[0, 0, 2], [0, 0, 4]] + keys + dealt, [[1, 0, 0], [2, 0, 0]], [], [4, 2 << BIT, 64]
    )


@gluon.constexpr_function
def head_layout(HB):
    return gl.SliceLayout(0, warp_layout(HB))


@gluon.constexpr_function
def chunk_layout():
    """[64 rows, 16 words]: 64 dims of K. A lane has 16 bytes of two keys: four steps of four dims."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )


@gluon.constexpr_function
def chunk_scales():
    """[1, 64 keys] beside a chunk."""
    return gl.DistributedLinearLayout([[0, 8]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32]], [], [1, 64])


@gluon.constexpr_function
def rope_layout():
    """[64 rows, 64 bf16 dims]: a lane has two pieces of 16 bytes of two keys, each two steps."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]], [[0, 8], [0, 16], [4, 0], [1, 0], [2, 0]], [[16, 0], [32, 0]], [], [64, 64]
    )


@gluon.constexpr_function
def step_words(words):
    """Which words of a row each lane and warp has in a step of the values: those of its own, of g, of the warp."""
    if words == 64:
        return [1], [2, 16, 4], [8, 32]
    return [], [1, 2, 16], [4, 8]


@gluon.constexpr_function
def step_layout(words):
    """[16 rows, words]: one step of the values of 4 x words dims."""
    own, g, w = step_words(words)
    wide = lambda bits: [[0, b] for b in bits]
    return gl.DistributedLinearLayout(
        wide(own) + [[4, 0], [8, 0]], [[1, 0], [2, 0]] + wide(g), wide(w), [], [16, words]
    )


@gluon.constexpr_function
def half_step_layout():
    """[16 rows, 32 halves of words]: one step of the values of 64 dims."""
    return gl.DistributedLinearLayout(
        [[4, 0], [8, 0]], [[1, 0], [2, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [], [16, 32]
    )


@gluon.constexpr_function
def rope_step_layout():
    """[16 rows, 64 bf16 dims]: one step of the rope dims as values."""
    return gl.DistributedLinearLayout(
        [[0, 1], [4, 0], [8, 0]], [[1, 0], [2, 0], [0, 2], [0, 4], [0, 32]], [[0, 8], [0, 16]], [], [16, 64]
    )


@gluon.constexpr_function
def pair_layout(words, group):
    """[8 pairs of keys, scales, words of a scale]: a step once even and odd keys are apart."""
    own, g, w = step_words(words)
    wide = lambda bits: [[0, b // group, b % group] for b in bits]
    return gl.DistributedLinearLayout(
        wide(own) + [[4, 0, 0]], [[1, 0, 0], [2, 0, 0]] + wide(g), wide(w), [], [8, words // group, group]
    )


@gluon.constexpr_function
def half_pair_layout():
    """[8 pairs of keys, 1 scale, 32 halves of words]."""
    return gl.DistributedLinearLayout(
        [[4, 0, 0]], [[1, 0, 0], [2, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 0, 8], [0, 0, 16]], [], [8, 1, 32]
    )


@gluon.constexpr_function
def pair_scales(words, group):
    """[scales, 16 keys] beside `pair_layout`, before even and odd keys are apart."""
    own, g, w = step_words(words)
    wide = lambda bits: [[b // group, 0] for b in bits]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 8]], [[0, 2], [0, 4]] + wide(g), wide(w), [], [words // group, 16]
    )


@gluon.constexpr_function
def half_pair_scales():
    return gl.DistributedLinearLayout([[0, 1], [0, 8]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [1, 16])


@gluon.constexpr_function
def output_layout(dims, rope, HB):
    """[dims, HB]: accumulators in the order of the dims. A lane has dims / 32 neighbouring dims of each of its heads."""
    if dims == 256:
        own, g, w = [1, 2, 4], [8, 64, 16], [32, 128]
    elif dims == 128:
        own, g, w = [1, 2], [4, 8, 64], [16, 32]
    elif rope:
        own, g, w = [1], [2, 4, 32], [8, 16]
    else:
        own, g, w = [1], [2, 4, 8], [16, 32]
    wide = lambda bits: [[b, 0] for b in bits]
    heads = [[0, 1]] + [[0, 8 << i] for i in range((HB // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(wide(own) + heads, [[0, 2], [0, 4]] + wide(g), wide(w), [], [dims, HB])


@gluon.constexpr_function
def q_layout(HB, ROPE):
    """[HB heads, 64 dims] of Q: a lane has pieces of 16 bytes of a head which make, in the order of the fragments, pieces of 16
    bytes again. With fewer heads warps have fewer pieces of each."""
    pieces = [[0, 8], [0, 16]] if ROPE else [[0, 16], [0, 32]]
    more = [[16, 0], [32, 0]]
    count = (HB // 16).bit_length() - 1  # bits of the heads beyond the lanes'
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]] + pieces[: count], [[0, 32 if ROPE else 8], [1, 0], [2, 0], [4, 0], [8, 0]],
        more[:count] + pieces[count:], [], [HB, 64],
    )


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
def dequantise_pairs_fp16(even, odd, scales2):
    """Words of four dims of two keys, times the two keys' fp16 scales -> for each of the dims a word of its two fp16 values."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b; .reg .b32 x, y, c;
        prmt.b32 x, $4, $5, 0x5140;
        prmt.b32 y, $4, $5, 0x7362;
        mov.b32 {a, b}, x;
        cvt.rn.f16x2.e4m3x2 c, a;
        mul.rn.f16x2 $0, c, $6;
        cvt.rn.f16x2.e4m3x2 c, b;
        mul.rn.f16x2 $1, c, $6;
        mov.b32 {a, b}, y;
        cvt.rn.f16x2.e4m3x2 c, a;
        mul.rn.f16x2 $2, c, $6;
        cvt.rn.f16x2.e4m3x2 c, b;
        mul.rn.f16x2 $3, c, $6;
        }""",
        "=&r,=&r,=&r,=r,r,r,r", [even, odd, scales2], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )


@gluon.jit
def dequantise_pairs_bf16(even, odd, even_scale, odd_scale):
    """Words of four dims of two keys, times the keys' fp32 scales -> for each of the dims a word of its two bf16 values."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 a, b, e, f; .reg .b32 c; .reg .f32 s, t, u, v, w, x, y, z;
        mov.b32 {a, b}, $4;
        cvt.rn.f16x2.e4m3x2 c, a;
        mov.b32 {e, f}, c;
        cvt.f32.f16 s, e;
        cvt.f32.f16 t, f;
        cvt.rn.f16x2.e4m3x2 c, b;
        mov.b32 {e, f}, c;
        cvt.f32.f16 u, e;
        cvt.f32.f16 v, f;
        mov.b32 {a, b}, $5;
        cvt.rn.f16x2.e4m3x2 c, a;
        mov.b32 {e, f}, c;
        cvt.f32.f16 w, e;
        cvt.f32.f16 x, f;
        cvt.rn.f16x2.e4m3x2 c, b;
        mov.b32 {e, f}, c;
        cvt.f32.f16 y, e;
        cvt.f32.f16 z, f;
        mul.rn.f32 s, s, $6;
        mul.rn.f32 t, t, $6;
        mul.rn.f32 u, u, $6;
        mul.rn.f32 v, v, $6;
        mul.rn.f32 w, w, $7;
        mul.rn.f32 x, x, $7;
        mul.rn.f32 y, y, $7;
        mul.rn.f32 z, z, $7;
        cvt.rn.bf16x2.f32 $0, w, s;
        cvt.rn.bf16x2.f32 $1, x, t;
        cvt.rn.bf16x2.f32 $2, y, u;
        cvt.rn.bf16x2.f32 $3, z, v;
        }""",
        "=&r,=&r,=&r,=r,r,r,f,f", [even, odd, even_scale, odd_scale],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )


@gluon.jit
def apart(x, FP16: gl.constexpr):
    """A word of two 16-bit values -> the values. The compiler keeps them together."""
    if FP16:
        return gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
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


@gluon.jit
def rough_log2(x):
    """One instruction, where gl.log2 takes twenty."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rough_inverse(x):
    """One instruction, off by an ulp at most."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def release_dependents():
    """Let the merge be launched now: it waits for all of this kernel by itself (griddepcontrol.wait) before it reads a part."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# ------------------------------------------------------------------------------------------------ items


@gluon.jit
def place(item, heads, splits, SPLIT: gl.constexpr, HB: gl.constexpr):
    """Token, split and head block of an item."""
    if HB == 64:  # at most 128 heads: one or two blocks
        two = (heads > 64).to(gl.int32)
        token = item >> two
        block = item & two
    else:
        blocks = (heads + HB - 1) // HB
        token = item // blocks
        block = item - token * blocks
    split = 0
    if SPLIT:
        split = token % splits
        token = token // splits
    return token, split, block


@gluon.jit
def load_lengths(
    lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, HB: gl.constexpr,
):
    """The lengths of an item's token as they are stored; topk when there are none or no such item."""
    token, _, _ = place(item, heads, splits, SPLIT, HB)
    length = gl.load(lengths + token // len_per, mask=(has_len != 0) & (item < n_items), other=topk)
    extra = 0
    if DUAL:
        extra = gl.load(extra_lengths + token // len_per, mask=(has_extra_len != 0) & (item < n_items), other=extra_topk)
    return length, extra


@gluon.jit
def span(length, extra, item, topk, extra_topk, heads, splits, DUAL: gl.constexpr, SPLIT: gl.constexpr, HB: gl.constexpr):
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
        _, split, _ = place(item, heads, splits, SPLIT, HB)
        per_split = (pairs + splits - 1) // splits
        first = split * per_split
        pairs = gl.minimum(per_split, pairs - first)
    return length, extra, tiles_main, first, gl.maximum(pairs, 1)


# ------------------------------------------------------------------------------------------------ producer


@gluon.jit
def first_keys(
    indices, extra_indices, item, first, tiles_main, s_q, heads, splits,
    idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, DUAL: gl.constexpr, SPLIT: gl.constexpr, HB: gl.constexpr,
):
    """Of an item's first pair: pointers to the index of its first key in both caches, and that key's number among the extra
    cache's keys (below zero: a key of the main cache). The next pair's are 128 further."""
    token, _, _ = place(item, heads, splits, SPLIT, HB)
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
    key = gl.arange(0, 128, gl.BlockedLayout([1], [32], [NW], [0]))
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


@gluon.constexpr_function
def shift_of(page, extra_page):
    """log2 of two page sizes that are powers of two, else none."""
    both = page > 0 and extra_page > 0 and page & (page - 1) == 0 and extra_page & (extra_page - 1) == 0
    return (page.bit_length() - 1, extra_page.bit_length() - 1) if both else ()


@gluon.jit
def resolve(
    raw, cache, words, extra_words, slots, extra_slots, page, extra_page, page_stride, extra_page_stride, offsets, landing,
    DUAL: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, NW: gl.constexpr,
):
    """Where the rows of a pair lie, in units of 16 bytes from their cache's start (-1: not valid), once per key. The scales of
    the keys set out for `landing`."""
    main_rows = PAGE if PAGE > 0 else page
    n_slots = slots
    if DUAL:
        n_slots = gl.where(cache == 1, extra_slots, slots)
    valid = (cache >= 0) & (raw >= 0) & (raw < n_slots)
    index = gl.where(valid, raw, 0)
    if DUAL:
        extra_rows = EXTRA_PAGE if EXTRA_PAGE > 0 else extra_page
        rows = gl.where(cache == 1, extra_rows, main_rows)
        SHIFTS: gl.constexpr = shift_of(PAGE, EXTRA_PAGE)
        if len(SHIFTS) == 2:  # what is written as two divisions by constants becomes one by a selected number
            page_id = index >> gl.where(cache == 1, SHIFTS[1], SHIFTS[0])
        else:
            page_id = index // rows
        page_row = page_id.to(gl.int64) * gl.where(cache == 1, extra_page_stride, page_stride)
    else:
        page_id = index // main_rows
        rows = main_rows
        page_row = page_id.to(gl.int64) * page_stride
    in_page = index - page_id * rows
    row = page_row + in_page * ROW_BYTES
    offsets.store(gl.where(valid, (row >> 4).to(gl.int32), -1))
    COPY: gl.constexpr = gl.BlockedLayout([1, SCALE_WORDS], [32, 1], [NW, 1], [1, 0])
    scale_at = (page_row + rows * ROW_BYTES + in_page * SCALE_STRIDE) >> 2
    start = words
    if DUAL:
        start = gl.where(cache == 1, extra_words, words)
    at = gl.expand_dims(gl.multiple_of(gl.convert_layout(start + scale_at, gl.SliceLayout(1, COPY)), 4 * SCALE_WORDS), 1)
    exists = gl.expand_dims(gl.convert_layout(valid, gl.SliceLayout(1, COPY)), 1)
    at_word = at + gl.expand_dims(gl.arange(0, SCALE_WORDS, gl.SliceLayout(0, COPY)), 0)
    copy_async(landing, at_word, mask=gl.broadcast(exists, at_word)[0])


@gluon.jit
def prepare_scales(landing, scales, TILE: gl.constexpr, HALF: gl.constexpr, FP16: gl.constexpr, NW: gl.constexpr):
    """The scales of half of the dims of a tile's keys, in the type that the dequantisation takes and in its order [scale, key]."""
    COPY: gl.constexpr = gl.BlockedLayout([1, HALF_SCALES], [32, 1], [NW, 1], [1, 0])
    x = landing.slice(64 * TILE, 64, dim=0).slice(HALF_SCALES * HALF, HALF_SCALES, dim=1).load(COPY)
    # 2^(byte - 127); byte 0 is the subnormal 2^-127 and 255 is NaN, which a plain shift gets wrong
    b = x.to(gl.int32)
    exponent = gl.where(b == 0, 0x00400000, b << 23)
    factor = gl.where(b == 255, 0x7FC00000, exponent).to(gl.float32, bitcast=True)
    factor = factor.reshape([8, 2, 2, 2, HALF_SCALES]).permute((4, 0, 2, 3, 1)).reshape([HALF_SCALES, 64])  # see by_key
    if FP16:
        scales.store(factor.to(gl.float16))
    else:
        scales.store(factor.to(gl.bfloat16))


@gluon.jit
def copy_columns(start, offsets, tile, WORD0: gl.constexpr, WORDS: gl.constexpr, NW: gl.constexpr):
    """Copy WORDS words of each of 64 rows, from word WORD0 on; zero for rows that are not valid."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [NW, 1], [1, 0])
    at = offsets.load(gl.SliceLayout(1, L))
    row = gl.expand_dims(start + at.to(gl.int64) * 4, 1)
    word = row + gl.expand_dims(WORD0 + gl.arange(0, WORDS, gl.SliceLayout(0, L)), 0)
    copy_async(tile, word, mask=gl.broadcast(gl.expand_dims(at, 1) >= 0, word)[0])


@gluon.jit
def copy_left(start, offsets, st, places, tiles, NW: gl.constexpr):
    """Dims 0..255 of a tile into their stage, and the places of its rows."""
    places.index(st).store(by_key(offsets.load(gl.BlockedLayout([1], [32], [NW], [0]))))
    copy_columns(start, offsets, tiles[0].index(st), 0, 64, NW)


@gluon.jit
def copy_right(start, offsets, st, tiles, NW: gl.constexpr):
    """The other dims of a tile."""
    copy_columns(start, offsets, tiles[1].index(st), 64, 32, NW)
    copy_columns(start, offsets, tiles[2].index(st), 96, 16, NW)
    copy_columns(start, offsets, tiles[ROPE_TILE].index(st), ROPE_WORD, 32, NW)


@gluon.jit
def produce(
    tile, start, offsets, landed, tiles, places, scales, full, empty, TILE: gl.constexpr, STAGES: gl.constexpr,
    FP16: gl.constexpr, NW: gl.constexpr,
):
    """Tile number `tile`. Each half has a group that multiplies its values and then releases it. Rows are asked for before the
    pair's scales are awaited, in the order in which there is room for them."""
    st = tile % STAGES
    phase = (tile // STAGES) & 1
    if TILE == 0:
        mbarrier.wait(empty[1].index(st), phase ^ 1)
        copy_right(start, offsets, st, tiles, NW)
        async_copy.mbarrier_arrive(full[1].index(st), increment_count=False)
        mbarrier.wait(empty[0].index(st), phase ^ 1)
        copy_left(start, offsets, st, places, tiles, NW)
        async_copy.mbarrier_arrive(full[0].index(st), increment_count=False)
        async_copy.wait_group(0)  # the rows just asked for are in no group yet
    else:
        mbarrier.wait(empty[0].index(st), phase ^ 1)
        copy_left(start, offsets, st, places, tiles, NW)
        async_copy.mbarrier_arrive(full[0].index(st), increment_count=False)
        mbarrier.wait(empty[1].index(st), phase ^ 1)
        copy_right(start, offsets, st, tiles, NW)
        async_copy.mbarrier_arrive(full[1].index(st), increment_count=False)
    for i in gl.static_range(2):
        prepare_scales(landed, scales[i if TILE else 1 - i].index(st), TILE, i if TILE else 1 - i, FP16, NW)
        sync_threads()
        mbarrier.expect(full[i if TILE else 1 - i].index(st), 0)


@gluon.jit
def q_rows(
    q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT: gl.constexpr, HB: gl.constexpr, L: gl.constexpr
):
    """Pointers to the rows of Q of an item. A head that does not exist has the last one's row: its scores count nowhere."""
    token, _, block = place(item, heads, splits, SPLIT, HB)
    head = gl.minimum(block * HB + gl.arange(0, HB, L), heads - 1)
    row = q + (token // s_q).to(gl.int64) * q_stride_b + (token % s_q).to(gl.int64) * q_stride_s
    return row + head.to(gl.int64) * q_stride_h


@gluon.jit
def in_order(x, ROPE: gl.constexpr, FP16: gl.constexpr, HB: gl.constexpr):
    """64 dims of Q in the order of the fragments. Moves nothing."""
    if ROPE:
        return x.reshape([HB, 2, 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5)).reshape([HB, 64])
    else:
        x = x.reshape([HB, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([HB, 64])
        if FP16:
            x = x.to(gl.float16)
        return x


@gluon.jit
def copy_q(
    q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, q_bf16, q_rope, FIRST: gl.constexpr, LAST: gl.constexpr,
    ROPE: gl.constexpr, SPLIT: gl.constexpr, HB: gl.constexpr,
):
    """Start copying a group's chunks of Q of an item, as bf16, to where they are used. Needs no registers to land in."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = q_rows(q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT, HB, gl.SliceLayout(1, L))
    at = gl.expand_dims(row, 1) + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    for i in gl.static_range(FIRST, LAST):
        copy_async(q_bf16.index(i), at + i * 64)
    if ROPE:
        copy_async(q_rope.index(0), at + CHUNKS * 64)
    async_copy.commit_group()


@gluon.jit
def order_q(
    q_latent, q_bf16, q_rope, mine, FIRST: gl.constexpr, LAST: gl.constexpr, ROPE: gl.constexpr, FP16: gl.constexpr, HB: gl.constexpr
):
    """Bring them in the order of the fragments, where they lie. Two chunks at a time: O is alive, and registers are scarce."""
    async_copy.wait_group(0)
    for i in gl.static_range(FIRST, LAST, 2):
        x = in_order(q_bf16.index(i).load(q_layout(HB, False)), False, FP16, HB)
        if i + 1 < LAST:
            y = in_order(q_bf16.index(i + 1).load(q_layout(HB, False)), False, FP16, HB)
        elif ROPE:
            y = in_order(q_rope.index(0).load(q_layout(HB, True)), True, FP16, HB)
        q_latent.index(i).store(x)
        if i + 1 < LAST:
            q_latent.index(i + 1).store(y)
        elif ROPE:
            q_rope.index(0).store(y)
    if ROPE and (LAST - FIRST) % 2 == 0:
        q_rope.index(0).store(in_order(q_rope.index(0).load(q_layout(HB, True)), True, FP16, HB))
    fence_async_shared()
    sync_threads()
    mbarrier.expect(mine, 0)


@gluon.jit
def prefetch_q(
    q, item, n_items, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits,
    SPLIT: gl.constexpr, HB: gl.constexpr, NW: gl.constexpr,
):
    """Q of an item into L2, so that copying it at the switch of items does not wait for device memory."""
    row = q_rows(
        q, item, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT, HB, gl.BlockedLayout([1], [32], [NW], [0])
    )
    prefetch_q_rows(row, (item < n_items).to(gl.int32))


@gluon.jit
def producer(
    q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths,
    heads, s_q, topk, extra_topk, slots, extra_slots, page, extra_page, len_per, has_len, has_extra_len,
    page_stride, extra_page_stride, q_stride_b, q_stride_s, q_stride_h,
    idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, splits, n_items, first_item, stride,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, HB: gl.constexpr, FP16: gl.constexpr,
    STAGES: gl.constexpr, NW: gl.constexpr,
    tiles, places, scales, raw_indices, offsets, landing, full, empty,
):
    """Three places in the stream of pairs: pair g is copied, then the addresses of pair g + 1 are found and the indices of pair
    g + 2 are copied, while the place of the next tile is still in use."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    KEY: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    words = kv.to(gl.pointer_type(gl.int32), bitcast=True)
    extra_words = extra_kv.to(gl.pointer_type(gl.int32), bitcast=True)
    by_tile = reinterpret(offsets, gl.int32, [2, 64], FLAT)
    landed = reinterpret(landing, gl.uint8, [128, 2 * HALF_SCALES], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # The place whose indices are copied, in scalars. An item, how many pairs it has from there on, pointers to indices, keys and
    # tiles of the main cache that are left.
    item = first_item
    early = gl.full([128], -1, gl.int32, KEY)
    if not SPLIT:  # the main cache's of the first pair: where they are does not depend on the lengths
        at, _, _ = first_keys(
            indices, extra_indices, gl.minimum(item, n_items - 1), 0, 0, s_q, heads, splits,
            idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, False, SPLIT, HB,
        )
        key = gl.arange(0, 128, KEY)
        early = gl.load(at + key, mask=key < topk, other=-1)
    length, extra = load_lengths(
        lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits, DUAL, SPLIT, HB
    )
    length, extra, tiles_main, first, pairs = span(length, extra, item, topk, extra_topk, heads, splits, DUAL, SPLIT, HB)
    at, extra_at, extra_key = first_keys(
        indices, extra_indices, item, first, tiles_main, s_q, heads, splits,
        idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, DUAL, SPLIT, HB,
    )
    below = length - first * 128
    main_tiles = tiles_main - 2 * first
    index, cache = keys_of(at, extra_at, extra_key, below, extra, DUAL, NW)
    raw = early
    if SPLIT:
        raw = gl.load(index, mask=cache >= 0, other=-1)
    elif DUAL:
        raw = gl.where(cache == 0, early, gl.load(index, mask=cache == 1, other=-1))
    resolve(
        raw, cache, words, extra_words, slots, extra_slots, page, extra_page, page_stride, extra_page_stride,
        offsets, landing, DUAL, PAGE, EXTRA_PAGE, NW,
    )
    main_tiles_0 = main_tiles  # of the pair that is copied
    pairs -= 1
    if pairs == 0:
        item += stride
        length, extra = load_lengths(
            lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits,
            DUAL, SPLIT, HB,
        )
        length, extra, tiles_main, first, pairs = span(length, extra, item, topk, extra_topk, heads, splits, DUAL, SPLIT, HB)
        at, extra_at, extra_key = first_keys(
            indices, extra_indices, item, first, tiles_main, s_q, heads, splits,
            idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, DUAL, SPLIT, HB,
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
    copy_async(raw_indices, index, mask=cache >= 0)
    async_copy.commit_group()
    more = first_item < n_items
    g = 0
    while more:
        start = cache_start(words, extra_words, main_tiles_0, 0, DUAL)
        produce(2 * g, start, by_tile.index(0), landed, tiles, places, scales, full, empty, 0, STAGES, FP16, NW)
        start = cache_start(words, extra_words, main_tiles_0, 1, DUAL)
        produce(2 * g + 1, start, by_tile.index(1), landed, tiles, places, scales, full, empty, 1, STAGES, FP16, NW)
        # ---- addresses of the next pair, indices of the one after it
        index, cache = keys_of(at, extra_at, extra_key, below, extra, DUAL, NW)
        resolve(
            raw_indices.load(KEY), cache, words, extra_words, slots, extra_slots, page, extra_page, page_stride, extra_page_stride,
            offsets, landing, DUAL, PAGE, EXTRA_PAGE, NW,
        )
        more = item < n_items
        main_tiles_0 = main_tiles
        pairs -= 1
        if pairs == 0:
            item += stride
            length, extra = load_lengths(
                lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits,
                DUAL, SPLIT, HB,
            )
            length, extra, tiles_main, first, pairs = span(
                length, extra, item, topk, extra_topk, heads, splits, DUAL, SPLIT, HB
            )
            at, extra_at, extra_key = first_keys(
                indices, extra_indices, item, first, tiles_main, s_q, heads, splits,
                idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, DUAL, SPLIT, HB,
            )
            below = gl.where(item < n_items, length - first * 128, 0)
            extra = gl.where(item < n_items, extra, 0)
            main_tiles = tiles_main - 2 * first
            prefetch_q(q, item, n_items, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, SPLIT, HB, NW)
        else:
            at += 128
            extra_at += 128
            extra_key += 128
            below -= 128
            main_tiles -= 2
        index, cache = keys_of(at, extra_at, extra_key, below, extra, DUAL, NW)
        copy_async(raw_indices, index, mask=cache >= 0)
        async_copy.commit_group()
        g += 1


# ------------------------------------------------------------------------------------------------ groups


@gluon.jit
def chunk_of(tiles, scales, st, CHUNK: gl.constexpr):
    """64 latent dims of a tile's rows, and their scales."""
    L: gl.constexpr = chunk_layout()
    if CHUNK < 4:
        raw = tiles[0].index(st).slice(16 * CHUNK, 16, dim=1).load(L)
    elif CHUNK < 6:
        raw = tiles[1].index(st).slice(16 * (CHUNK - 4), 16, dim=1).load(L)
    else:
        raw = tiles[2].index(st).load(L)
    SIDE: gl.constexpr = CHUNK // 4
    scale = scales[SIDE].index(st).slice((CHUNK - 4 * SIDE) * 16 // GROUP_WORDS, 1, dim=0)
    factor = scale.load(chunk_scales()).reshape([64])
    return raw, factor


@gluon.jit
def chunk_fragment(raw, factor, FP16: gl.constexpr, HB: gl.constexpr):
    """A chunk, dequantised, as fragments of four steps."""
    factor = gl.convert_layout(by_row(factor), gl.SliceLayout(1, chunk_layout()), assert_trivial=True)
    factor = gl.expand_dims(factor.to(gl.float32), 1)
    if FP16:
        lo, hi = dequantise_fp16(raw, pack_half2(factor))
    else:
        lo, hi = dequantise_bf16(raw, factor)
    a, b = apart(lo, FP16)
    c, d = apart(hi, FP16)
    x = gl.join(gl.join(a, b), gl.join(c, d)).reshape([8, 2, 2, 2, 4, 4, 2, 2])  # row, lane, step, pair, half of the step
    x = x.permute((0, 2, 3, 1, 5, 7, 4, 6)).reshape([64, 64])
    return gl.convert_layout(x, fragment_layout(HB), assert_trivial=True)


@gluon.jit
def scores(
    tiles, scales, full, tile, z, q_latent, q_rope, FIRST: gl.constexpr, STAGES: gl.constexpr, FP16: gl.constexpr, HB: gl.constexpr
):
    """S^T = K Q^T of a tile, as its halves arrive, from chunk FIRST on (0 or 4, the first one of a half). What the next step reads
    is asked for before this one is multiplied."""
    st = tile % STAGES
    phase = (tile // STAGES) & 1
    p = gl.zeros([64, HB], gl.float32, scores_layout(HB))
    mbarrier.wait(full[FIRST // 4].index(st), phase)
    AHEAD: gl.constexpr = HB < 64 or V_ROPE  # else registers do not suffice, and ptxas would run every MMA by itself
    if AHEAD:
        raw, factor = chunk_of(tiles, scales, st, FIRST)
    for i in gl.static_range(CHUNKS):
        if not AHEAD:
            if i > 0 and (i + FIRST) % CHUNKS == 4 - FIRST:
                mbarrier.wait(full[1 - FIRST // 4].index(st), phase)
            raw, factor = chunk_of(tiles, scales, st, (i + FIRST) % CHUNKS)
        x = chunk_fragment(raw, factor, FP16, HB)
        if AHEAD and i + 1 < CHUNKS:
            if (i + 1 + FIRST) % CHUNKS == 4 - FIRST:
                mbarrier.wait(full[1 - FIRST // 4].index(st), phase)
            raw, factor = chunk_of(tiles, scales, st, (i + 1 + FIRST) % CHUNKS)
        p = warpgroup_mma(x, q_latent.index(z + (i + FIRST) % CHUNKS).permute((1, 0)), p, use_acc=i > 0, is_async=True)
        p = warpgroup_mma_wait(1, deps=[p])
    x = tiles[ROPE_TILE].index(st).load(rope_layout()).reshape([8, 2, 2, 2, 2, 4, 2, 2, 2])
    x = x.permute((0, 2, 3, 1, 4, 6, 7, 5, 8)).reshape([64, 64])
    x = gl.convert_layout(x, fragment_layout(HB), assert_trivial=True)
    p = warpgroup_mma(x, q_rope.index(z).permute((1, 0)), p, is_async=True)
    return warpgroup_mma_wait(0, deps=[p])


@gluon.jit
def step_of(tile, scales, STEP: gl.constexpr, SCALE0: gl.constexpr, WORDS: gl.constexpr, FP16: gl.constexpr):
    """16 keys of WORDS words of a tile's rows: even and odd keys, and their scales (fp16: of both in a word)."""
    COUNT: gl.constexpr = WORDS // GROUP_WORDS
    S: gl.constexpr = gl.SliceLayout(2, pair_layout(WORDS, GROUP_WORDS))
    raw = tile.slice(16 * STEP, 16, dim=0).load(step_layout(WORDS))
    if FP16:
        first = scales.slice(SCALE0, COUNT, dim=0).slice(8 * STEP, 8, dim=1).permute((1, 0)).load(S)
        second = first
    else:
        both = scales.slice(SCALE0, COUNT, dim=0).slice(16 * STEP, 16, dim=1).load(pair_scales(WORDS, GROUP_WORDS))
        first, second = gl.split(both.to(gl.float32).permute((1, 0)).reshape([8, 2, COUNT]).permute((0, 2, 1)))
        first = gl.convert_layout(first, S, assert_trivial=True)
        second = gl.convert_layout(second, S, assert_trivial=True)
    return raw, first, second


@gluon.jit
def step_fragment(raw, first, second, WORDS: gl.constexpr, FP16: gl.constexpr, HB: gl.constexpr):
    """A step, dequantised, as the fragments of 4 x WORDS rows of V^T."""
    COUNT: gl.constexpr = WORDS // GROUP_WORDS
    L: gl.constexpr = pair_layout(WORDS, GROUP_WORDS)
    even, odd = gl.split(raw.reshape([2, 2, 4, WORDS]).permute((0, 2, 3, 1)).reshape([8, WORDS, 2]))
    even = gl.convert_layout(even.reshape([8, COUNT, GROUP_WORDS]), L, assert_trivial=True)
    odd = gl.convert_layout(odd.reshape([8, COUNT, GROUP_WORDS]), L, assert_trivial=True)
    if FP16:
        d0, d1, d2, d3 = dequantise_pairs_fp16(even, odd, gl.expand_dims(first, 2))
    else:
        d0, d1, d2, d3 = dequantise_pairs_bf16(even, odd, gl.expand_dims(first, 2), gl.expand_dims(second, 2))
    a0, b0 = apart(d0, FP16)
    a1, b1 = apart(d1, FP16)
    a2, b2 = apart(d2, FP16)
    a3, b3 = apart(d3, FP16)
    x = gl.join(gl.join(gl.join(a0, a1), gl.join(a2, a3)), gl.join(gl.join(b0, b1), gl.join(b2, b3)))
    # half of the step, c; the word's bits; bits 0 and 1 of the dim in it; even or odd -> row of V^T; key
    if WORDS == 64:
        x = x.reshape([2, 4, 2, 2, 2, 2, 2, 2, 2, 2, 2]).permute((7, 9, 2, 4, 8, 5, 3, 6, 0, 1, 10))
    else:
        x = x.reshape([2, 4, 2, 2, 2, 2, 2, 2, 2, 2]).permute((8, 3, 4, 7, 2, 5, 6, 0, 1, 9))
    return gl.convert_layout(x.reshape([4 * WORDS, 16]), fragment_layout(HB), assert_trivial=True)


@gluon.jit
def values(tile, scales, p, acc, keep, empty, raw, first, second, FP16: gl.constexpr, HB: gl.constexpr):
    """O^T += V^T P^T of a tile, 256 dims. What the next step reads is asked for before this one is multiplied, and the tile is
    released as soon as all of it is in registers. keep: whether there is something to add to."""
    for i in gl.static_range(4):
        x = step_fragment(raw, first, second, 64, FP16, HB)
        if i < 3:
            raw, first, second = step_of(tile, scales, i + 1, 0, 64, FP16)
        if i > 0:  # with two steps under way the two groups' products get in each other's way: 81 cycles each instead of 66
            acc = warpgroup_mma_wait(0, deps=[acc])
        acc = warpgroup_mma(x, p.slice(16 * i, 16, dim=0), acc, use_acc=keep if i == 0 else True, is_async=True)
    sync_threads()
    mbarrier.expect(empty, 0)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def even_values(
    tiles, scales, st, p, acc, keep, empty, raw, first, second, SIDE: gl.constexpr, FP16: gl.constexpr, HB: gl.constexpr
):
    """Of half SIDE of a tile's dims, all of which are fp8."""
    return values(
        tiles[SIDE].index(st), scales[SIDE].index(st), p, acc, keep, empty[SIDE].index(st), raw, first, second, FP16, HB
    )


@gluon.jit
def first_step(tiles, scales, st, SIDE: gl.constexpr, FP16: gl.constexpr):
    return step_of(tiles[SIDE].index(st), scales[SIDE].index(st), 0, 0, 64, FP16)


@gluon.jit
def half_step_of(halves, scales, STEP: gl.constexpr, SCALE0: gl.constexpr, FP16: gl.constexpr):
    """16 keys of 64 dims: a lane has two of them, half a word. And their scales."""
    S: gl.constexpr = gl.SliceLayout(2, half_pair_layout())
    raw = halves.slice(16 * STEP, 16, dim=0).load(half_step_layout())
    if FP16:
        first = scales.slice(SCALE0, 1, dim=0).slice(8 * STEP, 8, dim=1).permute((1, 0)).load(S)
        second = first
    else:
        both = scales.slice(SCALE0, 1, dim=0).slice(16 * STEP, 16, dim=1).load(half_pair_scales()).to(gl.float32)
        first, second = gl.split(both.permute((1, 0)).reshape([8, 2, 1]).permute((0, 2, 1)))
        first = gl.convert_layout(first, S, assert_trivial=True)
        second = gl.convert_layout(second, S, assert_trivial=True)
    return raw, first, second


@gluon.jit
def half_step_fragment(raw, first, second, FP16: gl.constexpr, HB: gl.constexpr):
    """Such a step, dequantised."""
    L: gl.constexpr = half_pair_layout()
    raw = raw.to(gl.int32)
    even, odd = gl.split(raw.reshape([2, 2, 4, 32]).permute((0, 2, 3, 1)).reshape([8, 32, 2]))
    even = gl.convert_layout(even.reshape([8, 1, 32]), L, assert_trivial=True)
    odd = gl.convert_layout(odd.reshape([8, 1, 32]), L, assert_trivial=True)
    if FP16:
        d0, d1, _, _ = dequantise_pairs_fp16(even, odd, gl.expand_dims(first, 2))
    else:
        d0, d1, _, _ = dequantise_pairs_bf16(even, odd, gl.expand_dims(first, 2), gl.expand_dims(second, 2))
    a0, b0 = apart(d0, FP16)
    a1, b1 = apart(d1, FP16)
    x = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    x = x.reshape([2, 4, 4, 8, 2, 2]).permute((2, 4, 3, 0, 1, 5)).reshape([64, 16])
    return gl.convert_layout(x, fragment_layout(HB), assert_trivial=True)


@gluon.jit
def rope_step_of(rope, STEP: gl.constexpr):
    return rope.slice(16 * STEP, 16, dim=0).load(rope_step_layout())


@gluon.jit
def rope_fragment(x, FP16: gl.constexpr, HB: gl.constexpr):
    """16 keys of the rope dims, in the type of the others: one P multiplies all."""
    if FP16:
        x = x.to(gl.float16)
    x = x.reshape([2, 2, 4, 2, 2, 2, 2, 2, 2]).permute((4, 5, 8, 3, 6, 7, 0, 2, 1)).reshape([64, 16])
    return gl.convert_layout(x, fragment_layout(HB), assert_trivial=True)


@gluon.jit
def uneven_steps(tiles, halves, scales, st, FP16: gl.constexpr):
    """What the first step of `uneven_values` reads."""
    factors = scales[1].index(st)
    raw, first, second = step_of(tiles[1].index(st), factors, 0, 0, 32, FP16)
    half, third, fourth = half_step_of(halves.index(st), factors, 0, 2, FP16)
    return raw, first, second, half, third, fourth, rope_step_of(tiles[3].index(st), 0)


@gluon.jit
def uneven_values(tiles, halves, scales, st, p, oa, ob, ox, keep, empty, steps, FP16: gl.constexpr, HB: gl.constexpr):
    """O^T += V^T P^T of a tile, dims 256..383, 384..447 and the rope dims."""
    factors = scales[1].index(st)
    raw, first, second, half, third, fourth, turned = steps
    for i in gl.static_range(4):
        x = step_fragment(raw, first, second, 32, FP16, HB)
        y = half_step_fragment(half, third, fourth, FP16, HB)
        z = rope_fragment(turned, FP16, HB)
        if i < 3:
            raw, first, second = step_of(tiles[1].index(st), factors, i + 1, 0, 32, FP16)
            half, third, fourth = half_step_of(halves.index(st), factors, i + 1, 2, FP16)
            turned = rope_step_of(tiles[3].index(st), i + 1)
        if i > 0:
            oa, ob, ox = warpgroup_mma_wait(0, deps=[oa, ob, ox])
        oa = warpgroup_mma(x, p.slice(16 * i, 16, dim=0), oa, use_acc=keep if i == 0 else True, is_async=True)
        ob = warpgroup_mma(y, p.slice(16 * i, 16, dim=0), ob, use_acc=keep if i == 0 else True, is_async=True)
        ox = warpgroup_mma(z, p.slice(16 * i, 16, dim=0), ox, use_acc=keep if i == 0 else True, is_async=True)
    sync_threads()
    mbarrier.expect(empty[1].index(st), 0)
    return oa, ob, ox


@gluon.jit
def rescale(acc, factors, moved, HB: gl.constexpr):
    """acc [dims, heads] times factors [heads]; skipped where no head's maximum has moved, as in most tiles."""
    if moved:
        acc = acc * factors.load(gl.SliceLayout(0, scores_layout(HB)))[None, :]
    return acc


@gluon.jit
def any_moved(factor):
    return gl.max((factor != 1.0).to(gl.int32), 0) != 0


@gluon.jit
def max_of(x, parts, HB: gl.constexpr):
    """The maximum of each head over the 64 keys: [HB] in `head_layout`."""
    if HB == 64:
        y = gl.max(x.reshape([4, 2, 8, HB]), 1)
        y = gl.max(gl.convert_layout(y, dealt_layout(2)).reshape([4, 2, 4, HB]), 1)
        y = gl.max(gl.convert_layout(y, dealt_layout(1)).reshape([4, 2, 2, HB]), 1)
        parts.store(gl.max(gl.convert_layout(y, dealt_layout(0)), 1))
    else:
        parts.store(gl.max(gl.max(x.reshape([4, 2, 8, HB]), 1), 1))
    return gl.max(parts.load(warp_layout(HB)), 0)


@gluon.jit
def sum_of(x, parts, BY_WARP: gl.constexpr, HB: gl.constexpr):
    """The sum of each head over the 64 keys, likewise; BY_WARP: over each warp's, [4, 64], where the warps meet once per item."""
    y = gl.sum(x.reshape([4, 2, 8, HB]), 1)
    if HB == 64:
        y = gl.sum(gl.convert_layout(y, dealt_layout(2)).reshape([4, 2, 4, HB]), 1)
        y = gl.sum(gl.convert_layout(y, dealt_layout(1)).reshape([4, 2, 2, HB]), 1)
        y = gl.convert_layout(y, dealt_layout(0))
    y = gl.sum(y, 1)
    if BY_WARP:
        return y
    else:
        parts.store(y)
        return gl.sum(parts.load(warp_layout(HB)), 0)


@gluon.constexpr_function
def by_warp_layout():
    """[4 warps, 64 heads]: what is left of `dealt_layout` when a warp's keys are reduced: in each lane the heads that `head_layout`
    gives it."""
    return gl.SliceLayout(1, dealt_layout(0))


@gluon.jit
def no_sums(BY_WARP: gl.constexpr, LEAN: gl.constexpr, HB: gl.constexpr):
    """Of an item without a tile so far."""
    if BY_WARP:
        return gl.zeros([4, HB], gl.float32, by_warp_layout())
    else:
        return gl.zeros([HB], gl.float32, kept_layout(HB, LEAN))


@gluon.jit
def times(l, factor, BY_WARP: gl.constexpr):
    """Sums, heads by heads, by factors of the heads. Moves nothing."""
    if BY_WARP:
        factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(0, by_warp_layout()), assert_trivial=True), 0)
    return l * factor


@gluon.jit
def all_warps(l, parts, BY_WARP: gl.constexpr, HB: gl.constexpr):
    """The sums of the heads over all keys of the group."""
    if BY_WARP:
        parts.store(l)
        return gl.sum(parts.load(warp_layout(HB)), 0)
    else:
        return l


@gluon.constexpr_function
def sums_layout():
    """[64 heads, 8]: sums of the rows of P as the MMA gives them, all 8 the same."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])


@gluon.constexpr_function
def kept_layout(HB, LEAN):
    """Of the sums [HB] of the keys so far."""
    return gl.SliceLayout(1, sums_layout()) if LEAN else head_layout(HB)


@gluon.jit
def start_sums(p, ones, LEAN: gl.constexpr):
    """P 1, while the first values are dequantised: of P as it is rounded, so as it multiplies the values."""
    if LEAN:
        zero = gl.zeros([64, 8], gl.float32, sums_layout())
        return warpgroup_mma(p.permute((1, 0)), ones.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        return 0


@gluon.jit
def end_sums(d):
    return gl.max(warpgroup_mma_wait(0, deps=[d]), 1)


@gluon.jit
def threshold(m, before, l, SLACK: gl.constexpr, SHARE: gl.constexpr):
    """What a tile's maximum must exceed to replace m (log2): m + SLACK, since a P of 2^SLACK is as good as 1 and moving m
    rescales O. But where P meets values in bf16 a key that dominates its row must have the P that is exactly 1, or the rounding
    of its P would be most of the error: there a key also moves m if its P would be more than half of l, the group's sum so
    far, which is relative to `before` (SHARE)."""
    if SHARE:
        return gl.maximum(m, gl.minimum(m + SLACK, before + rough_log2(l) - 1.0))
    else:
        return m + SLACK


@gluon.jit
def mask(p, places, HB: gl.constexpr):
    """-inf where the key is not valid."""
    valid = places.load(gl.SliceLayout(1, scores_layout(HB))) >= 0
    return gl.where(valid[:, None], p, float("-inf"))


@gluon.jit
def load_sink(sink, block, heads, has_sink, HB: gl.constexpr):
    """Sinks of a head block; -inf when there are none."""
    head = block * HB + gl.arange(0, HB, head_layout(HB))
    return gl.load(sink + head, mask=(head < heads) & (has_sink != 0), other=float("-inf"))


@gluon.jit
def inverse(l, m, sinks, SPLIT: gl.constexpr):
    """What normalises a row; a sink far above every key makes it zero, as it should be."""
    total = l
    if not SPLIT:
        total = l + gl.exp2(sinks * LOG2E - m)
    return gl.where(l == 0.0, 0.0, rough_inverse(total))


@gluon.jit
def by_dim(acc, DIMS: gl.constexpr, ROPE: gl.constexpr, HB: gl.constexpr):
    """Accumulators [rows, HB] in the order of the dims. Moves nothing."""
    if DIMS == 256:
        x = acc.reshape([2, 2, 2, 2, 2, 2, 2, 2, HB]).permute((2, 6, 3, 5, 7, 0, 1, 4, 8))
    elif DIMS == 128:
        x = acc.reshape([2, 2, 2, 2, 2, 2, 2, HB]).permute((4, 1, 2, 5, 6, 0, 3, 7))
    elif ROPE:
        x = acc.reshape([2, 2, 2, 2, 2, 2, HB]).permute((3, 0, 1, 4, 5, 2, 6))
    else:
        x = acc.reshape([4, 2, 8, HB]).permute((0, 2, 1, 3))
    return gl.convert_layout(x.reshape([DIMS, HB]), output_layout(DIMS, ROPE, HB), assert_trivial=True)


@gluon.jit
def leave(acc, inv, rows, to, D0: gl.constexpr, DIMS: gl.constexpr, ROPE: gl.constexpr, SPLIT: gl.constexpr, HB: gl.constexpr):
    """Columns of O to the output, or as fp32 to a part: times `inv`, from `rows` on (in 16 numbers; below zero: not written)."""
    L: gl.constexpr = output_layout(DIMS, ROPE, HB)
    H: gl.constexpr = gl.SliceLayout(0, L)
    row = rows.load(H)
    x = by_dim(acc, DIMS, ROPE, HB) * inv.load(H)[None, :]
    at = to + (row.to(gl.int64) * 16)[None, :] + (D0 + gl.arange(0, DIMS, gl.SliceLayout(1, L)))[:, None]
    gl.store(at, x if SPLIT else x.to(gl.bfloat16), mask=(row >= 0)[None, :])


@gluon.jit
def left_group(
    q, lengths, extra_lengths, sink, out, lse, max_logits, part_out, part_lse, part_max, scale_log2, lse_scale, empty_lse,
    heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len, has_sink, has_lse, has_max, out_stride_b, out_stride_s, out_stride_h,
    lse_stride_b, lse_stride_s, lse_stride_h, max_stride_b, max_stride_s, max_stride_h, q_stride_b, q_stride_s, q_stride_h,
    splits, n_items, first_item, stride,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, HB: gl.constexpr, FP16: gl.constexpr, SLACK: gl.constexpr, STAGES: gl.constexpr,
    LEAN: gl.constexpr, q_latent, q_bf16, q_rope, tiles, places, scales, pair_scale, s_buf,
    m0_buf, m1_buf, a_buf, l1_buf, best1_buf, inv_buf, rows_buf, maxima, sums, ones,
    half_q_l, half_q_r, full, empty, ready_s0, ready_s1, free_s0, free_s1, ready_l0, ready_l1,
):
    HALF: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    SHARE: gl.constexpr = not FP16  # P meets values in bf16
    SL: gl.constexpr = scores_layout(HB)
    HL: gl.constexpr = head_layout(HB)
    KL: gl.constexpr = kept_layout(HB, LEAN)
    BY_WARP: gl.constexpr = HB == 64 and not SHARE and not LEAN  # nobody looks at l before the item's end
    item = first_item
    copy_q(
        q, gl.minimum(item, n_items - 1), heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, q_bf16, q_rope,
        0, 4, False, SPLIT, HB,
    )
    length, extra = load_lengths(
        lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits, DUAL, SPLIT, HB
    )
    next_length, next_extra = load_lengths(
        lengths, extra_lengths, item + stride, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits,
        DUAL, SPLIT, HB,
    )
    _, _, _, _, n = span(length, extra, item, topk, extra_topk, heads, splits, DUAL, SPLIT, HB)
    m = gl.full([HB], LOWEST, gl.float32, HL)
    best = gl.full([HB], LOWEST, gl.float32, HL)
    l = no_sums(BY_WARP, LEAN, HB)
    acc = gl.zeros([256, HB], gl.float32, SL)
    j = 0  # pair of the item
    it = 0  # items so far
    g = 0  # pairs so far
    order_q(q_latent, q_bf16, q_rope, half_q_l, 0, 4, False, FP16, HB)
    mbarrier.wait(half_q_r, 0)
    while item < n_items:
        # Always 0, which the compiler cannot prove: buffers indexed with it have descriptors that vary in the loop, so that
        # they are not hoisted out of it, dozens of 64 bits each, and spilled.
        z = g >> 30
        st0 = (2 * g) % STAGES
        last = j + 1 == n
        # ---- tile 0: scores, softmax, publish
        p = scores(tiles, scales, full, 2 * g, z, q_latent, q_rope, 4, STAGES, FP16, HB)
        sinks = m
        if last:
            if not SPLIT:
                _, _, block = place(item, heads, splits, SPLIT, HB)
                sinks = load_sink(sink, block, heads, has_sink, HB)
        x = mask(p, places.index(st0), HB)
        mx = max_of(x, maxima, HB) * scale_log2
        best = gl.maximum(best, mx)
        # ---- the maximum of the tile before, from the right group
        mbarrier.wait(ready_s1, (g & 1) ^ 1)
        m = gl.where(j > 0, m1_buf.load(HL), LOWEST)
        l_heads = m
        if not LEAN:
            l = times(l, gl.where(j > 0, a_buf.index(z + 1).load(HL), 1.0), BY_WARP)
            if SHARE:
                l_heads = l
        m0 = gl.where(mx > threshold(m, m, l_heads, SLACK, SHARE), mx, m)
        a = gl.exp2(m - m0)
        mbarrier.wait(free_s0, (g & 1) ^ 1)
        m0_buf.store(m0)
        a_buf.index(z).store(a)
        s = gl.exp2(x * scale_log2 - m0_buf.load(gl.SliceLayout(0, SL))[None, :])
        s_buf.index(z).store(s.to(HALF))
        fence_async_shared()
        sync_threads()
        mbarrier.expect(ready_s0, 0)
        if not LEAN:
            l = times(l, a, BY_WARP) + sum_of(s, sums, BY_WARP, HB)
        # ---- values of the tile before and of tile 0, at an item's end also of tile 1. One text for all of them: what is executed
        # in a pair should be short, since instructions are waited for, too
        for t in range(2 * g - gl.minimum(j, 1), 2 * g + 1 + last.to(gl.int32)):
            st = t % STAGES
            side = t & 1
            keep = (j > 0) | (t > 2 * g)
            mbarrier.wait(ready_s1, g & 1, pred=t > 2 * g)
            d = start_sums(s_buf.index(side), ones.index(z), LEAN)
            acc = rescale(acc, a_buf.index(side), keep & any_moved(a_buf.index(side).load(HL)), HB)
            raw, first, second = first_step(tiles, pair_scale, st, 0, FP16)
            acc = even_values(tiles, pair_scale, st, s_buf.index(side), acc, keep, empty, raw, first, second, 0, FP16, HB)
            if LEAN:
                l = l * a_buf.index(side).load(KL) + end_sums(d)
            sync_threads()
            mbarrier.expect(free_s1, 0, pred=side == 1)
        j += 1
        if last:
            m = m1_buf.load(HL)
            if not LEAN:
                l = times(l, a_buf.index(z + 1).load(HL), BY_WARP)
            if item + stride < n_items:  # this item's is read by nobody: the other group's scores have led to what was multiplied
                copy_q(
                    q, item + stride, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, q_bf16, q_rope,
                    0, 4, False, SPLIT, HB,
                )
            l_heads = all_warps(l, sums, BY_WARP, HB)
            if LEAN:  # into the layout of the heads
                inv_buf.store(l)
                l_heads = inv_buf.load(HL)
            finish(
                l_heads, m, best, sinks, item, it, lse, max_logits, part_lse, part_max, lse_scale, empty_lse,
                heads, s_q, has_lse, has_max, out_stride_b, out_stride_s, out_stride_h, lse_stride_b, lse_stride_s, lse_stride_h,
                max_stride_b, max_stride_s, max_stride_h, splits, SPLIT, HB, LEAN, l1_buf, best1_buf, inv_buf, rows_buf, ready_l1,
            )
            sync_threads()
            mbarrier.expect(ready_l0, 0)
            if item + stride < n_items:
                order_q(q_latent, q_bf16, q_rope, half_q_l, 0, 4, False, FP16, HB)
            leave(acc, inv_buf, rows_buf, part_out if SPLIT else out, 0, 256, False, SPLIT, HB)
            m = gl.full([HB], LOWEST, gl.float32, HL)
            best = gl.full([HB], LOWEST, gl.float32, HL)
            l = no_sums(BY_WARP, LEAN, HB)
            j = 0
            it += 1
            item += stride
            if item < n_items:
                mbarrier.wait(half_q_r, it & 1)
            _, _, _, _, n = span(next_length, next_extra, item, topk, extra_topk, heads, splits, DUAL, SPLIT, HB)
            next_length, next_extra = load_lengths(
                lengths, extra_lengths, item + stride, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits,
                DUAL, SPLIT, HB,
            )
        g += 1


@gluon.jit
def finish(
    l, m, best, sinks, item, it, lse, max_logits, part_lse, part_max, lse_scale, empty_lse, heads, s_q, has_lse, has_max,
    out_stride_b, out_stride_s, out_stride_h, lse_stride_b, lse_stride_s, lse_stride_h, max_stride_b, max_stride_s, max_stride_h,
    splits, SPLIT: gl.constexpr, HB: gl.constexpr, LEAN: gl.constexpr, l1_buf, best1_buf, inv_buf, rows_buf, ready_l1,
):
    """Writes lse and max_logits. Leaves for both groups the factors of the heads, and where their columns go: rows of the output
    or of parts, in units of 16 numbers, or -1."""
    HL: gl.constexpr = head_layout(HB)
    mbarrier.wait(ready_l1, it & 1)
    l_all = l
    if not LEAN:
        l_all = l + l1_buf.load(HL)
    best = gl.maximum(best, best1_buf.load(HL))
    inv = inverse(l_all, m, sinks, SPLIT)
    token, split, block = place(item, heads, splits, SPLIT, HB)
    head = block * HB + gl.arange(0, HB, HL)
    exists = head < heads
    empty = l_all == 0.0
    lse2 = gl.where(empty, float("-inf"), m + rough_log2(l_all))
    # a NaN key leaves no trace in a maximum, but it does in the sum
    top = gl.where(l_all == l_all, gl.where(best == LOWEST, float("-inf"), best), float("nan"))
    if SPLIT:
        part = (token.to(gl.int64) * splits + split) * heads + head
        gl.store(part_lse + part, lse2, mask=exists)
        gl.store(part_max + part, top, mask=exists & (has_max != 0))
        row = (part * (D_V // 16)).to(gl.int32)
        exists = exists & (inv != 0.0)  # without a valid key nothing is written
    else:
        b = (token // s_q).to(gl.int64)
        s_pos = (token % s_q).to(gl.int64)
        wide = head.to(gl.int64)
        lse_out = gl.where(empty, empty_lse, lse2 * (LN2 * lse_scale))
        lse_at = lse + (b * lse_stride_b + s_pos * lse_stride_s)
        gl.store(lse_at + wide * lse_stride_h, lse_out, mask=exists & (has_lse != 0))
        max_at = max_logits + (b * max_stride_b + s_pos * max_stride_s)
        gl.store(max_at + wide * max_stride_h, top * LN2, mask=exists & (has_max != 0))
        row = ((b * out_stride_b + s_pos * out_stride_s + wide * out_stride_h) >> 4).to(gl.int32)
    inv_buf.store(inv)
    rows_buf.store(gl.where(exists, row, -1))


@gluon.jit
def right_group(
    q, lengths, extra_lengths, out, part_out, scale_log2,
    heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len, q_stride_b, q_stride_s, q_stride_h,
    splits, n_items, first_item, stride,
    DUAL: gl.constexpr, SPLIT: gl.constexpr, HB: gl.constexpr, FP16: gl.constexpr, SLACK: gl.constexpr, STAGES: gl.constexpr,
    LEAN: gl.constexpr, q_latent, q_bf16, q_rope, tiles, halves, places, scales, pair_scale, s_buf,
    m0_buf, m1_buf, a_buf, l1_buf, best1_buf, inv_buf, rows_buf, maxima, sums, ones,
    half_q_l, half_q_r, full, empty, ready_s0, ready_s1, free_s0, free_s1, ready_l0, ready_l1,
):
    HALF: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    SHARE: gl.constexpr = not FP16  # P meets values in bf16
    SL: gl.constexpr = scores_layout(HB)
    HL: gl.constexpr = head_layout(HB)
    BY_WARP: gl.constexpr = HB == 64 and not SHARE and not LEAN  # nobody looks at l before the item's end
    item = first_item
    copy_q(
        q, gl.minimum(item, n_items - 1), heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, q_bf16, q_rope,
        4, CHUNKS, True, SPLIT, HB,
    )
    length, extra = load_lengths(
        lengths, extra_lengths, item, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits, DUAL, SPLIT, HB
    )
    next_length, next_extra = load_lengths(
        lengths, extra_lengths, item + stride, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits,
        DUAL, SPLIT, HB,
    )
    _, _, _, _, n = span(length, extra, item, topk, extra_topk, heads, splits, DUAL, SPLIT, HB)
    m = gl.full([HB], LOWEST, gl.float32, HL)
    best = gl.full([HB], LOWEST, gl.float32, HL)
    l = no_sums(BY_WARP, LEAN, HB)
    oa = gl.zeros([128, HB], gl.float32, SL)  # dims 256..383, 384..447, and the rope dims
    ob = gl.zeros([64, HB], gl.float32, SL)
    ox = gl.zeros([64, HB], gl.float32, SL)
    j = 0
    it = 0
    g = 0
    order_q(q_latent, q_bf16, q_rope, half_q_r, 4, CHUNKS, True, FP16, HB)
    mbarrier.wait(half_q_l, 0)
    while item < n_items:
        z = g >> 30
        st1 = (2 * g + 1) % STAGES
        last = j + 1 == n
        # ---- scores of tile 1
        p = scores(tiles, scales, full, 2 * g + 1, z, q_latent, q_rope, 0, STAGES, FP16, HB)
        x = mask(p, places.index(st1), HB)
        mx = max_of(x, maxima, HB) * scale_log2
        best = gl.maximum(best, mx)
        l_heads = m
        if SHARE:
            l_heads = l
        # ---- tile 0's maximum, from the left group; softmax of tile 1, publish
        mbarrier.wait(ready_s0, g & 1)
        m0 = m0_buf.load(HL)
        m1 = gl.where(mx > threshold(m0, m, l_heads, SLACK, SHARE), mx, m0)
        a = gl.exp2(m0 - m1)
        mbarrier.wait(free_s1, (g & 1) ^ 1)
        m1_buf.store(m1)
        a_buf.index(z + 1).store(a)
        s = gl.exp2(x * scale_log2 - m1_buf.load(gl.SliceLayout(0, SL))[None, :])
        s_buf.index(z + 1).store(s.to(HALF))
        fence_async_shared()
        sync_threads()
        mbarrier.expect(ready_s1, 0)
        if not LEAN:
            a0 = a_buf.index(z).load(HL)
            l = times(l, a0 * a, BY_WARP) + sum_of(s, sums, BY_WARP, HB)
        if last:
            if not LEAN:
                l1_buf.store(all_warps(l, sums, BY_WARP, HB))
            best1_buf.store(best)
            sync_threads()
            mbarrier.expect(ready_l1, 0)
        # ---- values of both tiles
        for t in range(2 * g, 2 * g + 2):
            st = t % STAGES
            side = t & 1
            keep = (j > 0) | (side == 1)
            moved = keep & any_moved(a_buf.index(side).load(HL))
            if moved:
                factors = a_buf.index(side).load(gl.SliceLayout(0, SL))[None, :]
                oa = oa * factors
                ob = ob * factors
                ox = ox * factors
            steps = uneven_steps(tiles, halves, pair_scale, st, FP16)
            oa, ob, ox = uneven_values(tiles, halves, pair_scale, st, s_buf.index(side), oa, ob, ox, keep, empty, steps, FP16, HB)
            oa, ob, ox = warpgroup_mma_wait(0, deps=[oa, ob, ox])
            sync_threads()
            mbarrier.expect(free_s0, 0, pred=side == 0)
        m = m1
        j += 1
        if last:
            if item + stride < n_items:  # this item's is read by nobody: the other group's scores have led to what was multiplied
                copy_q(
                    q, item + stride, heads, s_q, q_stride_b, q_stride_s, q_stride_h, splits, q_bf16, q_rope,
                    4, CHUNKS, True, SPLIT, HB,
                )
                order_q(q_latent, q_bf16, q_rope, half_q_r, 4, CHUNKS, True, FP16, HB)
            mbarrier.wait(ready_l0, it & 1)
            to = part_out if SPLIT else out
            leave(oa, inv_buf, rows_buf, to, 256, 128, False, SPLIT, HB)
            leave(ob, inv_buf, rows_buf, to, 384, 64, False, SPLIT, HB)
            leave(ox, inv_buf, rows_buf, to, 448, 64, True, SPLIT, HB)
            m = gl.full([HB], LOWEST, gl.float32, HL)
            best = gl.full([HB], LOWEST, gl.float32, HL)
            l = no_sums(BY_WARP, LEAN, HB)
            j = 0
            it += 1
            item += stride
            if item < n_items:
                mbarrier.wait(half_q_l, it & 1)
            _, _, _, _, n = span(next_length, next_extra, item, topk, extra_topk, heads, splits, DUAL, SPLIT, HB)
            next_length, next_extra = load_lengths(
                lengths, extra_lengths, item + stride, n_items, topk, extra_topk, len_per, has_len, has_extra_len, heads, splits,
                DUAL, SPLIT, HB,
            )
        g += 1


# ------------------------------------------------------------------------------------------------ kernel


@gluon.jit
def new_barrier(COUNT: gl.constexpr):
    """One allocation per barrier, and per buffer below: Triton looks at whole allocations when it decides where warps must
    wait for each other, and an array of barriers would have them wait almost everywhere."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit
def new_rings(N: gl.constexpr, FULL: gl.constexpr):
    """full and empty, for both halves of N tiles. In turns: Triton has the warps wait between two barriers of an allocation."""
    full_l = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    full_r = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    empty_l = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    empty_r = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(full_l.index(i), count=FULL)
        mbarrier.init(full_r.index(i), count=FULL)
        mbarrier.init(empty_l.index(i), count=1)
        mbarrier.init(empty_r.index(i), count=1)
    return (full_l, full_r), (empty_l, empty_r)


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
    HB: gl.constexpr,  # heads per item: 16, 32 or 64
    FP16: gl.constexpr,  # latent dims of Q, K and P in fp16 (scales within 6e-5..146), else bf16
    PERSISTENT: gl.constexpr,  # the grid is smaller than the items
    STAGES: gl.constexpr,  # tiles in shared memory
    NW: gl.constexpr,  # producer warps
    R_RIGHT: gl.constexpr,  # registers per thread of the right group and of the producer; the left group has what is left
    R_PRODUCER: gl.constexpr,
    SLACK: gl.constexpr,  # growth in log2 that a column's maximum must have to be taken up
    LEAN: gl.constexpr,  # for 64 heads and FP16: sums of P by MMA, all of them in the left group
):
    if SPLIT:
        release_dependents()
    HALF: gl.constexpr = gl.float16 if FP16 else gl.bfloat16
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # 128-byte swizzle, 16-bit elements
    PROBS: gl.constexpr = gl.NVMMASharedLayout(2 * HB, 16, 2)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])  # words: 16-byte units by row
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLANE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_latent = gl.allocate_shared_memory(HALF, [CHUNKS, HB, 64], TILE)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, HB, 64], TILE)
    q_bf16 = reinterpret(q_latent, gl.bfloat16, [CHUNKS, HB, 64], TILE)
    left = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 64], ROWS)
    rope = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 32], ROWS)
    rope_16 = reinterpret(rope, gl.bfloat16, [STAGES, 64, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    right = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 32], ROWS)
    rest = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    to_fill = (left, right, rest, rope)
    tiles = (left, right, rest, rope_16)
    halves = reinterpret(rest, gl.int16, [STAGES, 64, 32], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
    s_buf = gl.allocate_shared_memory(HALF, [2, 64, HB], PROBS)
    m0_buf = gl.allocate_shared_memory(gl.float32, [HB], VECTOR)
    m1_buf = gl.allocate_shared_memory(gl.float32, [HB], VECTOR)
    l1_buf = gl.allocate_shared_memory(gl.float32, [HB], VECTOR)
    best1_buf = gl.allocate_shared_memory(gl.float32, [HB], VECTOR)
    inv_buf = gl.allocate_shared_memory(gl.float32, [HB], VECTOR)
    rows_buf = gl.allocate_shared_memory(gl.int32, [HB], VECTOR)
    a_buf = gl.allocate_shared_memory(gl.float32, [2, HB], VECTOR)
    maxima0 = gl.allocate_shared_memory(gl.float32, [4, HB], PLANE)
    maxima1 = gl.allocate_shared_memory(gl.float32, [4, HB], PLANE)
    sums0 = gl.allocate_shared_memory(gl.float32, [4, HB], PLANE)
    sums1 = gl.allocate_shared_memory(gl.float32, [4, HB], PLANE)
    ones = s_buf
    if LEAN:
        ones = gl.allocate_shared_memory(HALF, [1, 8, 64], TILE)
        ones.index(0).store(gl.full([8, 64], 1.0, HALF, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
        fence_async_shared()
    places = gl.allocate_shared_memory(gl.int32, [STAGES, 64], VECTOR)
    raw_indices = gl.allocate_shared_memory(gl.int32, [128], VECTOR)
    offsets = gl.allocate_shared_memory(gl.int32, [128], VECTOR)
    landing = gl.allocate_shared_memory(gl.int32, [128, SCALE_WORDS], PLANE)
    SCALE: gl.constexpr = HALF
    scales_l = gl.allocate_shared_memory(SCALE, [STAGES, HALF_SCALES, 64], PLANE)
    scales_r = gl.allocate_shared_memory(SCALE, [STAGES, HALF_SCALES, 64], PLANE)
    scales = (scales_l, scales_r)
    pair_scale = scales
    if FP16:  # those of two keys in a word
        pair_scale = (
            reinterpret(scales_l, gl.int32, [STAGES, HALF_SCALES, 32], PLANE),
            reinterpret(scales_r, gl.int32, [STAGES, HALF_SCALES, 32], PLANE),
        )
    half_q_l = new_barrier(1)
    half_q_r = new_barrier(1)
    full, empty = new_rings(STAGES, 1 + 32 * NW)  # full: scales, and the copies of each thread
    ready_s0 = new_barrier(1)
    ready_s1 = new_barrier(1)
    free_s0 = new_barrier(1)
    free_s1 = new_barrier(1)
    ready_l0 = new_barrier(1)
    ready_l1 = new_barrier(1)

    n_items = tokens * ((n_heads + HB - 1) // HB)
    if SPLIT:
        n_items = n_items * splits
    first_item = gl.program_id(0)
    stride = gl.num_programs(0) if PERSISTENT else n_items
    gl.warp_specialize(
        [
            (left_group, (
                q, lengths, extra_lengths, sink, out, lse, max_logits, part_out, part_lse, part_max, scale_log2, lse_scale, empty_lse,
                n_heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len, has_sink, has_lse, has_max,
                out_stride_b, out_stride_s, out_stride_h, lse_stride_b, lse_stride_s, lse_stride_h,
                max_stride_b, max_stride_s, max_stride_h,
                q_stride_b, q_stride_s, q_stride_h, splits, n_items, first_item, stride, DUAL, SPLIT, HB, FP16, SLACK, STAGES, LEAN,
                q_latent, q_bf16, q_rope, tiles, places, scales, pair_scale, s_buf,
                m0_buf, m1_buf, a_buf, l1_buf, best1_buf, inv_buf, rows_buf, maxima0, sums0, ones,
                half_q_l, half_q_r, full, empty, ready_s0, ready_s1, free_s0, free_s1, ready_l0, ready_l1,
            )),
            (right_group, (
                q, lengths, extra_lengths, out, part_out, scale_log2,
                n_heads, s_q, topk, extra_topk, len_per, has_len, has_extra_len,
                q_stride_b, q_stride_s, q_stride_h, splits, n_items, first_item, stride, DUAL, SPLIT, HB, FP16, SLACK, STAGES, LEAN,
                q_latent, q_bf16, q_rope, tiles, halves, places, scales, pair_scale, s_buf,
                m0_buf, m1_buf, a_buf, l1_buf, best1_buf, inv_buf, rows_buf, maxima1, sums1, ones,
                half_q_l, half_q_r, full, empty, ready_s0, ready_s1, free_s0, free_s1, ready_l0, ready_l1,
            )),
            (producer, (
                q, kv, indices, lengths, extra_kv, extra_indices, extra_lengths,
                n_heads, s_q, topk, extra_topk, slots, extra_slots, page, extra_page, len_per, has_len, has_extra_len,
                page_stride, extra_page_stride, q_stride_b, q_stride_s, q_stride_h,
                idx_stride_b, idx_stride_s, extra_idx_stride_b, extra_idx_stride_s, splits, n_items, first_item, stride,
                DUAL, SPLIT, PAGE, EXTRA_PAGE, HB, FP16, STAGES, NW,
                to_fill, places, scales, raw_indices, offsets, landing, full, empty,
            )),
        ],
        [4, NW],
        [R_RIGHT, R_PRODUCER],
    )
