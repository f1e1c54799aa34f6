"""Request-local token positions -> physical cache slots: family "index_ops", plain Triton, emitted for sm90.

out[t, i] = block_table[request_ids[t], tok // page] * page_rows + tok % page  with tok = indices[t, i], and -1 where tok is
negative, its column lies outside the block table, the request id is none, the block is negative, or the slot passes int32.
"""

import triton
import triton.language as tl

FAMILY = "index_ops"
ARCH = 'sm90'
TEMPLATE_HASH = 'ffa2d885667e243d'
TRITON_RANGE = ('3.4', '4.0')


@triton.jit(do_not_specialize=["width", "requests", "columns", "page", "page_rows", "has_counts"])
def convert_kernel(
    indices, block_table, request_ids, out, counts,
    width, requests, columns, page, page_rows, has_counts,
    index_stride, table_stride, out_stride,
    BLOCK: tl.constexpr,  # positions per step
):
    """indices, out int32 [T, width] and block_table int32 [requests, columns], row strides in elements; request_ids and
    counts int32 [T]. One program per row, so that the count of valid positions needs no atomics. `out` may be `indices`."""
    t = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ids + t)
    known = (request >= 0) & (request < requests)
    table = block_table + tl.where(known, request, 0).to(tl.int64) * table_stride
    limit = tl.where(known, columns, 0)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tok = tl.load(indices + t * index_stride + i, mask=i < width, other=-1)
        column = tl.maximum(tok, 0) // page
        inside = (tok >= 0) & (column < limit)
        # a lane that is masked off still needs an address that exists
        block = tl.load(table + tl.where(inside, column, 0), mask=inside, other=-1)
        slot = block.to(tl.int64) * page_rows + (tok - column * page)
        valid = inside & (block >= 0) & (slot <= 0x7FFFFFFF)
        tl.store(out + t * out_stride + i, tl.where(valid, slot, -1).to(tl.int32), mask=i < width)
        total += valid.to(tl.int32)
    tl.store(counts + t, tl.sum(total, 0), mask=has_counts != 0)
