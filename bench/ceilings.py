"""What the card does in this run: the rates that bound every row, measured before the rows.

A bf16 product, cool and at sustained clocks, a copy, and gathers of random rows: from a pool larger than the L2 each row once,
from a pool that fits the L2 as often as a prefill does. The gather is plain Triton; the fastest of a few forms counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bench.rows import Row
from kgen.archs import DeviceClass, load_arch
from kgen.select import HBM_SHARE, floor_us

SUSTAINED_S = 1.5
L2_SHARE = 0.75  # a pool of at most this share of the L2 counts as fitting
HBM_BYTES = 1 << 30  # gathered from a pool in memory, at least; a launch's few µs do not count beside it
L2_BYTES = 6 << 30  # gathered from a pool in the L2

CONFIGS = ((16, 4, 1), (16, 4, 3), (32, 8, 3), (8, 4, 4))
"""Rows per step, warps, stages of the loop (1: a register load per step, else copies ahead)."""
STEPS = 16


class Pool(NamedTuple):
    """What a gather is measured on: rows of that size, that many."""

    row_bytes: int
    rows: int


@triton.jit
def gather_kernel(
    pool, index, out, ROW: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Reads BLOCK * STEPS rows of ROW 32-bit words; HEAD is the largest power of two in ROW, TAIL covers the rest (or 0)."""
    first = tl.program_id(0) * (BLOCK * STEPS)
    rows, head = tl.arange(0, BLOCK), tl.arange(0, HEAD)
    seen = tl.zeros((BLOCK, HEAD), tl.int32)
    if TAIL > 0:
        tail = tl.arange(0, TAIL)
        seen_tail = tl.zeros((BLOCK, TAIL), tl.int32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = pool + tl.load(index + first + step * BLOCK + rows).to(tl.int64)[:, None] * ROW
        seen += tl.load(start + head[None, :])
        if TAIL > 0:
            seen_tail += tl.load(start + HEAD + tail[None, :], mask=tail[None, :] < ROW - HEAD, other=0)
    total = tl.sum(tl.sum(seen, 1), 0)
    if TAIL > 0:
        total += tl.sum(tl.sum(seen_tail, 1), 0)
    tl.store(out + tl.program_id(0), total)  # so that no load is dropped


def split_of(words: int) -> tuple[int, int]:
    """(HEAD, TAIL) of a row of `words` 32-bit words."""
    head = 1 << (words.bit_length() - 1)
    rest = words - head
    return head, 1 << (rest - 1).bit_length() if rest else 0


def in_l2(pool: Pool, l2_bytes: int) -> bool:
    return pool.row_bytes * pool.rows <= L2_SHARE * l2_bytes


def pools_of(rows: Iterable[Row]) -> list[Pool]:
    """The gathers that rows stand on, each once; a row without a pool of its own has none."""
    return sorted({pool_of(row) for row in rows if row.pool_rows})


def pool_of(row: Row) -> Pool:
    return Pool(row.row_bytes, row.pool_rows * (2 if row.spec.dual else 1))


def gather(pool: Pool, l2_bytes: int, configs: Iterable[tuple[int, int, int]] = CONFIGS) -> dict[str, Any]:
    """GB/s of reading random rows of `pool`: the fastest form, with the others beside it."""
    from triton.testing import do_bench

    words = pool.row_bytes // 4
    head, tail = split_of(words)
    data = torch.randint(-(2**31), 2**31 - 1, (pool.rows * words,), dtype=torch.int32, device="cuda")
    granule = max(block for block, _, _ in CONFIGS) * STEPS
    warm = in_l2(pool, l2_bytes)
    count = max(granule, (L2_BYTES if warm else HBM_BYTES) // pool.row_bytes // granule * granule)
    if warm:
        index = torch.randint(0, pool.rows, (count,), dtype=torch.int32, device="cuda")
    else:  # each row once: nothing is found in the L2
        count = min(count, pool.rows // granule * granule)
        index = torch.randperm(pool.rows, device="cuda")[:count].to(torch.int32)
    out = torch.empty(count // STEPS, dtype=torch.int32, device="cuda")
    rates = {}
    for block, warps, stages in configs:
        grid = (count // (block * STEPS),)

        def run(grid: Any = grid, block: int = block, warps: int = warps, stages: int = stages) -> None:
            gather_kernel[grid](data, index, out, words, head, tail, block, STEPS, stages, num_warps=warps)

        ms = do_bench(run, warmup=5, rep=25, return_mode="median")
        rates[f"{block} rows, {warps} warps, {stages} stages"] = round(count * pool.row_bytes / ms / 1e6)
    best = max(rates, key=lambda name: rates[name])
    return {"row_bytes": pool.row_bytes, "pool_rows": pool.rows, "in_l2": warm, "gbps": rates[best], "forms": rates}


def matmul_tflops(seconds: float) -> tuple[float, float]:
    """TFLOP/s of an 8192^3 bf16 product: of the first calls, and the median of the last half of `seconds` without a pause."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    c = a @ b
    torch.cuda.synchronize()
    time.sleep(0.3)
    times: list[float] = []
    start = time.perf_counter()
    while not times or time.perf_counter() - start < seconds:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
        events[0].record()
        for event in events[1:]:
            torch.matmul(a, b, out=c)
            event.record()
        torch.cuda.synchronize()
        times += [one.elapsed_time(two) for one, two in zip(events, events[1:], strict=False)]
    flop = 2 * 8192**3 / 1e9
    return round(flop / statistics.median(times[:8]), 1), round(flop / statistics.median(times[len(times) // 2 :]), 1)


def copy_gbps() -> int:
    """GB/s read and written by a copy of 4 GiB."""
    from triton.testing import do_bench

    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    ms = do_bench(lambda: target.copy_(source), warmup=5, rep=30, return_mode="median")
    return round(8 * source.numel() / ms / 1e6)


def measure_ceilings(rows: Iterable[Row], l2_bytes: int) -> dict[str, Any]:
    """All ceilings that the rows need."""
    cool, sustained = matmul_tflops(SUSTAINED_S)
    found: dict[str, Any] = {
        "matmul_tflops": cool,
        "matmul_sustained_tflops": sustained,
        "copy_gbps": copy_gbps(),
        "gather": [],
    }
    torch.cuda.empty_cache()
    for pool in pools_of(rows):
        found["gather"].append(gather(pool, l2_bytes))
        torch.cuda.empty_cache()
    return found


def ceiling_us(row: Row, keys: int, ceilings: dict[str, Any]) -> float | None:
    """Time of a row at the measured rates, the larger of arithmetic and gather; None where its gather was not measured."""
    pool = pool_of(row)
    rate = next(
        (g["gbps"] for g in ceilings["gather"] if (g["row_bytes"], g["pool_rows"]) == pool),
        None,
    )
    if rate is None:
        return None
    return max(row.flop(keys) / ceilings["matmul_sustained_tflops"] / 1e6, keys * row.row_bytes / rate / 1e3)


def data_sheet_us(row: Row, keys: int, device: DeviceClass, l2_bytes: int) -> float:
    """The larger of the arithmetic's and the gather's time at data-sheet rates. Rows of a pool that fits the L2 count once."""
    if not row.pool_rows:
        return floor_us(row.spec, load_arch(row.spec.arch), device) * row.tokens / row.spec.tokens
    pool = pool_of(row)
    read = pool.row_bytes * pool.rows if in_l2(pool, l2_bytes) else keys * row.row_bytes
    return max(row.flop(keys) / device.bf16_tflops / 1e6, read / (device.dram_gbps * HBM_SHARE) / 1e3)
