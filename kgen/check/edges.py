"""Named edge cases: the public bug reports of cases.md as lists of `CaseSpec`, small enough for the interpreter.

A case visits at most 3,000 keys (decision 17). Block edges are those of BLOCK_K 16, 32, 64 and 128.
"""

from __future__ import annotations

from dataclasses import replace

from kgen.runtime.layouts import DUAL_LAYOUTS, LAYOUTS

from .inputs import CaseSpec

WILD_INDICES: tuple[int | None, ...] = (-2147483648, -123456, -1, None, 114514, 1919810, 2147480000, 2147483647)
"""FlashMLA's index values that used to break kernels (B04); None stands for the number of slots."""

ODD_PAGES = (1, 2, 4, 53, 61, 64, 69, 128, 256, 576)
BLOCKS = (16, 32, 64, 128)

_ALL = tuple(LAYOUTS)
_FP8 = tuple(name for name, layout in LAYOUTS.items() if layout.fp8)
_FEW = CaseSpec(heads=4, topk=160, slots=300, tokens=3, sink="normal", lengths="none")


def _masked_blocks() -> tuple[CaseSpec, ...]:
    cases = [replace(_FEW, index="leading", index_at=b) for b in (*BLOCKS, 159)]
    cases += [replace(_FEW, index="alternating", index_at=b) for b in BLOCKS]
    singles = sorted({0, 159, *(b - 1 for b in BLOCKS), *BLOCKS})
    cases += [replace(_FEW, index="single", index_at=at) for at in singles]
    cases += [replace(_FEW, index="trailing", index_at=at) for at in (1, 100)]
    return tuple(cases)


def _empty_and_guarded() -> tuple[CaseSpec, ...]:
    kinds = ("all_invalid", "some_empty", "random")
    cases = [replace(_FEW, layout=layout, index=kind, topk=64, heads=8) for layout in _ALL for kind in kinds]
    cases += [
        replace(_FEW, layout=layout, index="clean", lengths=kind, topk=64)
        for layout in _ALL
        for kind in ("zero", "negative")
    ]
    cases += [replace(_FEW, index="all_invalid", sink=sink, topk=32) for sink in ("none", "plus_inf", "minus_inf")]
    return tuple(cases)


def _pages() -> tuple[CaseSpec, ...]:
    layouts = _FP8
    base = replace(_FEW, topk=48, heads=8, tokens=4, index="random", lengths="random")
    return tuple(
        replace(base, layout=layouts[(i + shift) % len(layouts)], page=page, slots=2 * page + 13)
        for i, page in enumerate(ODD_PAGES)
        for shift in (0, 1)
    )


def _wild_values() -> tuple[CaseSpec, ...]:
    base = replace(_FEW, index="wild", topk=160, tokens=2)
    cases = []
    for value in WILD_INDICES:
        for at in (0, 80, 159):
            cases.append(replace(base, index_at=at, index_value=300 if value is None else value))
    cases += [replace(base, layout=layout, index="random", tokens=4, topk=128) for layout in _ALL]
    return tuple(cases)


def _heads() -> tuple[CaseSpec, ...]:
    heads = (1, 2, 4, 8, 11, 12, 16, 17, 24, 64, 66, 96, 100, 128)
    return tuple(
        replace(_FEW, heads=h, topk=40, tokens=3, layout=_ALL[i % len(_ALL)], index="random")
        for i, h in enumerate(heads)
    )


def _sinks() -> tuple[CaseSpec, ...]:
    kinds = ("none", "zero", "near", "plus5", "minus5", "plus_inf", "minus_inf", "mixed")
    return tuple(
        replace(_FEW, layout=layout, heads=8, topk=topk, sink=kind, index="random")
        for kind in kinds
        for layout, topk in (("bf16_d512", 5), ("v4", 20))
    )


def _widths() -> tuple[CaseSpec, ...]:
    return tuple(
        replace(_FEW, layout=layout, topk=topk, tokens=5, heads=8, index="random", lengths=lengths)
        for layout, topk in (
            ("bf16_d576", 1),
            ("v32", 3),
            ("v4", 63),
            ("v4", 192),
            ("v32", 256),
            ("bf16_d512", 250),
            ("v41_inline", 65),
        )
        for lengths in ("none", "random")
    )


