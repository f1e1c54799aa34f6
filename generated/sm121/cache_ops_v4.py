"""Writing and reading the v4 KV cache outside attention: family "cache_ops", plain Triton, emitted for sm121.

`quantise_kernel` writes token rows into the slots that an engine assigned; `gather_kernel` reads slots back as bf16 rows.
A slot outside [0, slots) is skipped by the first and reads as a zero row in the second: neither touches memory for it.
"""

import triton
import triton.language as tl

FAMILY = "cache_ops"
LAYOUT = 'v4'
ARCH = 'sm121'
TEMPLATE_HASH = '19a17b444330d2aa'
TRITON_RANGE = ('3.4', '4.0')

LATENT = tl.constexpr(448)  # dims before the rope part
ROPE = tl.constexpr(64)  # unquantised bf16 dims at the end of a row
TILE = tl.constexpr(512)  # a power of two that covers the latent dims
GROUP = tl.constexpr(64)  # dims under one scale
GROUPS = tl.constexpr(7)
TILE_GROUPS = tl.constexpr(8)  # GROUPS, or the next power of two
ROW_BYTES = tl.constexpr(576)
ROPE_OFFSET = tl.constexpr(448)  # bytes from the row
SCALE_OFFSET = tl.constexpr(-1)  # bytes from the row (inline) or ignored (footer)
SCALE_STRIDE = tl.constexpr(8)  # bytes per token in the footer; 0: inline
E4M3_MAX = tl.constexpr(448.0)
INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def to_bf16(x, UPCAST: tl.constexpr):
    """To bf16, to nearest even; bf16 keeps its bits. Triton's interpreter truncates, and subnormals to zero, so there the
    rounding is done on the bits."""
    if UPCAST and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def to_e4m3(x, UPCAST: tl.constexpr):
    """fp32 in [-448, 448] -> e4m3fn codes, to nearest even. The interpreter rounds ties up, carries into the wrong bit and
    truncates subnormals, so there the code is put together from bits."""
    if UPCAST:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # adding 2^14 leaves a unit of 2^-9 in the last place: the fp32 addition itself rounds to the subnormal grid
        grid = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, grid, normal) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(code, UPCAST: tl.constexpr):
    """e4m3fn codes -> fp32, exact. The interpreter reads NaN as 480."""
    x = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if UPCAST:
        x = tl.where((code & 0x7F) == 0x7F, float("nan"), x)
    return x


@triton.jit
def group_scale(amax, AMAX_FLOOR: tl.constexpr, SCALE_FLOOR: tl.constexpr, POW2: tl.constexpr):
    """The scale of a group with finite largest magnitude `amax`, as fp32 bits. The division is correctly rounded: an amax of
    448 * 2^k must give 2^k exactly, or the power of two above it is taken."""
    ratio = tl.maximum(tl.div_rn(tl.maximum(amax, AMAX_FLOOR), tl.full(amax.shape, E4M3_MAX, tl.float32)), SCALE_FLOOR)
    bits = ratio.to(tl.int32, bitcast=True)
    if POW2:  # 2^ceil(log2(ratio)) without a logarithm; the floors keep ratio normal
        bits = ((bits + 0x7FFFFF) >> 23) << 23
    return bits


