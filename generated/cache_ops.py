"""Around the attention call: write tokens into a KV cache, read slots back, turn request-local positions into slots.

Each function validates in Python, allocates what was not passed in and makes one launch; none waits for the device.
Kernels are the emitted siblings `<arch>/cache_ops_<layout>.py` and `<arch>/index_ops.py`; the functions with a leading
underscore take the module instead, for tests and for kgen's own modules. Byte layouts: `layouts.py`.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import ModuleType

import torch

from .cache_checks import (
    CacheOpError,
    as_storage,
    check_devices,
    check_slots,
    check_tables,
    layout_of_cache,
    layout_of_rows,
    row_view,
    scale_rule_of,
)
from .kernel import interpreting
from .layouts import KvLayout

GATHER_ROWS = 4
INDEX_BLOCK = 1024
ARCH_OF_CAPABILITY = {(9, 0): "sm90", (10, 0): "sm100", (12, 0): "sm120", (12, 1): "sm121"}


def quantise_and_write(
    rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *, kv_layout: str, scale_rule: str = "flashmla"
) -> None:
    """Quantise `rows` and store them at `slots` of `cache`, in place.

    rows: [n, d_qk] or [n, 1, d_qk], bf16 or fp32, last dim contiguous, any row stride.
    slots: int32 or int64 [n]; an entry outside [0, number of slots) is skipped (engines pad with -1); which of two
    equal slots wins is not defined.
    cache: uint8/int8/float8_e4m3fn [pages, page, 1, bytes], any page stride; or bf16 [slots, d_qk] or [slots, 1, d_qk].
    kv_layout: "bf16", "v32", "v4", "v41_footer" or "v41_inline". scale_rule: a key of `SCALE_RULES`, ignored for bf16.

    bf16 rope dims are copied bit for bit; codes are clamped to +-448; a group that holds inf or NaN becomes NaN (scale
    byte 255 or an fp32 NaN, codes 0x7F). Bytes of other tokens and page tails stay as they are. Raises `CacheOpError`.
    """
    layout = layout_of_rows(kv_layout, rows)
    module = _load_module(__package__ or "", _arch(cache), f"cache_ops_{layout.name}")
    _write(module, layout, rows, cache, slots, scale_rule)


def gather_dequantise(
    cache: torch.Tensor, indices: torch.Tensor, *, kv_layout: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """bf16 copies of selected slots: [*indices.shape, d_qk], zero rows where an index is outside [0, number of slots).

    cache, kv_layout: as in `quantise_and_write`. indices: int32 or int64, any shape.
    out: bf16, of the result's shape or [n, d_qk] with n = indices.numel(), last dim contiguous, any row stride.
    Values are code * scale, rounded to nearest even (exact for UE8M0 scales in bf16's range). Raises `CacheOpError`.
    """
    layout = layout_of_cache(kv_layout, cache)
    module = _load_module(__package__ or "", _arch(cache), f"cache_ops_{layout.name}")
    return _gather(module, layout, cache, indices, out)


def to_physical_indices(
    indices: torch.Tensor,
    block_table: torch.Tensor,
    request_ids: torch.Tensor,
    *,
    page: int,
    page_stride_rows: int | None = None,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots of request-local positions: `block_table[request, tok // page] * page_stride_rows + tok % page`, or -1.

    -1 where a position is negative or past the table, its block is negative, or the slot does not fit int32.

    indices: int32 [T, topk], [T, 1, topk] or [b, s_q, topk] with T = b * s_q, last dim contiguous.
    block_table: int32 [requests, columns], last dim contiguous.
    request_ids: int32 [T]; an id outside the table gives a row of -1.
    page: tokens per block. page_stride_rows: rows from block to block, default `page`.
    out: int32 of the shape of `indices`; may be `indices`. counts: int32 [T], receives the number of valid positions of
    each row, which is a length only where valid positions come first.
    Rule: vLLM v1/attention/backends/mla/sparse_utils.py. Raises `CacheOpError`.
    """
    module = _load_module(__package__ or "", _arch(indices), "index_ops")
    return _convert(module, indices, block_table, request_ids, page, page_stride_rows, out, counts)


def _write(
    module: ModuleType, layout: KvLayout, rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale_rule: str
) -> None:
    """`quantise_and_write` with the kernel module given."""
    if rows.ndim == 3 and rows.shape[1] == 1:
        rows = rows.squeeze(1)
    rule = scale_rule_of(layout, scale_rule)
    storage = as_storage(layout, cache)
    reasons = check_devices(cache=cache, rows=rows, slots=slots)
    if rows.ndim != 2 or rows.shape[1] != layout.d_qk:
        reasons.append(f"rows must be [n, {layout.d_qk}] for {layout.name}, not {list(rows.shape)}.")
    elif rows.dtype not in (torch.bfloat16, torch.float32):
        reasons.append(f"rows must be bf16 or fp32, not {rows.dtype}: convert them first.")
    elif rows.stride(1) != 1:
        reasons.append("The last dim of rows must be contiguous: pass rows.contiguous().")
    reasons += check_slots("slots", slots)
    if not reasons and slots.shape != rows.shape[:1]:
        reasons.append(f"slots must be [{rows.shape[0]}], one per row, not {list(slots.shape)}.")
    if not reasons and not slots.is_contiguous():
        reasons.append("slots must be contiguous: pass slots.contiguous().")
    if reasons:
        raise CacheOpError(*reasons)
    if rows.shape[0] == 0:
        return
    with _on(cache):
        module.quantise_kernel[(rows.shape[0],)](
            rows, storage.data, slots, storage.slots, storage.page, rows.stride(0), storage.stride,
            AMAX_FLOOR=rule.amax_floor, SCALE_FLOOR=rule.scale_floor, POW2=rule.pow2, UPCAST=interpreting(),
            num_warps=1, num_stages=1,
        )  # fmt: skip


def _gather(
    module: ModuleType, layout: KvLayout, cache: torch.Tensor, indices: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """`gather_dequantise` with the kernel module given."""
    storage = as_storage(layout, cache)
    reasons = check_devices(cache=cache, indices=indices, out=out) + check_slots("indices", indices)
    n, full = indices.numel(), (*indices.shape, layout.d_qk)
    if out is None:
        out = torch.empty(full, dtype=torch.bfloat16, device=cache.device)
    flat = out
    if out.dtype != torch.bfloat16 or tuple(out.shape) not in (full, (n, layout.d_qk)):
        reasons.append(f"out must be bf16 {list(full)}, not {out.dtype} {list(out.shape)}.")
    elif out.stride(-1) != 1:
        reasons.append("The last dim of out must be contiguous.")
    elif n:
        try:
            flat = out.view(n, layout.d_qk)
            if n > 1 and flat.stride(0) < layout.d_qk:
                reasons.append("The rows of out overlap: pass a tensor that was not expanded.")
        except RuntimeError:
            reasons.append("The rows of out must have one stride: pass an out of shape [n, d_qk].")
    if reasons:
        raise CacheOpError(*reasons)
    if n == 0:
        return out
    with _on(cache):
        module.gather_kernel[(-(-n // GATHER_ROWS),)](
            storage.data, indices.reshape(-1), flat, n, storage.slots, storage.page, storage.stride, flat.stride(0),
            BLOCK_N=GATHER_ROWS, UPCAST=interpreting(), num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


def _convert(
    module: ModuleType,
    indices: torch.Tensor,
    block_table: torch.Tensor,
    request_ids: torch.Tensor,
    page: int,
    page_stride_rows: int | None = None,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`to_physical_indices` with the kernel module given."""
    page_rows = page if page_stride_rows is None else page_stride_rows
    reasons = check_devices(
        indices=indices, block_table=block_table, request_ids=request_ids, out=out, counts=counts
    ) + check_tables(indices, block_table, request_ids, counts)
    if page < 1 or page_rows < page:
        reasons.append(f"page must be at least 1 and page_stride_rows at least page, not {page} and {page_rows}.")
    if out is not None and (out.dtype != torch.int32 or out.shape != indices.shape):
        reasons.append(f"out must be int32 {list(indices.shape)}, not {out.dtype} {list(out.shape)}.")
    if reasons:
        raise CacheOpError(*reasons)
    if out is None:
        out = torch.empty(indices.shape, dtype=torch.int32, device=indices.device)
    source, target = row_view("indices", indices), row_view("out", out)
    tokens, width = source.shape
    if tokens == 0:
        return out
    block = min(INDEX_BLOCK, max(16, 1 << (width - 1).bit_length())) if width else 16
    with _on(indices):
        module.convert_kernel[(tokens,)](
            source, block_table, request_ids, target, target if counts is None else counts,
            width, block_table.shape[0], block_table.shape[1], page, page_rows, int(counts is not None),
            source.stride(0), block_table.stride(0), target.stride(0),
            BLOCK=block, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


def _on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _arch(tensor: torch.Tensor) -> str:
    """The arch whose modules serve a tensor's device; without a GPU only Triton's interpreter can (KGEN_ARCH, sm90)."""
    if tensor.is_cuda:
        capability = torch.cuda.get_device_capability(tensor.device)
        if capability not in ARCH_OF_CAPABILITY:
            raise CacheOpError(
                f"No kernels for compute capability {capability}; there are for {list(ARCH_OF_CAPABILITY)}."
            )
        return ARCH_OF_CAPABILITY[capability]
    if not interpreting():
        raise CacheOpError(
            f"Tensors are on {tensor.device}: move them to a GPU, or set TRITON_INTERPRET=1 before the start."
        )
    return os.environ.get("KGEN_ARCH", "sm90")


@lru_cache(maxsize=64)
def _load_module(package: str, arch: str, name: str) -> ModuleType:
    """Import an emitted kernel module; refuses one that was emitted for another arch."""
    module = importlib.import_module(f"{package}.{arch}.{name}")
    if arch != module.ARCH:
        raise ImportError(f"Module {module.__name__} was emitted for {module.ARCH}, not {arch}: emit it again.")
    return module
