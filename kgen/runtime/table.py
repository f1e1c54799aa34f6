"""The dispatch table's types and the look-up: a pure function of (shape, table), the same on every rank.

A generated `table.py` is a literal tuple of `Entry`. Nothing here touches torch, a device or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The shape of one call, as the host sees it. Pages are tokens per page (0: flat rows or no extra cache).

    `fp16`: the caller states that every group scale lies in `families.FP16_SCALES`. `aligned`: tensors and strides allow
    copies of 16 bytes, and sm_scale is positive (see `families.Family`). `lse`: the call asks for lse, which no look-up asks, but
    one kernel has another form for it (`families.exact_sums`).
    """

    layout: str
    heads: int
    topk: int
    page: int
    tokens: int
    extra_topk: int = 0
    extra_page: int = 0
    fp16: bool = False
    aligned: bool = True
    lse: bool = False

    @property
    def dual(self) -> bool:
        return self.extra_topk > 0 or self.extra_page > 0


@dataclass(frozen=True)
class Config:
    """One compiled kernel's constants: a family's tunables as (name, value) pairs, and the launch options."""

    tunables: tuple[tuple[str, int | str | bool], ...]
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    def __getitem__(self, name: str) -> int | str | bool:
        for key, value in self.tunables:
            if key == name:
                return value
        raise KeyError(name)

    def get(self, name: str, default: int | str | bool) -> int | str | bool:
        return next((value for key, value in self.tunables if key == name), default)


def config(num_warps: int, num_stages: int, maxnreg: int | None = None, **tunables: int | str | bool) -> Config:
    """A Config as generated tables write it."""
    return Config(tuple(sorted(tunables.items())), num_warps, num_stages, maxnreg)


@dataclass(frozen=True)
class Provenance:
    """Where an entry comes from. source: "measured" (timed on `gpu`), "inherited" (the measured winner of a neighbouring
    bucket, of twice as many heads or of other page sizes) or "static" (ranked by the cost model, never timed)."""

    source: str
    device_class: str  # e.g. "h200"; "static" for static entries
    gpu: str = ""
    us: float | None = None  # median of the measured anchor, microseconds
    estimate_us: float | None = None
    roofline: float | None = None  # floor / measured, 0..1
    triton: str = ""
    anchor_tokens: int = 0  # token count that was measured or ranked
    considered: int = 0  # candidates compiled for it
    rejected: str = ""  # why the others fell, counted by kind


@dataclass(frozen=True)
class Entry:
    """One row of the table: the shapes it was made for (ranges inclusive), the module and constants that serve them.

    `page`/`extra_page` None: any page size. An entry can serve other shapes too, through the generic form of its kernel
    (run-time heads, topk and page); `select` says when that happens.
    """

    layout: str
    dual: bool
    heads: int
    topk: tuple[int, int]
    extra_topk: tuple[int, int]
    page: int | None
    extra_page: int | None
    tokens: tuple[int, int]  # inclusive bucket range, upper end of the last bucket is 2**31 - 1
    module: str  # e.g. "portable_v4", a sibling of the table
    config: Config
    provenance: Provenance
    tier: int = 0  # 0 is asked first; above: what serves the same shapes where the lower tiers cannot
