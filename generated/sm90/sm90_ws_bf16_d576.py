"""Sparse-MLA attention over the bf16_d576 KV cache: family "sm90_ws", warp-specialised Gluon, emitted for sm90.

out[t, h] = sum_j exp(x_j) v_j / (sum_j exp(x_j) + exp(sink[h])),  x_j = sm_scale * <q[t, h], k_j>,  v_j = k_j[:512]
over the slots j that `indices` selects for token t. sm_scale must be positive.

One program serves items (token, split, block of 64 heads), head block fastest: with stride num_programs, or, if DYNAMIC, the
next one that no program has taken. An item's keys are taken in pairs of tiles of 64; tiles beyond the length are not visited,
but an item without a key has one pair, fully masked. Nor is a tile 1 that begins at or beyond the length: its rows are not
copied and it has no values (what scores it would have, of the rows that happen to lie there, is masked). Twelve warps in three
partitions:

  producer     gathers rows with cp.async into four halves of 32 KB: tile 0 and tile 1, each cut into the left half (dims
               0..255) and the right half (256..511, with the 64 rope dims). Shared memory is full: a half is refilled when its
               last reader has left it. It also reads the indices and the lengths, so that it alone knows which keys are
               valid and when an item ends: with a pair come one bit per key, and the item that follows the pair. A row
               that is not valid is never read. Its place takes a copy of a valid row of the item (its P is 0, so that the
               copy counts nothing; where that row holds NaN the output does too), or zeros as long as the item has shown
               none.
  left group   S0 = softmax(Q K0^T), holds O[:, :256]:  O += S0 V0 (S0 from registers), O += S1 V1 (S1 from shared memory)
  right group  S1 = softmax(Q K1^T), holds O[:, 256:]:  O += S0 V0 (S0 from shared memory), O += S1 V1 (S1 from registers)

Both groups take tile 0 before tile 1, so that a pair needs two hand-overs: the left group publishes S0 and its maximum, the
right group derives its own maximum from that one and publishes S1, before its own product with S0: the warps stand still while
the tensor cores take one product after the other. What else must be ordered follows from the halves:

  barrier          signalled by                     when                                     read by
  free_ql          left; right                      the item's last scores are done; those   producer
                                                    over the left half of Q
  free_qr          right                            the item's last scores are done          producer
  full_0l .. _1r   producer                         a half has arrived, and with 0l the Q of left 0l 0r, right 1l 1r
                                                    a new item (copies arrive in order), with
                                                    0r and 1l the bits of the pair and what follows
  free_0l          left                             S0 V0 is done                            producer
  free_0r          right                            S0 V0 is done: also frees S0             producer
  free_1l          left                             S1 V1 is done (last pair: and the rows   producer
                                                    of O have left it): also frees S1
  free_1r          right                            S1 V1 is done (last pair: likewise)      producer
  ready_s0, _s1    left, right                      S and the maximum are in shared memory   right, left
  ready_l0, _l1    left, right                      sum and true maximum of its tiles are    right, left

S0 may be overwritten once the scores of the next tile 0 exist, which needs the right half of that tile, which needs free_0r;
S1 likewise through free_1l. Maxima, sums, bits and what follows are overwritten later than that.
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

FAMILY = "sm90_ws"
LAYOUT = 'bf16_d576'
ARCH = 'sm90'
TEMPLATE_HASH = 'd1a520c238f102a2'
TRITON_RANGE = ('3.6', '4.0')

copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# A partition arrives by sync_threads() and mbarrier.expect(barrier, 0), which is what mbarrier.arrive does: its threads meet, and one
# arrives. But Triton takes an mbarrier.arrive for a read and a write of all shared memory, and so has the threads meet once more
# before whatever touches shared memory next.
sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Newer Tritons run out of registers where masks are skipped.
SKIP_MASKS = gl.constexpr(not hasattr(async_copy, "async_load"))

D_V = gl.constexpr(512)
ROPE = gl.constexpr(64)  # dims of a row that only scores use
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)  # finite, so that a leading tile without a valid key leaves no inf - inf

# Row i of a group's 64 x 64 scores and 64 x 256 output lies in the same thread: both are accumulators of wgmma.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
PROBS = gl.constexpr(gl.DotOperandLayout(0, ACC, 2))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
OUT_ROW = gl.constexpr(gl.SliceLayout(1, ACC))
OUT_COL = gl.constexpr(gl.SliceLayout(0, ACC))
# The columns of SCORES as [word, bit], both words of validity bits in every thread.
BITS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 8], [0, 16], [1, 0]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [2, 32]
))
# cp.async of 16 bytes per lane, 128 bytes of a row side by side; the same for rows of O, 512 bytes side by side.
GATHER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LEAVE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
KEYS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))  # the 128 keys of a pair, a warp per word of bits
LINES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_FETCH = gl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 1152; mov.u32 $0, 0; }"
)
# What follows a pair: its own item goes on, or another one, or, as -2 - item, another one where the pair has no tile 1.
SAME_ITEM = gl.constexpr(-1)

# acc *= factor, unless every factor of the warp is exactly 1. Gluon has no branch per warp: 128 accumulators tied to the
# outputs, and their row factors, of which a thread has two (operands 0 and 2 of every four).
_RESCALE = gl.constexpr(
    "{ .reg .pred p, q; setp.neu.f32 p, $256, 0f3F800000; setp.neu.f32 q, $258, 0f3F800000; or.pred p, p, q; "
    "vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni SKIP; "
    + " ".join(f"mul.f32 ${i}, ${i}, ${256 + i};" for i in range(128))
    + " SKIP: }"
)
_RESCALE_OPERANDS = gl.constexpr(",".join(["=f"] * 128 + [str(i) for i in range(128)] + ["f"] * 128))


@gluon.jit
def rescale(acc, factor):
    """acc * factor[:, None]; skipped by warps whose factors are all 1."""
    f = gl.convert_layout(factor, OUT_ROW)[:, None]
    return gl.inline_asm_elementwise(
        _RESCALE, _RESCALE_OPERANDS, [acc, gl.broadcast(f, acc)[0]], dtype=gl.float32, is_pure=True, pack=128
    )


@gluon.jit
def touch_l2(address):
    """Bring the line at an int64 address into the L2."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fetch_row(address, use):
    """Bring the row of K at an int64 address into the L2, where `use` is not 0."""
    gl.inline_asm_elementwise(_FETCH, "=r,l,r", [address, use], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_dependents():
    """The merge may be launched now; it waits for the end of this kernel by itself before it reads a part."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# ---------------------------------------------------------------------------------------------- items


@gluon.jit
def place(item, heads, splits, SPLIT: gl.constexpr):
    """Token, split and head block of an item. There are at most 128 heads, so one or two blocks."""
    two = (heads > 64).to(gl.int32)
    token = item >> two
    split = 0
    if SPLIT:
        split = token % splits
        token = token // splits
    return token, split, item & two


@gluon.jit
def load_length(lengths, item, n_items, topk, len_per, has_len, heads, splits, SPLIT: gl.constexpr):
    """The length of an item as it is stored; topk when there are no lengths or no such item."""
    token, _, _ = place(item, heads, splits, SPLIT)
    return gl.load(lengths + token // len_per, mask=(has_len != 0) & (item < n_items), other=topk)


@gluon.jit
def pairs_of(length, item, heads, splits, SPLIT: gl.constexpr):
    """First pair and number of pairs of an item, whose token has `length` keys. At least one pair: beyond the length its
    keys are masked, so that an empty item needs no code of its own."""
    pairs = (length + 127) >> 7
    first = 0
    if SPLIT:
        _, split, _ = place(item, heads, splits, SPLIT)
        per_split = (pairs + splits - 1) // splits
        first = split * per_split
        pairs = gl.minimum(per_split, pairs - first)
    return first, gl.maximum(pairs, 1)


# ---------------------------------------------------------------------------------------------- producer


@gluon.jit
def load_rows(ids, pos, length):
    """Indices of 64 keys from `pos`, each in the eight lanes that copy its row; -1 beyond the length."""
    key = gl.arange(0, 64, gl.SliceLayout(1, GATHER))  # added to a pointer: constants go into the load
    return gl.load((ids + pos) + key, mask=key < length - pos, other=-1)


@gluon.jit
def load_keys(ids, pos, length):
    """Indices of a pair, 32 keys to a warp."""
    key = gl.arange(0, 4, gl.SliceLayout(1, KEYS))[:, None] * 32 + gl.arange(0, 32, gl.SliceLayout(0, KEYS))[None, :]
    return gl.load((ids + pos) + key, mask=key < length - pos, other=-1)


@gluon.jit
def load_lead(ids, pos, length):
    """Index of the first key of a pair."""
    return gl.load(ids + pos, mask=pos < length, other=-1)


@gluon.jit
def publish_bits(index, slots, buf):
    """Bit k of word w: key 32 w + k is valid."""
    valid = ((index >= 0) & (index < slots)).to(gl.int32)
    buf.store(gl.sum(valid << gl.arange(0, 32, gl.SliceLayout(0, KEYS))[None, :], 1))


@gluon.jit
def gather(base, row, valid, D0: gl.constexpr, WIDTH: gl.constexpr, buf, MASKED: gl.constexpr):
    """Copy WIDTH dims of 64 rows, from dim D0. MASKED: zeros for rows that are not valid."""
    col = D0 + gl.arange(0, WIDTH, gl.SliceLayout(0, GATHER))
    address = base + (row[:, None] + col[None, :])
    if MASKED:
        copy_async(buf, address, mask=valid[:, None])
    else:
        copy_async(buf, address)


@gluon.jit
def copy_pair(
    kv, row0, valid0, row1, valid1, keys, slots, follow, short, phase,
    k0_l, k0_r, k0_x, k1_l, k1_r, k1_x, bits, follow_buf,
    full_0l, full_0r, full_1l, full_1r, free_0l, free_0r, free_1l, free_1r, MASKED: gl.constexpr,
):
    """Both tiles of a pair, in the order in which the halves become free. `short`: only tile 0 is there, and nobody reads the other
    halves; what they wait for comes all the same, so that each barrier has one phase per pair."""
    mbarrier.wait(free_0l, phase)
    gather(kv, row0, valid0, 0, 256, k0_l.index(0), MASKED)
    async_copy.mbarrier_arrive(full_0l, increment_count=False)
    mbarrier.wait(free_0r, phase)
    gather(kv, row0, valid0, 256, 256, k0_r.index(0), MASKED)
    if ROPE > 0:
        gather(kv, row0, valid0, 512, 64, k0_x.index(0), MASKED)
    async_copy.mbarrier_arrive(full_0r, increment_count=False)
    publish_bits(keys, slots, bits)
    follow_buf.store(gl.full([1], follow, gl.int32, FLAT))
    sync_threads()
    mbarrier.expect(full_0r, 0)  # for these two: ordinary stores, which the arrival above does not cover
    mbarrier.expect(full_1l, 0)
    mbarrier.wait(free_1l, phase)
    if not short:
        gather(kv, row1, valid1, 0, 256, k1_l.index(0), MASKED)
    async_copy.mbarrier_arrive(full_1l, increment_count=False)
    mbarrier.wait(free_1r, phase)
    if not short:
        gather(kv, row1, valid1, 256, 256, k1_r.index(0), MASKED)
        if ROPE > 0:
            gather(kv, row1, valid1, 512, 64, k1_x.index(0), MASKED)
    async_copy.mbarrier_arrive(full_1r, increment_count=False)


@gluon.jit
def prefetch_item(
    q, indices, item, topk, heads, s_q, splits,
    q_stride_b, q_stride_s, q_stride_h, idx_stride_b, idx_stride_s, SPLIT: gl.constexpr,
):
    """Q rows and indices of an item into the L2: all programs change items at about the same time, and their Q would
    otherwise come from device memory all at once, ahead of the rows of K."""
    token, _, block = place(item, heads, splits, SPLIT)
    b = (token // s_q).to(gl.int64)
    s_pos = (token % s_q).to(gl.int64)
    head = gl.minimum(block * 64 + gl.arange(0, 64, gl.SliceLayout(1, LINES)), heads - 1).to(gl.int64)
    row = q + (b * q_stride_b + s_pos * q_stride_s)
    line = gl.arange(0, 8, gl.SliceLayout(0, LINES)) * 64  # 128 bytes apart
    touch_l2((row + (head[:, None] * q_stride_h + line[None, :])).to(gl.int64))
    if ROPE > 0:
        touch_l2((row + (head * q_stride_h + D_V)).to(gl.int64))
    ids = indices + (b * idx_stride_b + s_pos * idx_stride_s)
    touch_l2((ids + gl.minimum(gl.arange(0, 128, FLAT) * 32, topk - 1)).to(gl.int64))


@gluon.jit
def fetch_rows(kv, keys, slots, kv_stride, item, heads):
    """Rows of the next pair into the L2, where they come from device memory. A bulk instruction takes one address, so that a
    warp goes through its rows one by one. The two programs of a token want the same rows: each fetches every other one."""
    mine = (heads <= 64) | ((gl.arange(0, 32, gl.SliceLayout(0, KEYS))[None, :] & 1) == (item & 1))
    use = (keys >= 0) & (keys < slots) & mine
    fetch_row((kv + keys.to(gl.int64) * kv_stride).to(gl.int64), use.to(gl.int32))


@gluon.jit
def look_ahead(
    item, j, n, after, ahead, lengths, counter, n_items, stride, topk, len_per, has_len, heads, splits,
    SPLIT: gl.constexpr, DYNAMIC: gl.constexpr,
):
    """The item after this one, and its length as it is stored, once pair j of n is the next to copy. Both are known before
    the last pair is: taken from the counter as late as that allows, so that no program keeps items that others could serve,
    but not at once with the length, since the compiler waits for each. Every program has the item of its number first."""
    if DYNAMIC:
        if (j == gl.maximum(n - 2, 0)) & (item < n_items):
            after = stride + gl.atomic_add(counter, 1, sem="relaxed")
        if j == n - 1:
            ahead = load_length(lengths, after, n_items, topk, len_per, has_len, heads, splits, SPLIT)
    else:
        if j == 0:
            after = item + stride
            ahead = load_length(lengths, after, n_items, topk, len_per, has_len, heads, splits, SPLIT)
    return after, ahead


@gluon.jit
def producer(
    q, kv, indices, lengths, heads, s_q, topk, slots, len_per, has_len, kv_stride,
    q_stride_b, q_stride_s, q_stride_h, idx_stride_b, idx_stride_s, counter, splits, n_items, first_item, stride,
    SPLIT: gl.constexpr, PREFETCH_L2: gl.constexpr, PREFETCH_ROWS: gl.constexpr, DYNAMIC: gl.constexpr,
    q_l, q_r, q_x, k0_l, k0_r, k0_x, k1_l, k1_r, k1_x, bits, follow_buf,
    free_ql, free_qr, full_0l, full_0r, full_1l, full_1r, free_0l, free_0r, free_1l, free_1r,
):
    item = first_item
    length = load_length(lengths, item, n_items, topk, len_per, has_len, heads, splits, SPLIT)
    length = gl.minimum(gl.maximum(length, 0), topk)
    first, n = pairs_of(length, item, heads, splits, SPLIT)
    after, ahead = look_ahead(item, 0, n, item, length, lengths, counter, n_items, stride, topk, len_per, has_len, heads,
                              splits, SPLIT, DYNAMIC)
    token, _, block = place(item, heads, splits, SPLIT)
    b = (token // s_q).to(gl.int64)
    s_pos = (token % s_q).to(gl.int64)
    ids = indices + (b * idx_stride_b + s_pos * idx_stride_s)
    q_row = q + (b * q_stride_b + s_pos * q_stride_s)
    pos = first * 128
    row0 = load_rows(ids, pos, length)
    row1 = load_rows(ids, pos + 64, length)
    keys = load_keys(ids, pos, length)
    lead = load_lead(ids, pos, length)
    spare = -1  # a valid row of the item
    j = 0  # pair of the item
    it = 0  # items so far
    g = 0  # pairs so far
    while item < n_items:
        phase = (g & 1) ^ 1
        if j == 0:
            mbarrier.wait(free_ql, (it & 1) ^ 1)
            head = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, GATHER))
            q_offset = head.to(gl.int64) * q_stride_h
            gather(q_row, q_offset, head < heads, 0, 256, q_l.index(0), True)
            mbarrier.wait(free_qr, (it & 1) ^ 1)
            gather(q_row, q_offset, head < heads, 256, 256, q_r.index(0), True)
            if ROPE > 0:
                gather(q_row, q_offset, head < heads, 512, 64, q_x.index(0), True)
            it += 1
            spare = -1
        valid0 = (row0 >= 0) & (row0 < slots)
        valid1 = (row1 >= 0) & (row1 < slots)
        spare = gl.where((lead >= 0) & (lead < slots), lead, spare)
        offset0 = gl.where(valid0, row0, spare).to(gl.int64) * kv_stride
        offset1 = gl.where(valid1, row1, spare).to(gl.int64) * kv_stride
        used = keys
        short = length - pos <= 64
        if PREFETCH_L2:
            if (j == (gl.maximum(n - 2, 0) if DYNAMIC else n >> 1)) & (after < n_items):
                prefetch_item(q, indices, after, topk, heads, s_q, splits,
                              q_stride_b, q_stride_s, q_stride_h, idx_stride_b, idx_stride_s, SPLIT)
        # the indices of the next pair are on their way while the rows of this one are copied, across items as well
        j += 1
        follow = SAME_ITEM
        if j == n:
            j = 0
            item = after
            follow = gl.where(short, -2 - item, item)
            length = gl.minimum(gl.maximum(ahead, 0), topk)
            length = gl.where(item < n_items, length, 0)
            first, n = pairs_of(length, item, heads, splits, SPLIT)
            token, _, block = place(item, heads, splits, SPLIT)
            b = (token // s_q).to(gl.int64)
            s_pos = (token % s_q).to(gl.int64)
            ids = indices + (b * idx_stride_b + s_pos * idx_stride_s)
            q_row = q + (b * q_stride_b + s_pos * q_stride_s)
        pos = (first + j) * 128
        row0 = load_rows(ids, pos, length)
        row1 = load_rows(ids, pos + 64, length)
        keys = load_keys(ids, pos, length)
        if spare >= 0:  # the usual case
            copy_pair(
                kv, offset0, valid0, offset1, valid1, used, slots, follow, short, phase,
                k0_l, k0_r, k0_x, k1_l, k1_r, k1_x, bits, follow_buf,
                full_0l, full_0r, full_1l, full_1r, free_0l, free_0r, free_1l, free_1r, False,
            )
        else:
            copy_pair(
                kv, offset0, valid0, offset1, valid1, used, slots, follow, short, phase,
                k0_l, k0_r, k0_x, k1_l, k1_r, k1_x, bits, follow_buf,
                full_0l, full_0r, full_1l, full_1r, free_0l, free_0r, free_1l, free_1r, True,
            )
        if PREFETCH_ROWS:
            fetch_rows(kv, keys, slots, kv_stride, item, heads)
        # scalars here, since the compiler waits for them at once
        lead = load_lead(ids, pos, length)
        after, ahead = look_ahead(item, j, n, after, ahead, lengths, counter, n_items, stride, topk, len_per, has_len, heads,
                                  splits, SPLIT, DYNAMIC)
        g += 1


# ---------------------------------------------------------------------------------------------- groups


@gluon.jit
def scores(q_half, k_half, p, use_acc, full, phase, pred, FENCE: gl.constexpr):
    """p (+)= Q K^T over half of the dims, once the half has arrived; in flight afterwards."""
    mbarrier.wait(full, phase, pred=pred)
    if FENCE:
        fence_async_shared()
    return warpgroup_mma(q_half, k_half.permute((1, 0)), p, use_acc=use_acc, is_async=True)


@gluon.jit
def scores_of_0(
    q_l, q_r, q_x, k0_l, k0_r, k0_x, bits0, follow_buf, full_0l, full_0r, phase, z, pred, FENCE: gl.constexpr
):
    """The scores of tile 0, in flight, its validity bits, and what follows the pair."""
    p = gl.zeros([64, 64], gl.float32, SCORES)
    p = scores(q_l.index(z), k0_l.index(z), p, False, full_0l, phase, pred, FENCE)
    p = scores(q_r.index(z), k0_r.index(z), p, True, full_0r, phase, pred, FENCE)
    if ROPE > 0:
        p = warpgroup_mma(q_x.index(z), k0_x.index(z).permute((1, 0)), p, is_async=True)
    return p, bits0.load(gl.SliceLayout(1, BITS)), load_follow(follow_buf)


@gluon.jit
def load_follow(follow_buf):
    """What follows the pair."""
    return gl.sum(follow_buf.load(FLAT), 0)


@gluon.jit
def next_item(follow):
    """The item that comes after the last pair of one."""
    return gl.where(follow < SAME_ITEM, -2 - follow, follow)


@gluon.jit
def mask(p, bits):
    """-inf where the key is not valid, if any is not. `bits`: the tile's two words, in every thread; splitting the shift leaves
    one that depends on the lane and masks that are constants."""
    x = p
    needed = True
    if SKIP_MASKS:
        needed = gl.sum((bits == -1).to(gl.int32), 0) != 2
    if needed:
        col = gl.arange(0, 32, gl.SliceLayout(0, BITS))[None, :]
        bit = (bits[:, None] >> (col & 6)) & (1 << (col & 25))
        valid = gl.convert_layout((bit != 0).reshape([64]), gl.SliceLayout(0, SCORES), assert_trivial=True)
        x = gl.where(valid[None, :], p, float("-inf"))
    return x


@gluon.jit
def rough_log2(x):
    """One instruction, where gl.log2 takes twenty."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def limit(m, before, l, SLACK: gl.constexpr, SHARE: gl.constexpr):
    """What a tile's maximum must exceed to replace m (log2). Moving m rescales O, and a P of 2^SLACK is as good in bf16 as 1,
    so that growth alone is no reason. But the P of the maximum itself is exactly 1, and a key that dominates its row should
    have that one, or the rounding of its P would be most of the error. So a key moves m if its P would be more than 2^-SHARE
    of l, the group's sum so far, which is relative to `before`."""
    return gl.maximum(m, gl.minimum(m + SLACK, before + rough_log2(l) - SHARE))


@gluon.jit
def load_sink(sink, block, heads, has_sink):
    """Sinks of a head block; -inf when there are none."""
    head = block * 64 + gl.arange(0, 64, ROW)
    return gl.load(sink + head, mask=(head < heads) & (has_sink != 0), other=float("-inf"))


@gluon.jit
def inverse(l, m, sinks, SPLIT: gl.constexpr):
    """What normalises a row; a sink far above every key makes it zero, as it should be."""
    total = l
    if not SPLIT:
        total = l + gl.exp2(sinks * LOG2E - m)
    return gl.where(l == 0.0, 0.0, 1.0 / total)


@gluon.jit
def stage(acc, inv, half, free):
    """Rows of O through a half of K, which nobody else reads any more: from the layout of the MMA a store of 16 bytes per
    lane needs shared memory. The half is free as soon as the rows are in registers again."""
    half.store((acc * gl.convert_layout(inv, OUT_ROW)[:, None]).to(gl.bfloat16))
    x = half.load(LEAVE)
    sync_threads()
    mbarrier.expect(free, 0)
    return x


@gluon.jit
def leave(x, out, offset, item, out_stride_h, heads, D0: gl.constexpr):
    """Staged rows to the output, which nobody reads soon: .cs, so that they leave the L2 before rows of K do."""
    _, _, block = place(item, heads, 1, False)
    head = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, LEAVE))
    col = D0 + gl.arange(0, 256, gl.SliceLayout(0, LEAVE))
    at = out + offset + ((head.to(gl.int64) * out_stride_h)[:, None] + col[None, :])
    gl.store(at, x, mask=(head < heads)[:, None], cache_modifier=".cs")


