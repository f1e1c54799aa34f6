"""Which cases decide that the shipped kernels are right: the pairwise core, the peers' matrices, a few for sanitizers.

The core covers every feasible pair of values of `FACTORS`; the full matrix is the peers' own (FlashMLA @9241ae3,
FlashInfer's SM120 tests, FlagGems, DeepInfer). Everything is deterministic: the same slugs on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kgen.check import CaseSpec, core_edges
from kgen.check.edges import WILD_INDICES
from kgen.runtime.layouts import DUAL_LAYOUTS, LAYOUTS

CPU_KEYS = 3000
"""Key visits that a case may have in Triton's interpreter (decision 17)."""

FLAGS: dict[str, tuple[tuple[str, Any], ...]] = {
    "both": (("return_lse", True), ("return_max_logits", True)),
    "out": (),
    "lse": (("return_lse", True),),
    "max": (("return_max_logits", True),),
    "base2": (("lse_base", "2"), ("return_lse", True), ("return_max_logits", True)),
    "own": (("own_out", True), ("return_lse", True), ("return_max_logits", True)),  # no out= is passed
    "facade": (("facade", True), ("return_lse", True), ("return_max_logits", True)),  # through FlashMLA's interface
    "pad64": (("pad_heads", 64), ("return_lse", True), ("return_max_logits", True)),
    "pad128": (("pad_heads", 128), ("return_lse", True), ("return_max_logits", True)),
}
"""How a case is called, by name. pad_heads: called with so many heads as well, by the same entry: no bit may change."""

PAIRED_FLAGS = ("both", "out", "lse", "max", "base2", "own", "facade")

_FLAT = tuple(name for name, layout in LAYOUTS.items() if not layout.paged)
FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "dual": (None, (64, 64), (192, 2), (512, 61)),  # None, or (width, page) of the second cache
    "scale_rule": ("flashmla", "vllm", "sglang", "arbitrary", "odd_fp32", "ue8m0_extremes", "nan_scale"),
    "page": (0, 1, 2, 4, 53, 61, 64, 69, 128, 256, 576),  # 0: flat rows
    "heads": (1, 2, 4, 8, 11, 12, 16, 17, 24, 32, 64, 66, 96, 100, 128),
    "index": (
        *("clean", "random", "all_invalid", "some_empty", "leading", "trailing", "alternating", "single", "wild"),
        *("duplicates", "tail"),
    ),
    "sink": ("none", "zero", "normal", "near", "plus5", "minus5", "plus_inf", "minus_inf", "mixed"),
    "topk": (1, 17, 64, 192, 256, 512, 576, 1024, 2048),
    "lengths": ("none", "full", "random", "half", "one", "zero", "negative", "over"),
    "batch": (1, 4, 16, 40, 130, 700),  # tokens = batch * s_q
    "flags": PAIRED_FLAGS,
    "form": ("plain", "index_3d", "gap", "aligned"),
    "s_q": (1, 3),
}
"""Factors of the core in the order in which a row is filled; `feasible` says which values go together."""

_SCALES = {
    "v32": ("flashmla", "sglang", "arbitrary", "odd_fp32", "nan_scale"),
    **{layout: ("flashmla", "vllm", "sglang", "ue8m0_extremes", "nan_scale") for layout in DUAL_LAYOUTS},
}


@dataclass(frozen=True)
class VerifyCase:
    """One case: what is called (`spec`), how (`flags`: keywords of `sparse_mla`), and which suite counts it."""

    slug: str
    suite: str
    spec: CaseSpec
    flags: tuple[tuple[str, Any], ...] = FLAGS["both"]


def verify_case(suite: str, spec: CaseSpec, flags: str = "both") -> VerifyCase:
    """A case with its stable, readable name."""
    word = "" if flags == "both" else f"/{flags}"
    asked = FLAGS[flags]
    if flags == "facade" and spec.paged:  # FlashMLA's decode gives no max_logits
        asked = tuple(flag for flag in asked if flag[0] != "return_max_logits")
    return VerifyCase(f"{suite}/{spec.slug}{word}", suite, spec, asked)