@triton.jit
def ue8m0_to_fp32(byte):
    """2^(byte - 127); byte 0 is the subnormal 2^-127 and 255 is NaN, which a plain shift gets wrong."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, NAN_BITS, bits).to(tl.float32, bitcast=True)


@triton.jit
def token_rows(cache, slot, page, page_stride):
    """Pointers to the row and to the first scale byte of each slot (int64; page_stride in bytes)."""
    page_id = slot // page
    token = slot - page_id * page
    start = page_id * page_stride
    row = cache + (start + token * ROW_BYTES)
    if SCALE_STRIDE > 0:
        return row, cache + (start + (page * ROW_BYTES + token * SCALE_STRIDE))
    return row, row + SCALE_OFFSET


@triton.jit(do_not_specialize=["n_slots", "page"])
def quantise_kernel(
    rows, cache, slots, n_slots, page, row_stride, page_stride,
    AMAX_FLOOR: tl.constexpr,  # smallest largest-magnitude of a group
    SCALE_FLOOR: tl.constexpr,  # smallest scale before rounding
    POW2: tl.constexpr,  # scales are powers of two, rounded up
    UPCAST: tl.constexpr,  # only under the interpreter
):
    """rows [n, LATENT + ROPE] bf16 or fp32, row_stride in elements; slots [n] int32 or int64; one program per row.
    cache: uint8 pages of `page` tokens, page_stride bytes apart. A group that holds inf or NaN becomes NaN as a whole.
    """
    pid = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + pid).to(tl.int64)
    if (slot < 0) | (slot >= n_slots):
        return
    source = rows + pid * row_stride
    row, scale_row = token_rows(cache, slot, page, page_stride)
    g = tl.arange(0, TILE_GROUPS)
    cols = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(source + cols, mask=cols < LATENT, other=0.0).to(tl.float32)

    # magnitudes compare as integers, with inf and NaN on top: one reduction sees both
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    bad = top >= INF_BITS
    amax = tl.where(bad, 0, top).to(tl.float32, bitcast=True)
    bits = group_scale(amax, AMAX_FLOOR, SCALE_FLOOR, POW2)
    if POW2:
        inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)  # exact
        y = x * inverse[:, None]
    else:  # without a floor an all-zero group has scale 0: its codes are 0, not 0 / 0
        divisor = tl.where(bits == 0, 1.0, bits.to(tl.float32, bitcast=True))
        y = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    y = tl.minimum(tl.maximum(y, -E4M3_MAX), E4M3_MAX)
    code = tl.where(bad[:, None], 0x7F, to_e4m3(y, UPCAST).to(tl.int32)).to(tl.uint8)
    tl.store(row + cols, code, mask=cols < LATENT)
    byte = tl.where(bad, 255, bits >> 23)
    tl.store(scale_row + g, tl.where(g < GROUPS, byte, 0).to(tl.uint8))  # bytes past the last group are padding: 0
    rope = tl.arange(0, ROPE)
    target = (row + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tl.store(target + rope, to_bf16(tl.load(source + LATENT + rope), UPCAST))


@triton.jit(do_not_specialize=["n", "n_slots", "page"])
def gather_kernel(
    cache, slots, out, n, n_slots, page, page_stride, out_stride,
    BLOCK_N: tl.constexpr,  # rows per program
    UPCAST: tl.constexpr,  # only under the interpreter
):
    """out[i] = row of slots[i], dequantised: out [n, LATENT + ROPE] bf16, out_stride in elements; slots [n] int32 or int64."""
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = i < n
    slot = tl.load(slots + i, mask=live, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < n_slots)
    slot = tl.where(valid, slot, 0)
    target = out + i.to(tl.int64) * out_stride
    cols = tl.arange(0, TILE)
    keep = live[:, None] & (cols < LATENT)[None, :]
    fetch = valid[:, None] & (cols < LATENT)[None, :]
    row, scale_row = token_rows(cache, slot, page, page_stride)
    code = tl.load(row[:, None] + cols[None, :], mask=fetch, other=0)
    scale = ue8m0_to_fp32(tl.load(scale_row[:, None] + (cols // GROUP)[None, :], mask=fetch, other=0))
    tl.store(target[:, None] + cols[None, :], to_bf16(from_e4m3(code, UPCAST) * scale, UPCAST), mask=keep)
    rope = tl.arange(0, ROPE)
    rope_row = (row + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tail = tl.load(rope_row[:, None] + rope[None, :], mask=valid[:, None], other=0.0)
    tl.store((target + LATENT)[:, None] + rope[None, :], tail, mask=live[:, None])
