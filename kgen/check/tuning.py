"""Inputs for timing: those of the peers' measurements, so that numbers stand beside each other.

q, kv ~ N(0, 1); distinct random indices per query; scale d^-0.5; fp8 pools with power-of-two scales, in which 64
requests own randomly permuted pages; bf16 pools of 32,768 rows for prefill, and for decode of 64 requests with so many
rows each, in random order, which no L2 holds. Lengths uniform in [k/2, k] with -1 beyond; sinks
N(0, 1).

This is a recipe with a number, `kgen.types.INPUTS_RECIPE`, which every timing carries: who changes what is timed here
raises it and says in `KernelSpec.inputs_since` which specs it concerns, so that old times do not stand beside new ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kgen.types import KernelSpec

from . import pack
from .inputs import Inputs

BF16_ROWS = 32768
REQUESTS = 64
_ROWS_PER_REQUEST = {"v32": 32768}  # 64 x 32,768 x 656 B = 1.38 GB; the others 64 x 16,384 x 584 B = 0.61 GB per cache
_CPU_POOL_BYTES = 16 << 20
_CHUNK = 1 << 26


def tuning_inputs(
    kernel_spec: KernelSpec,
    tokens: int,
    device: torch.device | str,
    sets: int,
    *,
    pool_bytes: int | None = None,
    sink: bool | None = None,
    lengths: bool = False,
    seed: int = 0,
) -> list[Inputs]:
    """`sets` input sets of `tokens` queries over one pool (one per cache), for calls that rotate over them.

    pool_bytes: size of each fp8 pool; default the peers' (1.38 GB V32, 0.61 GB others) on a GPU and 16 MB on a CPU.
    sink: default only for dual caches, as the peers were timed. A request smaller than the width repeats indices.
    """
    gen = torch.Generator(device=device)
    gen.manual_seed(seed)
    pools = [_Pool(kernel_spec, kernel_spec.topk, kernel_spec.page, pool_bytes, gen)]
    if kernel_spec.dual:
        pools.append(_Pool(kernel_spec, kernel_spec.extra_topk, kernel_spec.extra_page, pool_bytes, gen))
    with_sink = kernel_spec.dual if sink is None else sink
    heads, d = kernel_spec.heads, kernel_spec.d_qk
    result = []
    for number in range(sets):
        q = torch.randn(tokens, heads, d, generator=gen, device=device, dtype=torch.float32).to(torch.bfloat16)
        drawn = [pool.draw(tokens, number * tokens, lengths, gen) for pool in pools]
        result.append(
            Inputs(
                q=q,
                kv=pools[0].cache,
                indices=drawn[0][0],
                sm_scale=d**-0.5,
                kv_layout=kernel_spec.kv.kv_layout,
                topk_length=drawn[0][1],
                attn_sink=torch.randn(heads, generator=gen, device=device) if with_sink else None,
                extra_kv=pools[1].cache if kernel_spec.dual else None,
                extra_indices=drawn[1][0] if kernel_spec.dual else None,
                extra_topk_length=drawn[1][1] if kernel_spec.dual else None,
            )
        )
    return result


def flat_pool(spec: KernelSpec, topk: int, pool_bytes: int | None = None) -> tuple[int, int]:
    """(requests, rows of each) of a pool of bf16 rows; `pool_bytes` bounds the pool of decode, None: the recipe's own."""
    if spec.phase == "prefill":
        return 1, BF16_ROWS
    if pool_bytes is None:
        return REQUESTS, BF16_ROWS
    return REQUESTS, max(topk, pool_bytes // (2 * spec.d_qk * REQUESTS))


class _Pool:
    """One cache, and which of its slots belong to which request."""

    def __init__(self, spec: KernelSpec, topk: int, page: int, pool_bytes: int | None, gen: torch.Generator) -> None:
        self.topk = topk
        d, device = spec.d_qk, gen.device
        if not spec.kv.paged:
            if device.type == "cpu":
                pool_bytes = pool_bytes or _CPU_POOL_BYTES
            self.page = 1
            requests, self.pages_each = flat_pool(spec, topk, pool_bytes)
            count = requests * self.pages_each
            self.cache = torch.empty(count, d, dtype=torch.bfloat16, device=device)
            for part in torch.split(self.cache, _CHUNK // d):
                part.copy_(torch.randn(part.shape, generator=gen, device=device))
            self.table = torch.randperm(count, generator=gen, device=device).view(requests, self.pages_each)
            return
        self.page = page
        stride = pack.page_bytes(spec.layout, page)
        self.pages_each = -(-_ROWS_PER_REQUEST.get(spec.layout, 16384) // page)
        if pool_bytes is None and device.type == "cpu":
            pool_bytes = _CPU_POOL_BYTES
        if pool_bytes is not None:
            self.pages_each = max(1, pool_bytes // (stride * REQUESTS))
        pages = self.pages_each * REQUESTS
        self.cache = pack.empty_cache(spec.layout, page, pages, stride, 0, 0, device)
        step = max(1, _CHUNK // (page * d))
        for first in range(0, pages, step):
            rows = torch.randn(min(step, pages - first) * page, d, generator=gen, device=device)
            pack.write_rows(self.cache, spec.layout, rows, first_page=first)
        self.table = torch.randperm(pages, generator=gen, device=device).view(REQUESTS, self.pages_each)

    def draw(self, tokens: int, first: int, lengths: bool, gen: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """(indices int32 [tokens, topk], lengths int32 [tokens] or None) of queries that belong to requests first, …"""
        rows, device = self.pages_each * self.page, gen.device
        step = max(1, _CHUNK // rows)
        parts = []
        for start in range(0, tokens, step):
            n = min(step, tokens - start)
            if self.topk <= rows:  # the ranks of random numbers: distinct, and in random order
                parts.append(torch.rand(n, rows, generator=gen, device=device).topk(self.topk, dim=1).indices)
            else:
                parts.append(torch.randint(0, rows, (n, self.topk), generator=gen, device=device))
        position = torch.cat(parts) if parts else torch.empty(0, self.topk, dtype=torch.long, device=device)
        request = (torch.arange(tokens, device=device) + first) % self.table.shape[0]
        slot = self.table[request[:, None], position // self.page] * self.page + position % self.page
        if not lengths:
            return slot.to(torch.int32), None
        length = torch.randint(self.topk // 2, self.topk + 1, (tokens,), generator=gen, device=device)
        beyond = torch.arange(self.topk, device=device)[None, :] >= length[:, None]
        return slot.masked_fill(beyond, -1).to(torch.int32), length.to(torch.int32)