@gluon.jit
def leave_part(acc, inv, part_out, part, item, heads, splits, D0: gl.constexpr):
    """fp32 rows of a split, straight from the accumulators: a lane's 8 bytes are a quarter of a sector, its neighbours' the
    rest. Rows without a valid key, whose factor is 0, are not written."""
    _, _, block = place(item, heads, splits, True)
    head = block * 64 + gl.arange(0, 64, OUT_ROW)
    col = D0 + gl.arange(0, 256, OUT_COL)
    factor = gl.convert_layout(inv, OUT_ROW)
    written = (head < heads) & (factor != 0.0)
    gl.store(part_out + (((part + head) * D_V)[:, None] + col[None, :]), acc * factor[:, None], mask=written[:, None])


@gluon.jit
def left_group(
    sink, out, lse, part_out, part_lse, scale_log2, lse_scale, empty_lse,
    heads, s_q, has_sink, has_lse, out_stride_b, out_stride_s, out_stride_h,
    lse_stride_b, lse_stride_s, lse_stride_h, splits, n_items, first_item,
    SPLIT: gl.constexpr, SLACK: gl.constexpr, SHARE: gl.constexpr, FIRST_SUM: gl.constexpr, QK_FIRST: gl.constexpr,
    FENCE: gl.constexpr,
    q_l, q_r, q_x, k0_l, k0_r, k0_x, k1_l, s0_buf, s1_buf, m0_buf, m1_buf, l0_buf, l1_buf, best0_buf,
    bits0, follow_buf, start_buf,
    free_ql, full_0l, full_0r, free_0l, free_1l, ready_s0, ready_s1, ready_l0, ready_l1,
):
    item = first_item
    m = gl.full([64], LOWEST, gl.float32, ROW)
    best = gl.full([64], LOWEST, gl.float32, ROW)
    l = gl.zeros([64], gl.float32, ROW)
    acc = gl.zeros([64, 256], gl.float32, ACC)
    begun = False  # whether O holds something
    it = 0  # items so far
    g = 0  # pairs so far
    # scores of the first tile 0; later ones are issued one pair ahead, at the end of the loop body
    p, bits, follow = scores_of_0(
        q_l, q_r, q_x, k0_l, k0_r, k0_x, bits0, follow_buf, full_0l, full_0r, 0, 0, item < n_items, FENCE
    )
    p = warpgroup_mma_wait(0, deps=[p])
    x = mask(p, bits)
    while item < n_items:
        # Always 0, which the compiler cannot prove: buffers indexed with it have descriptors that vary in the loop, so that
        # they are not hoisted out of it, a hundred of 64 bits each, and spilled.
        z = g >> 30
        phase = g & 1
        last = follow != SAME_ITEM
        sinks = m
        if last:
            sync_threads()
            mbarrier.expect(free_ql, 0)
            if not SPLIT:
                _, _, block = place(item, heads, splits, SPLIT)
                sinks = load_sink(sink, block, heads, has_sink)
        # ---- tile 0: softmax, publish
        mx = gl.max(x, 1) * scale_log2
        best = gl.maximum(best, mx)
        m0 = gl.where(mx > limit(m, m, l, SLACK, SHARE), mx, m)
        a = gl.exp2(m - m0)
        s = gl.exp2(x * scale_log2 - m0[:, None])
        sb = s.to(gl.bfloat16)
        s0_buf.index(z).store(sb)
        m0_buf.store(m0)
        if FIRST_SUM:
            if not begun:  # the right group has no sum yet by which to judge its keys
                start_buf.store(gl.sum(s, 1))
        fence_async_shared()
        sync_threads()
        mbarrier.expect(ready_s0, 0)
        acc = rescale(acc, a)
        acc = warpgroup_mma(gl.convert_layout(sb, PROBS), k0_l.index(z), acc, use_acc=begun, is_async=True)
        l = l * a + gl.sum(s, 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        sync_threads()
        mbarrier.expect(free_0l, 0)
        # ---- tile 1, from the right group
        mbarrier.wait(ready_s1, phase)
        m = m1_buf.load(ROW)
        a = gl.exp2(m0 - m)
        acc = rescale(acc, a)
        l = l * a
        # what the end of an item needs besides O
        inv = m
        offset = gl.full([], 0, gl.int64)
        if last:
            l0_buf.store(l)
            best0_buf.store(best)
            sync_threads()
            mbarrier.expect(ready_l0, 0)
            inv, offset = prepare_left(
                l, m, sinks, item, it, lse, part_lse, lse_scale, empty_lse, heads, s_q, has_lse,
                out_stride_b, out_stride_s, lse_stride_b, lse_stride_s, lse_stride_h, splits, SPLIT, l1_buf, ready_l1,
            )
        if follow >= SAME_ITEM:  # the pair has a tile 1
            acc = warpgroup_mma(s1_buf.index(z), k1_l.index(z), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        # ---- the rows of a finished item, and the scores of the next tile 0 (after the very last pair: not used)
        following = next_item(follow)
        more = following < n_items
        if SPLIT:
            sync_threads()
            mbarrier.expect(free_1l, 0)
            if last:
                leave_part(acc, inv, part_out, offset, item, heads, splits, 0)
                acc = gl.zeros([64, 256], gl.float32, ACC)
            p_next, bits, next_follow = scores_of_0(
                q_l, q_r, q_x, k0_l, k0_r, k0_x, bits0, follow_buf, full_0l, full_0r, phase ^ 1, z, more, FENCE
            )
        elif QK_FIRST:
            if last:
                # once the rows are in registers and the half is free, the scores may come first
                rows = stage(acc, inv, k1_l.index(z), free_1l)
                p_next, bits, next_follow = scores_of_0(
                    q_l, q_r, q_x, k0_l, k0_r, k0_x, bits0, follow_buf, full_0l, full_0r, phase ^ 1, z, more, FENCE
                )
                leave(rows, out, offset, item, out_stride_h, heads, 0)
                # The sums of the next item do not read these zeros, but a value that stays alive would take the registers.
                acc = gl.zeros([64, 256], gl.float32, ACC)
            else:
                sync_threads()
                mbarrier.expect(free_1l, 0)
                p_next, bits, next_follow = scores_of_0(
                    q_l, q_r, q_x, k0_l, k0_r, k0_x, bits0, follow_buf, full_0l, full_0r, phase ^ 1, z, more, FENCE
                )
        else:
            if last:
                leave(stage(acc, inv, k1_l.index(z), free_1l), out, offset, item, out_stride_h, heads, 0)
                acc = gl.zeros([64, 256], gl.float32, ACC)
            else:
                sync_threads()
                mbarrier.expect(free_1l, 0)
            p_next, bits, next_follow = scores_of_0(
                q_l, q_r, q_x, k0_l, k0_r, k0_x, bits0, follow_buf, full_0l, full_0r, phase ^ 1, z, more, FENCE
            )
        begun = not last
        if last:
            m = gl.full([64], LOWEST, gl.float32, ROW)
            best = gl.full([64], LOWEST, gl.float32, ROW)
            l = gl.zeros([64], gl.float32, ROW)
            it += 1
            item = following
        follow = next_follow
        g += 1
        p = warpgroup_mma_wait(0, deps=[p_next])
        x = mask(p, bits)


@gluon.jit
def prepare_left(
    l, m, sinks, item, it, lse, part_lse, lse_scale, empty_lse, heads, s_q, has_lse, out_stride_b, out_stride_s,
    lse_stride_b, lse_stride_s, lse_stride_h, splits, SPLIT: gl.constexpr, l1_buf, ready_l1,
):
    """Writes lse. Returns the factors of the rows, and where the rows go: an offset in the output, or the first part."""
    mbarrier.wait(ready_l1, it & 1)
    l_all = l + l1_buf.load(ROW)
    inv = inverse(l_all, m, sinks, SPLIT)
    token, split, block = place(item, heads, splits, SPLIT)
    head = block * 64 + gl.arange(0, 64, ROW)
    empty = l_all == 0.0
    lse2 = gl.where(empty, float("-inf"), m + gl.log2(l_all))
    if SPLIT:
        offset = (token.to(gl.int64) * splits + split) * heads
        gl.store(part_lse + (offset + head), lse2, mask=head < heads)
    else:
        b = (token // s_q).to(gl.int64)
        s_pos = (token % s_q).to(gl.int64)
        offset = b * out_stride_b + s_pos * out_stride_s
        lse_row = lse + (b * lse_stride_b + s_pos * lse_stride_s)
        lse_out = gl.where(empty, empty_lse, lse2 * (LN2 * lse_scale))
        gl.store(lse_row + head.to(gl.int64) * lse_stride_h, lse_out, mask=(head < heads) & (has_lse != 0))
    return inv, offset


@gluon.jit
def right_group(
    sink, out, max_logits, part_out, part_max, scale_log2,
    heads, s_q, has_sink, has_max, out_stride_b, out_stride_s, out_stride_h,
    max_stride_b, max_stride_s, max_stride_h, splits, n_items, first_item,
    SPLIT: gl.constexpr, SLACK: gl.constexpr, SHARE: gl.constexpr, FIRST_SUM: gl.constexpr, FENCE: gl.constexpr,
    q_l, q_r, q_x, k0_r, k1_l, k1_r, k1_x, s0_buf, s1_buf, m0_buf, m1_buf, l0_buf, l1_buf, best0_buf, bits1, follow_buf, start_buf,
    free_ql, free_qr, full_1l, full_1r, free_0r, free_1r, ready_s0, ready_s1, ready_l0, ready_l1,
):
    item = first_item
    m = gl.full([64], LOWEST, gl.float32, ROW)
    best = gl.full([64], LOWEST, gl.float32, ROW)
    l = gl.zeros([64], gl.float32, ROW)
    acc = gl.zeros([64, 256], gl.float32, ACC)
    begun = False
    it = 0
    g = 0
    while item < n_items:
        z = g >> 30
        phase = g & 1
        # ---- scores of tile 1
        p = gl.zeros([64, 64], gl.float32, SCORES)
        p = scores(q_l.index(z), k1_l.index(z), p, False, full_1l, phase, True, FENCE)
        follow = load_follow(follow_buf)
        last = follow != SAME_ITEM
        if last:  # so that the next Q is on its way early
            done = warpgroup_mma_wait(0, deps=[p])
            sync_threads()
            mbarrier.expect(free_ql, 0)
            p = scores(q_r.index(z), k1_r.index(z), done, True, full_1r, phase, True, FENCE)
        else:
            p = scores(q_r.index(z), k1_r.index(z), p, True, full_1r, phase, True, FENCE)
        if ROPE > 0:
            p = warpgroup_mma(q_x.index(z), k1_x.index(z).permute((1, 0)), p, is_async=True)
        bits = bits1.load(gl.SliceLayout(1, BITS))
        p = warpgroup_mma_wait(0, deps=[p])
        sinks = m
        if last:
            sync_threads()
            mbarrier.expect(free_qr, 0)
            if not SPLIT:
                _, _, block = place(item, heads, splits, SPLIT)
                sinks = load_sink(sink, block, heads, has_sink)
        x = mask(p, bits)
        mx = gl.max(x, 1) * scale_log2
        best = gl.maximum(best, mx)
        # ---- tile 1: softmax, publish
        mbarrier.wait(ready_s0, phase)
        m0 = m0_buf.load(ROW)
        a = gl.exp2(m - m0)
        so_far = l
        if FIRST_SUM:
            if not begun:
                so_far = start_buf.load(ROW)
                m = m0
        m = gl.where(mx > limit(m0, m, so_far, SLACK, SHARE), mx, m0)
        s = gl.exp2(x * scale_log2 - m[:, None])
        sb = s.to(gl.bfloat16)
        s1_buf.index(z).store(sb)
        m1_buf.store(m)
        fence_async_shared()
        sync_threads()
        mbarrier.expect(ready_s1, 0)
        # ---- tile 0, from the left group
        c = gl.exp2(m0 - m)
        acc = rescale(acc, a)
        acc = warpgroup_mma(s0_buf.index(z), k0_r.index(z), acc, use_acc=begun, is_async=True)
        # s passes through the wait, or its sum would be taken before S1 is published
        acc, s = warpgroup_mma_wait(0, deps=[acc, s])
        sync_threads()
        mbarrier.expect(free_0r, 0)
        acc = rescale(acc, c)
        if follow >= SAME_ITEM:  # the pair has a tile 1
            acc = warpgroup_mma(gl.convert_layout(sb, PROBS), k1_r.index(z), acc, is_async=True)
            l = l * (a * c) + gl.sum(s, 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
        else:
            l = l * (a * c)
        if last:
            l1_buf.store(l)
            sync_threads()
            mbarrier.expect(ready_l1, 0)
        inv = m
        offset = gl.full([], 0, gl.int64)
        if last:
            inv, offset = prepare_right(
                l, m, best, sinks, item, it, max_logits, part_max, heads, s_q, has_max, out_stride_b, out_stride_s,
                max_stride_b, max_stride_s, max_stride_h, splits, SPLIT, l0_buf, best0_buf, ready_l0,
            )
        if SPLIT:
            sync_threads()
            mbarrier.expect(free_1r, 0)
        else:
            if not last:
                sync_threads()
                mbarrier.expect(free_1r, 0)
        begun = not last
        if last:
            if SPLIT:
                leave_part(acc, inv, part_out, offset, item, heads, splits, 256)
            else:
                leave(stage(acc, inv, k1_r.index(z), free_1r), out, offset, item, out_stride_h, heads, 256)
            acc = gl.zeros([64, 256], gl.float32, ACC)
            m = gl.full([64], LOWEST, gl.float32, ROW)
            best = gl.full([64], LOWEST, gl.float32, ROW)
            l = gl.zeros([64], gl.float32, ROW)
            it += 1
            item = next_item(follow)
        g += 1


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
    token, split, block = place(item, heads, splits, SPLIT)
    head = block * 64 + gl.arange(0, 64, ROW)
    # a NaN key leaves no trace in a maximum, but it does in the sum
    top = gl.where(l_all == l_all, gl.where(best == LOWEST, float("-inf"), best), float("nan"))
    if SPLIT:
        offset = (token.to(gl.int64) * splits + split) * heads
        gl.store(part_max + (offset + head), top, mask=(head < heads) & (has_max != 0))
    else:
        b = (token // s_q).to(gl.int64)
        s_pos = (token % s_q).to(gl.int64)
        offset = b * out_stride_b + s_pos * out_stride_s
        max_row = max_logits + (b * max_stride_b + s_pos * max_stride_s)
        gl.store(max_row + head.to(gl.int64) * max_stride_h, top * LN2, mask=(head < heads) & (has_max != 0))
    return inv, offset


# ---------------------------------------------------------------------------------------------- kernel


@gluon.jit
def new_barrier(COUNT: gl.constexpr):
    """One allocation per barrier, and per buffer below: Triton looks at whole allocations when it decides where warps must
    wait for each other, and an array of barriers would have them wait almost everywhere."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit(do_not_specialize=["n_heads", "s_q", "topk", "extra_topk", "slots", "extra_slots", "page", "extra_page",
                              "len_per", "has_len", "has_extra_len", "has_sink", "has_lse", "has_max",
                              "tokens", "splits"])
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
    tokens, splits, counter,
    DUAL: gl.constexpr,  # bf16 caches come alone
    SPLIT: gl.constexpr,  # write normalised parts for combine.py
    PAGE: gl.constexpr,  # rows of bf16 are not paged
    EXTRA_PAGE: gl.constexpr,
    HB: gl.constexpr,  # heads per item
    FP16: gl.constexpr,  # of no meaning for bf16 rows
    PERSISTENT: gl.constexpr,  # the grid is smaller than the items
    PREFETCH_L2: gl.constexpr,  # bring Q and indices of the next item into the L2
    PREFETCH_ROWS: gl.constexpr,  # bring the rows of the next pair into the L2
    QK_FIRST: gl.constexpr,  # left group: issue the next item's first scores before the finished rows are stored
    DYNAMIC: gl.constexpr,  # items beyond the first are taken from *counter, which starts at 0
    SLACK: gl.constexpr,  # growth in log2 that a row maximum must have to be taken up
    SHARE: gl.constexpr,  # or -log2 of the share of the sum so far that a new key must have
    FIRST_SUM: gl.constexpr,  # an item's first tile 1 is judged by the left group's sum of tile 0, not by growth alone
    FENCE: gl.constexpr,  # proxy fence between the arrival of rows and the MMA that reads them
    R_RIGHT: gl.constexpr,  # registers per thread of the right group and of the producer; the left group has what is left
    R_PRODUCER: gl.constexpr,
):
    gl.static_assert(not DUAL, "bf16 caches come alone")
    gl.static_assert(HB == 64, "an item has 64 heads")
    if SPLIT:
        release_dependents()
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], gl.bfloat16)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_l = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], HALF)
    q_r = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], HALF)
    k0_l = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], HALF)
    k0_r = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], HALF)
    k1_l = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], HALF)
    k1_r = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], HALF)
    s0_buf = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
    s1_buf = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
    # S0 shares its buffer with the rope dims of tile 0, or shared memory would not suffice: those are dead once S0 exists,
    # and are refilled with the right half, whose release says that S0 has been read.
    k0_x = s0_buf
    k1_x = s0_buf  # without rope dims: never touched
    q_x = s0_buf
    if ROPE > 0:
        k1_x = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
        q_x = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
    m0_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    m1_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    l0_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    l1_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    best0_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)
    start_buf = gl.allocate_shared_memory(gl.float32, [64], VECTOR)  # the left group's sum of an item's first tile
    bits = gl.allocate_shared_memory(gl.int32, [4], VECTOR)
    bits0 = bits.slice(0, 2)
    bits1 = bits.slice(2, 2)
    follow_buf = gl.allocate_shared_memory(gl.int32, [1], VECTOR)
    full_0l = new_barrier(128)  # every thread of the producer arrives when its own copies have
    full_0r = new_barrier(129)  # and once more for the bits
    full_1l = new_barrier(129)
    full_1r = new_barrier(128)
    free_ql = new_barrier(2)
    free_qr = new_barrier(1)
    free_0l = new_barrier(1)
    free_0r = new_barrier(1)
    free_1l = new_barrier(1)
    free_1r = new_barrier(1)
    ready_s0 = new_barrier(1)
    ready_s1 = new_barrier(1)
    ready_l0 = new_barrier(1)
    ready_l1 = new_barrier(1)

    n_items = tokens * (1 + (n_heads > 64).to(gl.int32))
    if SPLIT:
        n_items = n_items * splits
    first_item = gl.program_id(0)
    stride = gl.num_programs(0) if PERSISTENT else n_items
    gl.warp_specialize(
        [
            (left_group, (
                sink, out, lse, part_out, part_lse, scale_log2, lse_scale, empty_lse,
                n_heads, s_q, has_sink, has_lse, out_stride_b, out_stride_s, out_stride_h,
                lse_stride_b, lse_stride_s, lse_stride_h, splits, n_items, first_item,
                SPLIT, SLACK, SHARE, FIRST_SUM, QK_FIRST, FENCE,
                q_l, q_r, q_x, k0_l, k0_r, k0_x, k1_l, s0_buf, s1_buf, m0_buf, m1_buf, l0_buf, l1_buf, best0_buf,
                bits0, follow_buf, start_buf,
                free_ql, full_0l, full_0r, free_0l, free_1l, ready_s0, ready_s1, ready_l0, ready_l1,
            )),
            (right_group, (
                sink, out, max_logits, part_out, part_max, scale_log2,
                n_heads, s_q, has_sink, has_max, out_stride_b, out_stride_s, out_stride_h,
                max_stride_b, max_stride_s, max_stride_h, splits, n_items, first_item,
                SPLIT, SLACK, SHARE, FIRST_SUM, FENCE,
                q_l, q_r, q_x, k0_r, k1_l, k1_r, k1_x, s0_buf, s1_buf, m0_buf, m1_buf, l0_buf, l1_buf, best0_buf, bits1,
                follow_buf, start_buf,
                free_ql, free_qr, full_1l, full_1r, free_0r, free_1r, ready_s0, ready_s1, ready_l0, ready_l1,
            )),
            (producer, (
                q, kv, indices, lengths, n_heads, s_q, topk, slots, len_per, has_len, page_stride,
                q_stride_b, q_stride_s, q_stride_h, idx_stride_b, idx_stride_s, counter, splits, n_items, first_item, stride,
                SPLIT, PREFETCH_L2, PREFETCH_ROWS, DYNAMIC,
                q_l, q_r, q_x, k0_l, k0_r, k0_x, k1_l, k1_r, k1_x, bits, follow_buf,
                free_ql, free_qr, full_0l, full_0r, full_1l, full_1r, free_0l, free_0r, free_1l, free_1r,
            )),
        ],
        [4, 4],
        [R_RIGHT, R_PRODUCER],
    )
