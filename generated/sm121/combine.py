"""Merge of split-K parts, emitted for sm121: one program per (token, head, BLOCK_D dims).

part_out [T, splits, heads, 512], part_lse and part_max fp32 [T, splits, heads] (base 2; -inf: the split had no valid key
and its part_out row was never written: whatever is read there is dropped). The sink joins the denominator here, once. The
order of the sum is fixed, so the result is repeatable.

Launched with the attribute of programmatic dependent launches, the merge starts while the attention kernel still runs, and
waits for it here. The attention kernel of the next call is launched without the attribute: it starts when this merge has
ended, so that it may write the same parts again.
"""

import triton
import triton.language as tl

FAMILY = "combine"
ARCH = 'sm121'
TEMPLATE_HASH = '62ebead38e8f970c'
TRITON_RANGE = ('3.4', '4.0')

D_V = tl.constexpr(512)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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
def wait_for_attention():
    """Until the kernel before this one has ended and its writes are visible; nothing if this was no dependent launch."""
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["n_heads", "s_q", "splits", "has_sink", "has_lse", "has_max"])
def combine_kernel(
    part_out, part_lse, part_max, sink, out, lse, max_logits, lse_scale, empty_lse,
    n_heads, s_q, splits, has_sink, has_lse, has_max,
    out_stride_b, out_stride_s, out_stride_h,
    lse_stride_b, lse_stride_s, lse_stride_h, max_stride_b, max_stride_s, max_stride_h,
    BLOCK_S: tl.constexpr,  # splits, rounded up to a power of two
    BLOCK_D: tl.constexpr,  # output dims per program (grid axis 1)
    UPCAST: tl.constexpr,  # only under the interpreter
):
    pid = tl.program_id(0)
    t = pid // n_heads
    h = pid % n_heads
    b = (t // s_q).to(tl.int64)
    s_pos = (t % s_q).to(tl.int64)
    part = t.to(tl.int64) * splits * n_heads + h
    # a token's parts are within 32 bits of each other, so that a row's address is one instruction
    rows = tl.arange(0, BLOCK_S) * n_heads
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    exists = tl.arange(0, BLOCK_S) < splits
    x_ptr = (part_out + part * D_V + cols)[None, :] + (rows * D_V)[:, None]
    sink2 = tl.load(sink + h, mask=has_sink != 0, other=float("-inf")) * LOG2E
    if not UPCAST:
        wait_for_attention()

    # All loads at once: none waits for another, and the order of the sum is fixed.
    lses = tl.load(part_lse + part + rows, mask=exists, other=float("-inf"))
    x = tl.load(x_ptr, mask=exists[:, None], other=0.0).to(tl.float32)
    used = lses != float("-inf")
    top = tl.max(lses, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lses - top)
    total = tl.sum(weights, 0)  # NaN stays NaN
    empty = total == 0.0
    acc = tl.sum(tl.where(used[:, None], x, 0.0) * weights[:, None], 0)
    inv = tl.where(empty, 0.0, 1.0 / (total + tl.exp2(sink2 - top)))
    out_row = out + b * out_stride_b + s_pos * out_stride_s + h.to(tl.int64) * out_stride_h
    tl.store(out_row + cols, cast(acc * inv, out.dtype.element_ty, UPCAST))
    if tl.program_id(1) > 0:
        return

    lse_out = tl.where(empty, empty_lse, (top + tl.log2(total)) * (LN2 * lse_scale))
    tl.store(lse + b * lse_stride_b + s_pos * lse_stride_s + h.to(tl.int64) * lse_stride_h, lse_out, mask=has_lse != 0)
    maxes = tl.load(part_max + part + rows, mask=used & (has_max != 0), other=float("-inf"))
    best = tl.where(total == total, tl.max(maxes, 0), float("nan"))
    max_ptr = max_logits + b * max_stride_b + s_pos * max_stride_s + h.to(tl.int64) * max_stride_h
    tl.store(max_ptr, best * LN2, mask=has_max != 0)
