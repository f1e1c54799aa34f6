"""Shares of the matrix by kernel: a disjoint cover, each kernel in one share, balanced, the same in every process."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from kgen import verify_shards
from kgen.check import CaseSpec, make_case
from kgen.check.scales import selected_range
from kgen.verify_cases import VerifyCase, verify_case
from kgen.verify_child import shard as parsed_shard
from kgen.verify_forms import STATED, asking_most, formed_cases
from kgen.verify_shards import (
    MOST_CASES,
    SUITES,
    KernelForm,
    _choice,
    assign,
    case_seconds,
    kernels_here,
    kernels_of,
    shape_of,
    shard_of,
)

Matrix = tuple[list[VerifyCase], list[KernelForm | None]]
LOOKUPS = 2_500
"""Of the 7,999 cases of the full run, each look-up takes 1 to 3 ms."""


@pytest.fixture(scope="module")
def full() -> Matrix:
    """The full run on an H200, as each of its processes sees it."""
    cases = formed_cases("full", "cuda")
    _choice.cache_clear()
    kernels = kernels_of(cases, "generated", "sm90", "h200")
    assert _choice.cache_info().misses < LOOKUPS
    return cases, kernels


def shards_of(matrix: Matrix, parts: int) -> list[list[VerifyCase]]:
    return [shard_of(matrix[0], part, parts, matrix[1]) for part in range(parts)]


def kernel_by_slug(matrix: Matrix) -> dict[str, KernelForm | None]:
    return {case.slug: kernel for case, kernel in zip(*matrix, strict=True)}


@pytest.mark.parametrize("parts", range(1, 18))
def test_shards_are_a_disjoint_cover(full: Matrix, parts: int) -> None:
    cases = full[0][:: 1 if parts in (1, 13) else 7]
    matrix = cases, full[1][:: 1 if parts in (1, 13) else 7]
    slugs = [case.slug for part in shards_of(matrix, parts) for case in part]
    assert sorted(slugs) == sorted(case.slug for case in cases)


@pytest.mark.parametrize("parts", [2, 13, 17])
def test_a_kernel_is_compiled_by_one_process(full: Matrix, parts: int) -> None:
    assert None not in full[1] and len(set(full[1])) > 100
    count = Counter(full[1])
    places = defaultdict(set)
    for kernel, shard in zip(full[1], assign(*full, parts), strict=True):
        places[kernel].add(shard)
    assert all(len(places[kernel]) == 1 for kernel in count if count[kernel] <= 120)
    large = [kernel for kernel in count if count[kernel] > 120]
    assert large and all(1 <= len(places[kernel]) <= -(-count[kernel] // 120) for kernel in large)
    if parts == 13:  # pieces of one kernel go apart: the largest has several times 120 cases
        assert max(len(places[kernel]) for kernel in large) >= 5


def test_shards_take_about_as_long(full: Matrix) -> None:
    """By the estimate no shard of 13 takes 5 % more than the mean; cases dealt in turns would compile several times as much."""
    cases, kernels = full
    turns = [at % 13 for at in range(len(cases))]

    def loads(shards: list[int]) -> tuple[list[float], int]:
        work, compiled = [0.0] * 13, [set() for _ in range(13)]  # type: ignore[var-annotated]
        for case, kernel, shard in zip(cases, kernels, shards, strict=True):
            work[shard] += case_seconds(case.spec)
            compiled[shard].add(kernel)
        seconds = [work[n] + sum(kernel.compile_s for kernel in compiled[n]) for n in range(13)]
        return seconds, sum(map(len, compiled))

    ours, compiled = loads(assign(cases, kernels, 13))
    dealt, compiled_in_turns = loads(turns)
    assert max(ours) < 1.05 * sum(ours) / 13
    assert compiled < 1.4 * len(set(kernels)) and compiled_in_turns > 4 * compiled
    assert max(ours) < 0.6 * max(dealt)


def test_estimates_grow_with_the_reference() -> None:
    """Seconds seen on the H200: 0.19 for a small case, about 1 where the reference takes its 2^26 points."""
    small, wide = CaseSpec(heads=16, topk=64, tokens=1), CaseSpec(heads=128, topk=2048, tokens=4096)
    assert case_seconds(small) == pytest.approx(0.19, abs=0.01)
    assert case_seconds(wide) == pytest.approx(0.99) == case_seconds(replace(wide, tokens=8192))
    assert case_seconds(replace(wide, heads=64)) == pytest.approx(0.59)
    assert case_seconds(CaseSpec(heads=32, topk=1000, tokens=3), interpreted=True) == pytest.approx(
        0.2 + 3000 * 2 * 3e-4
    )


_DIGEST = """
import hashlib
from kgen.verify_forms import formed_cases
from kgen.verify_shards import kernels_of, shard_of
cases = formed_cases("full", "cuda")[::12]
kernels = kernels_of(cases, "generated", "sm90", "h200")
shards = [[case.slug for case in shard_of(cases, part, 5, kernels)] for part in range(5)]
print(hashlib.sha256(repr(shards).encode()).hexdigest())
"""


def test_every_process_computes_the_same_partition() -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _DIGEST],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        )
        for seed in ("0", "4711")
    ]
    digests = [child.communicate()[0].strip() for child in children]
    assert len(digests[0]) == 64 and digests[0] == digests[1]


@pytest.mark.parametrize(("arch", "device_class"), [("sm90", "h200"), ("sm90", "h20"), ("sm120", None)])
def test_the_kernel_is_the_one_that_is_launched(full: Matrix, arch: str, device_class: str | None) -> None:
    """The look-up itself, asked for each shape as it is: what stands for a stretch of shapes is answered alike."""
    lookup, launch = importlib.import_module("generated.lookup"), importlib.import_module("generated.launch")
    some = random.Random(3).sample(range(len(full[0])), 250)
    cases = [full[0][at] for at in some]
    kernels = kernels_of(cases, "generated", arch, device_class)
    assert (kernels == [full[1][at] for at in some]) == (arch == "sm90")
    for case, kernel in zip(cases, kernels, strict=True):
        choice = lookup.choose(arch, device_class, shape_of(case))
        plan = launch.make_plan(shape_of(case), choice.entry, choice.exact and "pad_heads" not in dict(case.flags))
        text = repr((sorted(plan.constants.items()), sorted(plan.options.items())))
        assert kernel is not None and (kernel.module, kernel.constants) == (choice.entry.module, text), case.slug
        assert kernel.gluon == kernel.module.startswith("sm90_")


_V4 = CaseSpec(layout="v4", heads=8, topk=20, slots=80, tokens=2, lengths="full", index="clean", q_pad=False)


@pytest.mark.parametrize(
    "spec",
    [
        CaseSpec(heads=3, tokens=2),
        CaseSpec(heads=1, tokens=4),  # one head of two: rows are 16-fold all the same
        CaseSpec(layout="bf16_d512", heads=3, tokens=6, s_q=3, q_pad=False),
        CaseSpec(layout="v32", heads=2, page=0, tokens=1, q_pad=False, page_gap=64),
        CaseSpec(layout="v41_inline", heads=2, page=3, q_pad=False),
        _V4,
        replace(_V4, page=5, page_gap=5 * 584 - 6 * 576),  # no padding: pages start at odd multiples of 8
        replace(_V4, slots=81, page=81, page_gap=81 * 584 - 83 * 576),  # one page: its stride is never taken
        replace(_V4, page=4, extra_topk=12, extra_page=7, extra_slots=40),
        replace(_V4, scale_rule="nan_scale"),
        replace(_V4, scale_rule="ue8m0_extremes"),
        replace(_V4, scale_rule="sglang"),
        replace(_V4, index="all_invalid"),
        replace(_V4, lengths="zero"),
        CaseSpec(layout="v32", heads=2, tokens=2, scale_rule="odd_fp32", lengths="full", index="clean"),
        CaseSpec(layout="v32", heads=2, tokens=2, scale_rule="arbitrary", lengths="full", index="clean"),
    ],
    ids=lambda spec: spec.slug,
)
def test_the_shape_is_that_of_the_call(spec: CaseSpec) -> None:
    launch, validate = importlib.import_module("generated.launch"), importlib.import_module("generated.validate")
    for case in (verify_case("core", spec), asking_most(verify_case("core", spec))):
        inputs = make_case(case.spec)
        stated = selected_range(inputs) if STATED in case.flags else None
        asked = dict(case.flags).get("return_lse", False)
        call = validate.build_call(**inputs.kwargs(), scale_range=stated, return_lse=asked)
        assert repr(shape_of(case)) == repr(launch.call_shape(call))


def test_cases_of_unknown_kernels_are_in_one_shard_each(full: Matrix) -> None:
    cases = full[0][::20]
    assert set(kernels_of(cases, "generated", "sm103", None)) == {None}
    assert set(kernels_here(cases, "generated", "cpu")) == {None}
    half = [None if at % 2 else kernel for at, kernel in enumerate(full[1][::20])]
    for kernels in ([None] * len(cases), half):
        shards = [shard_of(cases, part, 6, kernels) for part in range(6)]
        assert sorted(c.slug for part in shards for c in part) == sorted(c.slug for c in cases)
        assert all(shards)
    unknown = [
        sum(case_seconds(case.spec, interpreted=True) for case in part)
        for part in shards_of((cases, [None] * len(cases)), 6)
    ]
    assert max(unknown) < 1.3 * sum(unknown) / 6


def test_one_refused_shape_leaves_the_others_known() -> None:
    """The portable family serves every shape of a layout: what is refused here is a head count that is no number."""
    good = verify_case("core", CaseSpec(layout="v4", heads=8))
    bad = replace(good, spec=replace(good.spec, heads=None))  # type: ignore[arg-type]
    kernels = kernels_of([good, bad], "generated", "sm90", "h200")
    assert kernels[0] is not None and kernels[1] is None


def test_quick_suites_come_first_and_kernels_stay_together(full: Matrix) -> None:
    assert {case.suite for case in full[0]} == set(SUITES)
    by_slug = kernel_by_slug(full)
    count = Counter(full[1])
    for part in shards_of(full, 13):
        places = [SUITES.index(case.suite) for case in part]
        assert places == sorted(places)
        runs: dict[str, list[KernelForm | None]] = defaultdict(list)
        for case in part:
            kernel = by_slug[case.slug]
            if not runs[case.suite] or runs[case.suite][-1] != kernel:
                runs[case.suite].append(kernel)
        assert all(len(met) == len(set(met)) for met in runs.values())
        assert all([count[k] for k in met] == sorted((count[k] for k in met), reverse=True) for met in runs.values())


def test_pieces_of_a_kernel_are_no_larger_than_they_may_be() -> None:
    cases = [verify_case("core", CaseSpec(seed=n)) for n in range(2 * MOST_CASES + 1)]
    one = KernelForm("portable", "", False)
    for count, shards in ((MOST_CASES, 1), (MOST_CASES + 1, 2), (2 * MOST_CASES + 1, 3)):
        assert len(set(assign(cases[:count], [one] * count, 10))) == shards
    assert sorted(Counter(assign(cases, [one] * len(cases), 2)).values()) == [120, 121]


def test_the_dearest_piece_goes_first() -> None:
    """100 small cases take 20 s and 3 s to compile, ten kernels of one case 3 s each and one: in the order of the cases the
    large one would come on top of half of the others."""
    cases = [verify_case("core", CaseSpec(seed=n)) for n in range(110)]
    kernels = [KernelForm("portable", str(min(n, 10)), False) for n in range(110)]
    large, small = (sum(case_seconds(case.spec) for case in part) for part in (cases[10:], cases[:10]))
    shards = assign(cases, kernels, 2)
    assert set(shards[10:]) == {shards[109]} and 19 < large < 21 and small < 2.5
    together = [sum(3.2 for n in range(10) if shards[n] == part) for part in (0, 1)]
    assert together[shards[109]] + 23 < 30 and together[1 - shards[109]] > 22


def test_modules_that_the_look_up_leaves_out_serve_nothing(full: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Triton that has no Gluon: every call goes to the portable family, by the look-up of what is left."""
    lookup = importlib.import_module("generated.lookup")
    monkeypatch.setattr(lookup, "_triton_problem", lambda arch, module: "no" if module.startswith("sm90_") else None)
    monkeypatch.setattr(verify_shards, "_taken", {})
    _choice.cache_clear()
    cases = random.Random(5).sample(full[0], 60)
    try:
        kernels = kernels_of(cases, "generated", "sm90", "h200")
    finally:
        _choice.cache_clear()
    assert any(kernel is not None and kernel.gluon for kernel in full[1])
    for case, kernel in zip(cases, kernels, strict=True):
        assert kernel is not None and kernel.module == lookup.choose("sm90", "h200", shape_of(case)).entry.module
        assert not kernel.gluon


def test_padded_heads_are_run_in_the_generic_form() -> None:
    entries = importlib.import_module("generated.sm90.table").ENTRIES
    found = 0
    for entry in entries:
        if entry.config.get("specialise", False) and entry.layout == "v4" and entry.topk[0] == entry.topk[1]:
            spec = CaseSpec(layout="v4", heads=entry.heads, topk=entry.topk[0], page=entry.page or 64,
                            tokens=entry.tokens[0], extra_topk=entry.extra_topk[0], extra_page=entry.extra_page or 0)  # fmt: skip
            native, padded = kernels_of(
                [verify_case("padding", spec), verify_case("padding", spec, "pad128")], "generated", "sm90", "h200"
            )
            assert native is not None and padded is not None
            found += native != padded and native.module == padded.module
    assert found > 0


@pytest.mark.parametrize("text", ["4/4", "-1/4", "0/0", "1", "a/b", "1/2/3"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parsed_shard(text)
    assert parsed_shard("3/4") == (3, 4)
