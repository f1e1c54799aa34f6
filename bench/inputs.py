"""Inputs of the suite `hopper`, drawn on the device: caches shared between rows, index sets distinct.

As the peers were timed: q, kv ~ N(0, 1) bf16; distinct random indices per query, in random order; scale d^-0.5; fp8 caches
with power-of-two scales; in decode 64 requests own randomly permuted pages (of 64 rows where the pool is flat), in prefill all
queries share one pool. Lengths uniform in [k/2, k] with -1 beyond; sinks N(0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.rows import Row
from kgen.check import Inputs, pack
from kgen.check.scales import scale_range

FLAT_PAGE = 64
"""Rows of a flat pool that stay together when its requests' pages are permuted."""

_CHUNK = 1 << 27


@dataclass(frozen=True)
class Cache:
    """One cache, the pages [requests, pages] that each request owns, and the range of its group scales."""

    kv: Tensor
    page: int
    table: Tensor
    scales: tuple[float, float] | None

    @property
    def rows_each(self) -> int:
        return self.table.shape[1] * self.page


class Pools:
    """Caches by (layout, page, rows, requests, number), and index sets drawn from them; all of them are kept (about 6 GB)."""

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self.gen = torch.Generator(device=device)
        self.gen.manual_seed(seed)
        self._caches: dict[tuple[str, int, int, int, int], Cache] = {}
        self._drawn: dict[tuple[object, ...], tuple[Tensor, Tensor | None]] = {}

    def caches(self, row: Row) -> list[Cache]:
        """The cache of a row, or both."""
        spec = row.spec
        pages = [spec.page or 1, spec.extra_page] if spec.dual else [spec.page or 1]
        return [self._cache(spec.layout, page, row.pool_rows, row.requests, n) for n, page in enumerate(pages)]

    def _cache(self, layout: str, page: int, rows: int, requests: int, number: int) -> Cache:
        key = (layout, page, rows, requests, number)
        if key not in self._caches:
            make = _flat_cache if layout.startswith("bf16") else _paged_cache
            self._caches[key] = make(layout, page, rows, requests, self.gen)
        return self._caches[key]

    def draw(self, row: Row, number: int, sets: int) -> tuple[Tensor, Tensor | None]:
        """(slots int32 [sets, batch, s_q, topk], lengths int32 [sets, batch] or None) for one cache of a row.

        Rows that differ in heads alone get the same ones.
        """
        spec = row.spec
        topk = spec.extra_topk if number else spec.topk
        cache = self.caches(row)[number]
        key = (id(cache), topk, row.batch, row.s_q, sets, row.lengths)
        if key not in self._drawn:
            self._drawn[key] = _draw(cache, topk, row, sets, self.gen)
        return self._drawn[key]

    def inputs(self, row: Row, sets: int) -> list[Inputs]:
        """`sets` input sets of a row over its caches."""
        spec, device = row.spec, self.gen.device
        caches = self.caches(row)
        drawn = [_draw_shape(self.draw(row, number, sets), row) for number in range(len(caches))]
        lead = (row.batch, row.s_q) if row.s_q > 1 else (row.tokens,)
        made = []
        for at in range(sets):
            q = torch.randn(*lead, spec.heads, spec.d_qk, generator=self.gen, device=device).to(torch.bfloat16)
            sink = torch.randn(spec.heads, generator=self.gen, device=device) if row.sink else None
            parts = [(slots[at], None if lengths is None else lengths[at]) for slots, lengths in drawn]
            extra = parts[1] if spec.dual else (None, None)
            made.append(
                Inputs(
                    q,
                    caches[0].kv,
                    parts[0][0],
                    spec.d_qk**-0.5,
                    spec.kv.kv_layout,
                    parts[0][1],
                    sink,
                    caches[1].kv if spec.dual else None,
                    extra[0],
                    extra[1],
                )  # fmt: skip
            )
        return made

    def scale_range(self, row: Row) -> tuple[float, float] | None:
        """Least and largest group scale over all rows of the row's caches; None where there are none, or a NaN."""
        ranges = [cache.scales for cache in self.caches(row)]
        known = [pair for pair in ranges if pair is not None]
        if len(known) != len(ranges):
            return None
        return min(low for low, _ in known), max(high for _, high in known)


