"""Which of several processes runs which case: a kernel's cases stay together, so that one process compiles it.

Compiling takes longer than most kernels have cases for, so that with cases dealt in turns every process compiles every
kernel. Each process computes the whole partition by itself: it is a pure function of the cases, the emitted package and
the target, without files, clocks, hashes or the order of sets.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kgen.check import CaseSpec
from kgen.runtime.layouts import LAYOUTS
from kgen.runtime.table import Shape
from kgen.verify_cases import VerifyCase
from kgen.verify_forms import STATED

MOST_CASES = 120
"""Cases of one kernel that stay in one shard; of a kernel with more, each shard that takes a piece compiles it again."""

SUITES = (
    "core",
    "edges",
    "padding",
    "hopper",
    "deepinfer",
    "flaggems",
    "flashinfer",
    "flashmla_prefill",
    "no_lse",
    "flashmla_decode",
)
"""Order of a shard: the suites that ask different things of a kernel first, FlashMLA's long matrices last."""

# Seconds on an H200 that 13 processes share, from the 4,761 cases of its full run of 2026-11-30: the slowest case of a
# kernel took 2 to 5 s (plain Triton) or 4 to 7 s (Gluon), all others 0.19 s and the time of the reference.
_COMPILE_S, _COMPILE_GLUON_S = 3.0, 6.0
_CASE_S, _REFERENCE_S = 0.19, 0.8
_REFERENCE_KEYS = 1 << 19  # tokens * keys that the reference takes at most (`kgen.verify.sampled_rows`)
_VISIT_S, _INTERPRETED_S = 3e-4, 0.2  # Triton's interpreter: a key of 16 heads (decision 17), and the rest of a case

_OTHER_PAGE = 1 << 30
"""Stands for the page sizes that no entry was made for: the look-up treats them all alike."""


@dataclass(frozen=True)
class KernelForm:
    """One compiled kernel: an emitted module with its constants and launch options, as text."""

    module: str
    constants: str
    gluon: bool

    @property
    def compile_s(self) -> float:
        """About how long a process takes to compile it."""
        return _COMPILE_GLUON_S if self.gluon else _COMPILE_S


def shard_of(
    cases: Sequence[VerifyCase], part: int, parts: int, kernels: Sequence[KernelForm | None]
) -> list[VerifyCase]:
    """The cases of shard `part` (0 <= part < parts), in the order in which to run them; `kernels`: what serves each case.

    Shards are disjoint and together hold every case. Order: `SUITES`, in a suite the kernel with the most cases first and
    its cases one after another, so that a budget that runs out leaves few suites and kernels unseen.
    """
    chosen = [at for at, shard in enumerate(assign(cases, kernels, parts)) if shard == part]
    size: dict[KernelForm, int] = {}
    first: dict[KernelForm, int] = {}
    for at, kernel in enumerate(kernels):
        if kernel is not None:
            size[kernel] = size.get(kernel, 0) + 1
            first.setdefault(kernel, at)

    def place(at: int) -> tuple[int, int, int, int]:
        suite, kernel = cases[at].suite, kernels[at]
        late = SUITES.index(suite) if suite in SUITES else len(SUITES)
        return (late, 0, at, at) if kernel is None else (late, -size[kernel], first[kernel], at)

    return [cases[at] for at in sorted(chosen, key=place)]


