"""Writing and reading the bf16_d576 KV cache outside attention: family "cache_ops", plain Triton, emitted for sm90.

`quantise_kernel` writes token rows into the slots that an engine assigned; `gather_kernel` reads slots back as bf16 rows.
A slot outside [0, slots) is skipped by the first and reads as a zero row in the second: neither touches memory for it.
"""

import triton
import triton.language as tl

FAMILY = "cache_ops"
LAYOUT = 'bf16_d576'
ARCH = 'sm90'
TEMPLATE_HASH = '19a17b444330d2aa'
TRITON_RANGE = ('3.4', '4.0')

LATENT = tl.constexpr(512)  # dims before the rope part
ROPE = tl.constexpr(64)  # unquantised bf16 dims at the end of a row
TILE = tl.constexpr(512)  # a power of two that covers the latent dims


@triton.jit
def to_bf16(x, UPCAST: tl.constexpr):
    """To bf16, to nearest even; bf16 keeps its bits. Triton's interpreter truncates, and subnormals to zero, so there the
    rounding is done on the bits."""
    if UPCAST and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit(do_not_specialize=["n_slots", "page"])
def quantise_kernel(
    rows, cache, slots, n_slots, page, row_stride, page_stride,
    AMAX_FLOOR: tl.constexpr,  # smallest largest-magnitude of a group
    SCALE_FLOOR: tl.constexpr,  # smallest scale before rounding
    POW2: tl.constexpr,  # scales are powers of two, rounded up
    UPCAST: tl.constexpr,  # only under the interpreter
):
    """rows [n, LATENT + ROPE] bf16 or fp32, row_stride in elements; slots [n] int32 or int64; one program per row.
    cache: bf16 rows, page_stride elements apart (page and the three scale constants are ignored).
    """
    pid = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + pid).to(tl.int64)
    if (slot < 0) | (slot >= n_slots):
        return
    source = rows + pid * row_stride
    cols = tl.arange(0, TILE)
    row = cache + slot * page_stride
    tl.store(row + cols, to_bf16(tl.load(source + cols), UPCAST))
    rope = tl.arange(0, ROPE)
    tl.store(row + LATENT + rope, to_bf16(tl.load(source + LATENT + rope), UPCAST))


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
    row = cache + slot * page_stride
    x = tl.load(row[:, None] + cols[None, :], mask=fetch, other=0.0)
    tl.store(target[:, None] + cols[None, :], x, mask=keep)
    rope = tl.arange(0, ROPE)
    rope_row = row + LATENT
    tail = tl.load(rope_row[:, None] + rope[None, :], mask=valid[:, None], other=0.0)
    tl.store((target + LATENT)[:, None] + rope[None, :], tail, mask=live[:, None])