def _wider_than_cache() -> tuple[CaseSpec, ...]:
    base = replace(_FEW, index="tail", topk=1024, slots=256, tokens=2)
    return (
        base,
        replace(base, layout="v4", page=64),
        replace(base, index="random", lengths="random", topk=512, slots=32),
        replace(base, layout="v32", index="duplicates", topk=512, slots=32, page=2),
    )


def _strides() -> tuple[CaseSpec, ...]:
    base = replace(_FEW, heads=8, topk=48, tokens=4, index="random", lengths="random", slots=200)
    cases = [
        replace(base, layout=layout, page=page, page_gap=gap)
        for layout in _FP8
        for page, gap in ((64, 1152), (2, 4608), (61, 64))
    ]
    # pages without padding: V4 with an odd token count is then only 8-byte aligned (decision 13)
    unpadded = (("v4", 61, 35624 - 35712), ("v4", 1, 584 - 1152), ("v4", 2, 1168 - 1728), ("v41_footer", 1, 528 - 1024))
    cases += [replace(base, layout=layout, page=page, page_gap=gap) for layout, page, gap in unpadded]
    cases += [replace(base, layout=name, page_gap=64) for name in ("bf16_d512", "bf16_d576")]
    cases += [_dual(layout, page_gap=2304) for layout in DUAL_LAYOUTS]
    return tuple(cases)


def _scales() -> tuple[CaseSpec, ...]:
    base = replace(_FEW, heads=8, topk=48, tokens=3, index="random")
    cases = [replace(base, layout="v32", scale_rule=rule) for rule in ("flashmla", "arbitrary", "sglang", "odd_fp32")]
    cases += [replace(base, layout=layout, scale_rule="ue8m0_extremes") for layout in DUAL_LAYOUTS]
    cases += [replace(base, layout=layout, scale_rule=rule) for layout in DUAL_LAYOUTS for rule in ("vllm", "sglang")]
    cases += [replace(base, layout=layout, scale_rule="nan_scale", tokens=4) for layout in ("v4", "v41_footer", "v32")]
    return tuple(cases)


def _merges() -> tuple[CaseSpec, ...]:
    base = replace(_FEW, heads=8, topk=96, tokens=4, index="random", sink="near")
    return tuple(replace(base, layout=layout) for layout in _ALL) + tuple(_dual(layout) for layout in DUAL_LAYOUTS)


def _dual(layout: str, **changes: object) -> CaseSpec:
    base = CaseSpec(
        layout=layout,
        heads=8,
        topk=48,
        page=64,
        slots=200,
        tokens=4,
        s_q=2,
        extra_topk=70,
        extra_page=2,
        extra_slots=90,
        sink="near",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def _queries_and_layouts() -> tuple[CaseSpec, ...]:
    cases = [CaseSpec(layout=layout, tokens=6, s_q=3, topk=64, heads=16) for layout in _ALL]
    cases += [CaseSpec(layout=layout, tokens=4, topk=33, index_3d=True, lengths="over") for layout in _ALL]
    cases += [CaseSpec(layout="bf16_d576", tokens=0), CaseSpec(layout="v4", tokens=0)]
    cases += [
        _dual(layout, extra_page=page, lengths=kind)
        for layout in DUAL_LAYOUTS
        for page, kind in ((64, "half"), (61, "negative"))
    ]
    return tuple(cases)


EDGE_CASES: dict[str, tuple[CaseSpec, ...]] = {
    "B01": _masked_blocks(),
    "B02": _empty_and_guarded(),
    "B03": _pages(),
    "B04": _wild_values(),
    "B06": _heads(),
    "B07": tuple(replace(_FEW, heads=h, topk=32, layout=layout) for h in (1, 2, 4, 8) for layout in _ALL),
    "B10": _sinks(),
    "B12": _widths(),
    "B19": _wider_than_cache(),
    "B22": tuple(
        replace(_FEW, heads=h, topk=64, layout=layout) for h in (8, 11, 16, 32) for layout in ("bf16_d576", "v4", "v32")
    ),
    "B26": _strides(),
    "B30": _scales(),
    "B31": _merges(),
    "calls": _queries_and_layouts(),
}
"""Cases by the report of cases.md that they come from; "calls" has the shapes a call may take."""


def core_edges() -> tuple[CaseSpec, ...]:
    """Every edge case once, in a stable order."""
    return tuple(dict.fromkeys(spec for cases in EDGE_CASES.values() for spec in cases))
