"""Compile what a suite needs in several processes before anything is timed: they share Triton's cache folder."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.ceilings import CONFIGS, STEPS, gather_kernel, pools_of, split_of
from bench.inputs import Pools
from bench.ours import Ours, served_by, shape_of_row
from bench.rows import Row

TIMEOUT_S = 240
SMALL_POOL = 8192
"""Rows of the caches here: no kernel knows how many there are."""


def compile_part(rows: Sequence[Row], part: int, parts: int, device: str = "cuda") -> None:
    """Call ours once on small caches for every parts-th kernel; rows that one entry serves stay in one process."""
    pools = Pools(device)
    small = [replace(row, pool_rows=SMALL_POOL, requests=1) for row in rows if row.pool_rows]
    groups: dict[tuple[str, str], list[tuple[Row, tuple[float, float] | None]]] = {}
    for row in small:
        scale_range = pools.scale_range(row) if row.spec.kv.fp8 else None
        by = served_by(shape_of_row(row, scale_range))
        groups.setdefault((by["module"], by["config"]), []).append((row, scale_range))
    for key in sorted(groups)[part::parts]:
        for row, scale_range in groups[key]:
            inputs = pools.inputs(row, 1)[0]
            Ours(row, inputs, scale_range).bind(inputs)()
    if part == parts - 1:
        compile_gathers(rows, device)
    if device == "cuda":
        torch.cuda.synchronize()


def compile_gathers(rows: Sequence[Row], device: str) -> None:
    data = torch.zeros(1 << 20, dtype=torch.int32, device=device)
    for row_bytes in sorted({pool.row_bytes for pool in pools_of(rows)}):
        head, tail = split_of(row_bytes // 4)
        for block, warps, stages in CONFIGS:
            index = torch.zeros(block * STEPS, dtype=torch.int32, device=device)
            gather_kernel[(1,)](data, index, data, row_bytes // 4, head, tail, block, STEPS, stages, num_warps=warps)


def in_processes(jobs: int, suite: str, patterns: Sequence[str]) -> list[str]:
    """Run `compile_part` in `jobs` processes; a sentence for each that failed (its kernels compile at their first call)."""
    more = [word for pattern in patterns for word in ("--rows", pattern)]
    command = [sys.executable, "-m", "bench.run", "--suite", suite, *more, "--compile-only"]
    children = [
        subprocess.Popen([*command, f"{part}/{jobs}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for part in range(jobs)
    ]
    sentences = []
    deadline = time.monotonic() + TIMEOUT_S
    for part, child in enumerate(children):
        try:
            _, errors = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            sentences.append(f"Compiling ahead, process {part}: ended after {TIMEOUT_S} s.")
            continue
        if child.returncode:
            last = errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
            sentences.append(f"Compiling ahead, process {part}: {last[0][:200]}")
    return sentences