def _draw_shape(drawn: tuple[Tensor, Tensor | None], row: Row) -> tuple[Tensor, Tensor | None]:
    slots, lengths = drawn
    return (slots if row.s_q > 1 else slots[:, :, 0]), lengths


def _flat_cache(layout: str, page: int, rows: int, requests: int, gen: torch.Generator) -> Cache:
    d = int(layout.removeprefix("bf16_d"))
    kv = torch.empty(rows, d, dtype=torch.bfloat16, device=gen.device).normal_(generator=gen)
    page = FLAT_PAGE if requests > 1 else 1
    return Cache(kv, page, _table(rows // page, requests, gen), None)


def _paged_cache(layout: str, page: int, rows: int, requests: int, gen: torch.Generator) -> Cache:
    pages, d = rows // page, 576 if layout == "v32" else 512
    kv = pack.empty_cache(layout, page, pages, pack.page_bytes(layout, page), 0, 0, gen.device)
    step = max(1, _CHUNK // (page * d))
    for first in range(0, pages, step):
        values = torch.randn(min(step, pages - first) * page, d, generator=gen, device=gen.device)
        pack.write_rows(kv, layout, values, first_page=first)
    return Cache(kv, page, _table(pages, requests, gen), scale_range(kv, layout))


def _table(pages: int, requests: int, gen: torch.Generator) -> Tensor:
    """Pages of each request: in order for one request, permuted for several."""
    if requests == 1:
        return torch.arange(pages, device=gen.device)[None]
    each = pages // requests
    return torch.randperm(pages, generator=gen, device=gen.device)[: each * requests].view(requests, each)


def _draw(cache: Cache, topk: int, row: Row, sets: int, gen: torch.Generator) -> tuple[Tensor, Tensor | None]:
    queries, device = sets * row.tokens, gen.device
    requests, rows = cache.table.shape[0], cache.rows_each
    if topk > rows:
        raise ValueError(f"{row.name} draws {topk} distinct keys of a request that has {rows}")
    request = (torch.arange(sets * row.batch, device=device) % requests).repeat_interleave(row.s_q)
    slots = torch.empty(queries, topk, dtype=torch.int32, device=device)
    step = max(1, _CHUNK // rows)
    for first in range(0, queries, step):
        n = min(step, queries - first)
        # the ranks of random numbers: distinct, and in random order
        position = torch.rand(n, rows, generator=gen, device=device).topk(topk, dim=1).indices
        page = cache.table[request[first : first + n, None], position // cache.page]
        slots[first : first + n] = page * cache.page + position % cache.page
    if not row.lengths:
        return slots.view(sets, row.batch, row.s_q, topk), None
    lengths = torch.randint(topk // 2, topk + 1, (sets * row.batch,), generator=gen, device=device)
    beyond = torch.arange(topk, device=device)[None] >= lengths.repeat_interleave(row.s_q)[:, None]
    slots.masked_fill_(beyond, -1)
    return slots.view(sets, row.batch, row.s_q, topk), lengths.to(torch.int32).view(sets, row.batch)


def keys_of(inputs: Inputs) -> int:
    """Keys that all tokens of a call visit together."""
    total = 0
    for indices, lengths in (
        (inputs.indices, inputs.topk_length),
        (inputs.extra_indices, inputs.extra_topk_length),
    ):
        if indices is not None:
            total += indices.numel() if lengths is None else int(lengths.sum()) * inputs.s_q
    return total


# where a layout keeps the scales of a token: (offset of the first, bytes from token to token, bytes), per page size