def feasible(row: Mapping[str, Any]) -> bool:
    """Whether a (partial) row of factor values can be completed to a case."""
    if row.get("dual") is not None and row.get("scale_rule") == "ue8m0_extremes":
        return False  # its queries are sized for the scales of one cache
    if row.get("s_q") == 3 and row.get("form") == "index_3d":
        return False  # indices of 4-D queries are [b, s_q, topk]
    return any(_allows(layout, row) for layout in ([row["layout"]] if "layout" in row else LAYOUTS))


def _allows(layout: str, row: Mapping[str, Any]) -> bool:
    if "page" in row and (row["page"] == 0) != (layout in _FLAT):
        return False
    if row.get("dual") is not None and layout not in DUAL_LAYOUTS:
        return False
    return "scale_rule" not in row or row["scale_rule"] in _SCALES.get(layout, ("flashmla",))


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> Iterable[Pair]:
    """Every pair of (factor, value) in a row, in the order of FACTORS."""
    return itertools.combinations([(name, row[name]) for name in FACTORS if name in row], 2)


@lru_cache(maxsize=1)
def pairwise_rows() -> tuple[dict[str, Any], ...]:
    """Rows that together hold every feasible pair: each starts with a pair not yet covered and is filled greedily."""
    names = list(FACTORS)
    todo: dict[Pair, None] = {}
    for a, b in itertools.combinations(names, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            if feasible({a: x, b: y}):
                todo[((a, x), (b, y))] = None
    sizes = {name: len(values) for name, values in FACTORS.items()}
    # pairs of the largest factors first: they decide how many rows there must be
    order = sorted(todo, key=lambda pair: -sizes[pair[0][0]] * sizes[pair[1][0]])
    rows: list[dict[str, Any]] = []
    for seed in order:
        if seed in todo:
            row = _filled(dict(seed), todo, len(rows))
            for pair in pairs_of(row):
                todo.pop(pair, None)
            rows.append(row)
    return tuple(rows)


def _filled(row: dict[str, Any], todo: Mapping[Pair, None], turn: int) -> dict[str, Any]:
    position = {name: at for at, name in enumerate(FACTORS)}

    def gain(name: str, value: Any) -> int:
        new = (name, value)
        return sum(
            ((old, new) if position[old[0]] < position[name] else (new, old)) in todo for old in list(row.items())
        )

    for name, values in FACTORS.items():
        if name in row:
            continue
        shift = turn % len(values)  # ties go to another value in every row
        choices = [v for v in values[shift:] + values[:shift] if feasible({**row, name: v})]
        row[name] = max(choices, key=lambda value: gain(name, value))
    return row


def _spec_of(row: Mapping[str, Any], seed: int) -> CaseSpec:
    topk, dual, layout = row["topk"], row["dual"], row["layout"]
    extra_topk, extra_page = dual or (0, 0)
    wild = WILD_INDICES[seed % len(WILD_INDICES)]
    slots = 2 * topk + 300
    whole = -(-slots // max(row["page"], 1)) * max(row["page"], 1)
    at = {
        "leading": min(topk - 1, 130),
        "trailing": topk // 2,
        "alternating": 16 << seed % 4,
        "single": seed * 37 % topk,
    }
    return CaseSpec(
        layout=layout, heads=row["heads"], topk=topk, page=row["page"], slots=slots, tokens=row["batch"] * row["s_q"],
        s_q=row["s_q"], extra_topk=extra_topk, extra_page=extra_page, extra_slots=2 * extra_topk + 61 if dual else 0,
        sink=row["sink"], lengths=row["lengths"], index=row["index"],
        index_at=at.get(row["index"], seed * 53 % topk if row["index"] == "wild" else 0),
        index_value=-1 if row["index"] != "wild" else whole if wild is None else wild,
        scale_rule=row["scale_rule"], page_gap=64 if row["form"] == "gap" else 0,
        q_pad=row["form"] != "aligned", index_3d=row["form"] == "index_3d", seed=seed,
    )  # fmt: skip


def core_cases(device: str = "cuda") -> list[VerifyCase]:
    """The pairwise core, the edge cases and padded heads. `device="cpu"`: a sample, of at most CPU_KEYS visits each."""
    core = [verify_case("core", _spec_of(row, n), row["flags"]) for n, row in enumerate(pairwise_rows())]
    edges = [verify_case("edges", spec) for spec in core_edges()]
    if device != "cpu":
        return core + edges + padding_cases()
    small = [replace(case, spec=small_spec(case.spec)) for case in core[::5]]
    small = [replace(case, slug=f"{case.slug}/cpu-t{case.spec.tokens}") for case in small]
    return [case for case in small + edges[::4] + padding_cases()[::5] if case.spec.keys <= CPU_KEYS]


def padding_cases() -> list[VerifyCase]:
    """Decision 11: heads that an engine pads change no bit of the real ones, when the same entry serves both calls."""
    base = CaseSpec(topk=40, slots=300, tokens=2, sink="near")
    return [
        verify_case("padding", replace(base, layout=name, heads=heads, page=61 if layout.paged else 0), f"pad{to}")
        for name, layout in LAYOUTS.items()
        for heads, to in ((8, 64), (11, 64), (16, 128), (66, 128))
    ]


def small_spec(spec: CaseSpec) -> CaseSpec:
    """The same case with so few tokens that the interpreter is done in seconds (16 heads a key visit)."""
    per_token = (spec.topk + spec.extra_topk) * -(-spec.heads // 16)
    s_q = spec.s_q if per_token * spec.s_q <= CPU_KEYS else 1
    batch = max(1, min(spec.tokens // spec.s_q, 5, CPU_KEYS // (per_token * s_q)))
    return replace(spec, tokens=batch * s_q, s_q=s_q)


def sanitizer_cases(device: str = "cpu") -> list[VerifyCase]:
    """Small ones for compute-sanitizer: every layout, wild indices, odd pages, both caches, split keys; on a GPU also so many
    tokens and heads that each of the kernel families gets some, and persistent programs several items.

    Lengths "half" leave keys in every row whatever the device's generator draws; "negative" needs many rows for that.
    """
    base = CaseSpec(heads=11, topk=160, slots=300, tokens=3, sink="near", page=61, lengths="half")
    specs = [replace(base, layout=layout, page=61 if LAYOUTS[layout].paged else 0) for layout in LAYOUTS]
    dual = replace(base, extra_topk=70, extra_page=2, extra_slots=90, tokens=12, lengths="negative")
    specs += [replace(dual, layout=name) for name in DUAL_LAYOUTS]
    wide = replace(base, heads=128, topk=1024, tokens=1, lengths="none")
    specs += [replace(wide, layout="v32", page=1), replace(wide, layout="v4", page=64), replace(wide, page=0)]
    if device != "cpu":
        many = replace(base, heads=64, topk=700, tokens=150, page=64)
        specs += [replace(many, layout=name, page=64 if LAYOUTS[name].paged else 0) for name in LAYOUTS]
        specs += [replace(many, layout="v4", topk=128, extra_topk=512, extra_page=64, extra_slots=900, heads=32)]
        specs += [replace(many, layout="v32", topk=2048, heads=128, tokens=tokens) for tokens in (2, 16, 150)]
        specs += [replace(many, layout="v32", topk=2048, heads=64, tokens=16)]
        some = replace(many, layout="v4", topk=128, extra_topk=512, extra_page=64, extra_slots=900, page=256)
        specs += [replace(some, tokens=tokens) for tokens in (16, 24)]
    return [verify_case("sanitizer", spec) for spec in specs]


def cases_of(suite: str, device: str) -> list[VerifyCase]:
    """The cases of `core`, `full` or `sanitizer`."""
    if suite == "core":
        return core_cases(device)
    if suite == "sanitizer":
        return sanitizer_cases(device)
    if suite == "full":
        return full_cases()
    raise ValueError(f"no suite {suite!r}: core, full or sanitizer")


# ---------------------------------------------------------------------------------------------- the peers' matrices

_DECODE_SETS = ((512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61), (2046, 2048, 2),
                (2046, 2048, 64), (2046, 2048, 576), (1024, 512, 53))  # fmt: skip
"""FlashMLA's (keys of a request, topk, page); the last one is its corner with pages of 53."""


def full_cases() -> list[VerifyCase]:
    """Everything: the core, then the peers' matrices. Thousands of cases; run it with a file to resume from."""
    cases = core_cases() + _flash_mla_prefill() + _flash_mla_decode() + _flash_infer() + _flag_gems() + _deep_infer()
    return list({case.slug: case for case in cases}.values())


FLASH_MLA_VALUES = 0.05
"""value_scale of FlashMLA's shapes and of FlagGems' bf16 ones: with our groups of magnitude 0.5, 1 and 2, rows are as large as
FlashMLA's randn/10, which is what its absolute bounds of 8e-4 and 1e-3 are made for. P is rounded to bf16, so that two dominant
keys that cancel leave an error of up to 2^-9 (|v1| + |v2|) / 2: at 0.1 that reaches 1.9e-3 for the largest of 30 million
values, at 0.05 half of it (tests/verify/test_cases.py). Seen on an H200 at 0.1: one element of 14 million needs 8.8e-4 in
prefill, one of 30 million 1.9e-3 in decode, one of 34 million 8.1e-4 in FlagGems' shapes. Of the last, one of 16 draws needs
8.3e-4 even with P rounded under the final maximum and all else in float64. FlashInfer's shapes stay at 0.1: there an exact
maximum passes, and kernels without one do not."""


def _flash_mla_prefill() -> list[VerifyCase]:
    shapes = ((128, 128), (256, 256), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128),
              (153, 256), (114, 384))  # fmt: skip
    specs = [
        CaseSpec(layout=layout, heads=heads, topk=topk, slots=slots, tokens=s_q, sink=sink, lengths=lengths)
        for layout in _FLAT
        for heads in (128, 64)
        for slots, topk in shapes
        for s_q in (1, 62, 213)
        for sink in ("none", "normal")
        for lengths in ("none", "random")
    ]
    invalid = ((1, 128, 128), (1, 256, 256), (1234, 4321, 4096), (4096, 2048, 2048))
    wide = ((1, 32, 2048), (1024, 32, 2048), (1, 64, 8192), (1024, 64, 8192), (70000, 4096, 256))
    for layout in _FLAT:
        base = CaseSpec(layout=layout, heads=64, lengths="none")
        specs += [
            replace(base, tokens=t, slots=s, topk=k, index="all_invalid", heads=h, sink=sink)
            for t, s, k in invalid
            for h, sink in ((64, "none"), (128, "normal"))
        ]
        specs += [replace(base, tokens=t, slots=s, topk=k) for t, s, k in wide]
    return [verify_case("flashmla_prefill", replace(spec, value_scale=FLASH_MLA_VALUES)) for spec in specs]


def _flash_mla_decode() -> list[VerifyCase]:
    specs: list[CaseSpec] = []
    for batch, s_q, (keys, topk, page) in itertools.product((4, 74, 321), (1, 3), _DECODE_SETS):
        base = CaseSpec(topk=topk, page=page, slots=keys * min(batch, 4), tokens=batch * s_q, s_q=s_q, index="random")
        forms = list(itertools.product((64, 128), ("none", "normal"), ("none", "random")))
        specs += [replace(base, layout="v32", heads=h, sink=sink, lengths=n) for h, sink, n in forms]
        for extra in (None, *_DECODE_SETS):
            second: dict[str, Any] = {}
            if extra is not None:
                second = {"extra_slots": extra[0] * min(batch, 4), "extra_topk": extra[1], "extra_page": extra[2]}
            specs += [replace(base, layout="v4", heads=h, sink=s, lengths=n, **second) for h, s, n in forms]
            if batch == 4:
                specs += [
                    replace(base, layout=layout, heads=64, sink="normal", lengths=n, **second)
                    for layout in ("v41_footer", "v41_inline")
                    for n in ("none", "random")
                ]
    for layout, page, kind in itertools.product(("v32", *DUAL_LAYOUTS), (61, 53), ("zero", "all_invalid", "negative")):
        lengths, index = ("none", kind) if kind == "all_invalid" else (kind, "random")
        for heads in (64, 128):
            specs.append(
                CaseSpec(
                    layout=layout, heads=heads, page=page, topk=512, slots=2000, tokens=74, lengths=lengths, index=index
                )
            )
    specs += [  # V4.1's own set: four positions of a request, 128 of the window and 512 or 2048 compressed keys
        CaseSpec(layout=layout, heads=heads, topk=128, page=256, slots=4096, tokens=4 * batch, s_q=4,
                 extra_topk=extra, extra_page=64, extra_slots=4 * extra)
        for layout in ("v41_footer", "v41_inline")
        for heads in (64, 128)
        for extra in (512, 2048)
        for batch in (64, 128, 256)
    ]  # fmt: skip
    return [verify_case("flashmla_decode", replace(spec, value_scale=FLASH_MLA_VALUES)) for spec in specs]


def _flash_infer() -> list[VerifyCase]:
    """SM120 tests: a pool of 64 pages of 64 tokens."""
    pool: dict[str, Any] = {"page": 64, "slots": 4096}
    heads = (8, 16, 32, 64, 128)
    specs = [
        CaseSpec(layout="v4", heads=h, topk=topk, tokens=t, sink=sink, lengths="none", **pool)
        for h in heads
        for topk in (128, 192, 256, 512, 1024)
        for t in (1, 16, 64, 65, 128, 256)
        for sink in ("none", "normal")
    ]
    specs += [
        CaseSpec(layout="v4", heads=h, topk=topk, tokens=16, lengths="half", **pool)
        for h in heads
        for topk in (192, 256, 512)
    ]
    extras = ((128, 64), (512, 64), (512, 2), (1024, 2), (1664, 2), (1024, 64))
    specs += [
        CaseSpec(layout="v4", heads=h, topk=128, tokens=t, extra_topk=k, extra_page=p, extra_slots=4096, **pool)
        for h in heads
        for k, p in extras
        for t in (1, 16, 128)
    ]
    specs += [
        CaseSpec(layout="v32", heads=h, topk=2048, tokens=t, lengths="none", scale_rule=rule, **pool)
        for h in heads
        for t in (1, 16, 64, 128, 256)
        for rule in ("flashmla", "arbitrary")
    ]
    return [verify_case("flashinfer", spec) for spec in specs]


def _flag_gems() -> list[VerifyCase]:
    specs = [
        CaseSpec(layout="bf16_d576", heads=h, topk=topk, slots=slots, tokens=s_q, lengths="none", sink="none",
                 value_scale=FLASH_MLA_VALUES)
        for s_q in (64, 128, 512)
        for slots in (1024, 2048, 4096)
        for h in (64, 128)
        for topk in (128, 256)
    ]  # fmt: skip
    specs += [CaseSpec(layout="v32", heads=64, topk=k, page=64, slots=4096, tokens=2) for k in (50, 64, 100, 128)]
    specs += [
        CaseSpec(layout="v4", heads=h, topk=128, page=64, slots=2048, tokens=2, extra_topk=k, extra_page=2,
                 extra_slots=2048)
        for h in (64, 128)
        for k in (12, 260, 512)
    ]  # fmt: skip
    return [verify_case("flaggems", spec) for spec in specs]


def _deep_infer() -> list[VerifyCase]:
    """DeepInfer's seven shapes, 64 heads of 512 dims; its rule of two bf16 units holds there as well."""
    base = CaseSpec(
        layout="bf16_d512", heads=64, topk=512, slots=2048, tokens=64, lengths="none", sink="none", index="clean"
    )
    specs = (
        base,
        replace(base, index="duplicates"),
        replace(base, tokens=1, slots=4096),
        replace(base, tokens=7),
        replace(base, tokens=16, slots=128),
        replace(base, lengths="random"),
        replace(base, sink="normal"),
    )
    return [verify_case("deepinfer", spec) for spec in specs]