def assign(cases: Sequence[VerifyCase], kernels: Sequence[KernelForm | None], parts: int) -> list[int]:
    """The shard of every case: the dearest piece first, each to the shard that has the least. A piece is up to
    MOST_CASES cases of one kernel, or one case whose kernel is not known."""
    groups: dict[KernelForm | int, list[int]] = {}
    for at, kernel in enumerate(kernels):
        groups.setdefault(at if kernel is None else kernel, []).append(at)
    seconds = [case_seconds(case.spec, interpreted=kernel is None) for case, kernel in zip(cases, kernels, strict=True)]
    pieces: list[tuple[float, list[int]]] = []
    for members in groups.values():
        count = min(parts, -(-len(members) // MOST_CASES))
        served = kernels[members[0]]
        compile_s = 0.0 if served is None else served.compile_s
        for start in range(count):
            piece = members[start::count]
            pieces.append((compile_s + sum(seconds[at] for at in piece), piece))
    pieces.sort(key=lambda piece: (-piece[0], piece[1][0]))
    load, shards = [0.0] * parts, [0] * len(cases)
    for piece_s, piece in pieces:
        shard = load.index(min(load))
        load[shard] += piece_s
        for at in piece:
            shards[at] = shard
    return shards


def case_seconds(spec: CaseSpec, interpreted: bool = False) -> float:
    """About how long a case takes without compiling: on a GPU its launches and the reference, else the interpreter."""
    keys = spec.topk + spec.extra_topk
    if interpreted:
        return _INTERPRETED_S + _VISIT_S * spec.tokens * keys * -(-spec.heads // 16)
    return _CASE_S + _REFERENCE_S * spec.heads / 128 * min(spec.tokens * keys, _REFERENCE_KEYS) / _REFERENCE_KEYS


# ---------------------------------------------------------------------------------------------- which kernel serves


def kernels_here(cases: Sequence[VerifyCase], package: str, device: str) -> list[KernelForm | None]:
    """`kernels_of` for the GPU of this process; nothing is compiled, so nothing known, in Triton's interpreter."""
    if device == "cpu":
        return [None] * len(cases)
    target = importlib.import_module(f"{package}.target").default_target()
    return kernels_of(cases, package, target.arch, target.device_class)


def kernels_of(
    cases: Sequence[VerifyCase], package: str, arch: str, device_class: str | None
) -> list[KernelForm | None]:
    """The attention kernel that an emitted package launches for each case on a target; None where it refuses the shape.

    A case whose inputs turn out otherwise than its spec says (a scale range that no row states) meets another kernel: that
    costs a compilation and changes no result.
    """
    known: dict[tuple[Shape, bool], KernelForm | None] = {}
    found: list[KernelForm | None] = []
    for case in cases:
        key = (shape_of(case), "pad_heads" in dict(case.flags))
        if key not in known:
            known[key] = _kernel_of(*key, package, arch, device_class)
        found.append(known[key])
    return found


def shape_of(case: VerifyCase) -> Shape:
    """The look-up's key of the call that a case makes."""
    spec, layout = case.spec, LAYOUTS[case.spec.layout]
    nothing_selected = spec.index == "all_invalid" or spec.lengths == "zero" or spec.tokens == 0
    no_range = nothing_selected or spec.scale_rule in ("nan_scale", "ue8m0_extremes")
    return Shape(
        layout=spec.layout,
        heads=spec.heads,
        topk=spec.topk,
        page=spec.main_page if layout.paged else 0,
        tokens=spec.tokens,
        extra_topk=spec.extra_topk,
        extra_page=spec.extra_page if spec.extra_topk else 0,
        fp16=STATED in case.flags and not no_range,
        aligned=_aligned(spec),
        lse=bool(dict(case.flags).get("return_lse")),
    )


def _aligned(spec: CaseSpec) -> bool:
    """Whether q and the caches allow copies of 16 bytes. One head of a wider buffer does: two rows of it are 16-fold."""
    layout = LAYOUTS[spec.layout]
    sides = [(spec.slots, spec.main_page)] + ([(spec.extra_slots, spec.extra_page)] if spec.extra_topk else [])
    strides = [layout.page_bytes(page) + spec.page_gap for slots, page in sides if slots > page]
    return (not spec.q_pad or spec.heads == 1) and not any(stride % 16 for stride in strides)


def _kernel_of(shape: Shape, padded: bool, package: str, arch: str, device_class: str | None) -> KernelForm | None:
    try:
        entry, exact = _choice(_stretch_of(replace(shape, lse=False), package, arch), package, arch, device_class)
        # heads that are padded and those that are not are compared in the generic form of one entry
        plan = importlib.import_module(f"{package}.launch").make_plan(shape, entry, exact and not padded)
        constants = repr((sorted(plan.constants.items()), sorted(plan.options.items())))
        return KernelForm(entry.module, constants, bool(plan.family.gluon))
    except Exception:  # whatever an emitted package raises: the case runs all the same, and says why
        return None


@lru_cache(maxsize=65536)
def _choice(shape: Shape, package: str, arch: str, device_class: str | None) -> tuple[Any, bool]:
    """(entry, exact) of the look-up. It is asked of a part of the table, which takes a quarter of the time; of the whole one
    where it leaves modules out, as those that are not valid for the installed Triton."""
    lookup, select = (importlib.import_module(f"{package}.{name}") for name in ("lookup", "select"))
    entries = _first(package, arch, device_class, (shape.layout, shape.fp16, shape.aligned, shape.dual))
    choice = select.select(entries, shape, device_class)
    module = "" if choice is None else choice.entry.module
    known = (package, arch, device_class, module)
    if known not in _taken:
        _taken[known] = module == lookup.choose(arch, device_class, shape).entry.module
    if not _taken[known]:
        choice = lookup.choose(arch, device_class, shape)
    return choice.entry, choice.exact


_taken: dict[tuple[str, str, str | None, str], bool] = {}
"""Whether the look-up takes a module (package, arch, device class, module): it leaves one out for all shapes or for none."""


@lru_cache(maxsize=256)
def _first(package: str, arch: str, device_class: str | None, form: tuple[str, bool, bool, bool]) -> list[Any]:
    """The entries of a table, in its order, that can serve calls of a form (layout, fp16, aligned, dual) and that the look-up
    puts first: it decides by where an entry comes from and by its caches before it looks at any number."""
    layout, fp16, aligned, dual = form
    # the most heads: an entry that needs many is in the list, and `select` leaves it out for few
    some = Shape(layout=layout, heads=128, topk=1, page=1, tokens=1, fp16=fp16, aligned=aligned)
    cannot_serve = importlib.import_module(f"{package}.select").cannot_serve
    table = importlib.import_module(f"{package}.target").load_table(arch)
    able = [entry for entry in table.entries if cannot_serve(entry, some) is None]

    def step(entry: Any) -> tuple[int, bool]:
        made = entry.provenance
        return (2 if made.source == "static" else int(made.device_class != device_class)), entry.dual != dual

    best = min(map(step, able), default=None)
    return [entry for entry in able if step(entry) == best]


def _stretch_of(shape: Shape, package: str, arch: str) -> Shape:
    """A shape that the look-up answers alike. Entries are compared by how far their ranges are from the shape's values: where
    no range begins or ends, all distances change by as much, and so their order stays."""
    tokens, topk, extra_topk, pages, extra_pages = _ends(package, arch, shape.layout)
    extra_page = shape.extra_page if shape.extra_page in extra_pages else _OTHER_PAGE
    return replace(
        shape,
        tokens=_begin(tokens, max(shape.tokens, 1)),
        topk=_begin(topk, shape.topk),
        extra_topk=_begin(extra_topk, shape.extra_topk),
        page=shape.page if shape.page in pages else _OTHER_PAGE,
        extra_page=extra_page if shape.extra_page else 0,
    )


def _begin(ends: Sequence[int], value: int) -> int:
    """The first value of the stretch that `value` is in."""
    at = bisect_right(ends, value)
    return ends[at - 1] if at else value


@lru_cache(maxsize=64)
def _ends(package: str, arch: str, layout: str) -> tuple[list[int], list[int], list[int], set[int], set[int]]:
    """Where stretches of tokens, topk and extra topk begin in a table, and the page sizes that entries were made for."""
    table = importlib.import_module(f"{package}.target").load_table(arch)
    entries = [entry for entry in table.entries if entry.layout == layout]

    def ends(name: str) -> list[int]:
        ranges = [getattr(entry, name) for entry in entries]
        return sorted({1} | {low for low, _ in ranges} | {high + 1 for _, high in ranges})

    return (
        ends("tokens"),
        ends("topk"),
        ends("extra_topk"),
        {entry.page for entry in entries},
        {entry.extra_page for entry in entries},
    )
