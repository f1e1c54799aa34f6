"""The matrices: every feasible pair is there, few enough, with names that stay."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from kgen.check import attention_reference, core_edges, make_case, tolerance_for
from kgen.runtime.layouts import DUAL_LAYOUTS
from kgen.verify_cases import CPU_KEYS, VerifyCase, cases_of, core_cases, full_cases, sanitizer_cases

WANTED = {
    "layout": ("bf16_d576", "bf16_d512", "v32", "v4", "v41_footer", "v41_inline"),
    "heads": (1, 2, 4, 8, 11, 12, 16, 17, 24, 32, 64, 66, 96, 100, 128),
    "topk": (1, 17, 64, 192, 256, 512, 576, 1024, 2048),
    "page": (1, 2, 4, 53, 61, 64, 69, 128, 256, 576),
    "dual": (False, True),
    "sink": ("none", "zero", "normal", "near", "plus5", "minus5", "plus_inf", "minus_inf", "mixed"),
    "lengths": ("none", "full", "random", "half", "one", "zero", "negative", "over"),
    "index": (
        *("clean", "random", "all_invalid", "some_empty", "leading", "trailing", "alternating", "single", "wild"),
        *("duplicates", "tail"),
    ),
    "scale_rule": ("flashmla", "vllm", "sglang", "arbitrary", "odd_fp32", "ue8m0_extremes", "nan_scale"),
    "s_q": (1, 3),
    "flags": ((False, False), (True, False), (False, True), (True, True)),
    "facade": (False, True),
    "own_out": (False, True),
}
"""Written out once more: what the core must cover."""

FLAT = ("bf16_d576", "bf16_d512")


def value(case: VerifyCase, factor: str) -> object:
    if factor == "dual":
        return case.spec.extra_topk > 0
    if factor == "flags":
        flags = dict(case.flags)
        return bool(flags.get("return_lse")), bool(flags.get("return_max_logits"))
    if factor in ("facade", "own_out"):
        return bool(dict(case.flags).get(factor))
    return getattr(case.spec, factor)


def possible(a: tuple[str, object], b: tuple[str, object]) -> bool:
    """Whether a case can have both values, by the rules of the layouts."""
    chosen = dict((a, b))
    if set(chosen) <= {"flags", "facade", "own_out"}:
        return False  # three views of one factor: how the case is called
    layouts = {chosen["layout"]} if "layout" in chosen else set(WANTED["layout"])
    if "page" in chosen:
        layouts -= set(FLAT)
    if chosen.get("dual"):
        layouts &= set(DUAL_LAYOUTS)
        if chosen.get("scale_rule") == "ue8m0_extremes":
            return False
    only_v32, only_ue8m0 = ("arbitrary", "odd_fp32"), ("vllm", "ue8m0_extremes")
    rule = chosen.get("scale_rule", "flashmla")
    if rule != "flashmla":
        layouts -= set(FLAT)
    if rule in only_v32:
        layouts &= {"v32"}
    if rule in only_ue8m0:
        layouts &= set(DUAL_LAYOUTS)
    return bool(layouts)


def test_every_possible_pair_is_in_the_core() -> None:
    core = [case for case in core_cases() if case.suite == "core"]
    assert len(core) <= 400
    seen = Counter(
        ((f, value(case, f)), (g, value(case, g))) for case in core for f, g in itertools.combinations(WANTED, 2)
    )
    wanted = [
        ((f, x), (g, y))
        for f, g in itertools.combinations(WANTED, 2)
        for x, y in itertools.product(WANTED[f], WANTED[g])
        if possible((f, x), (g, y))
    ]
    assert len(wanted) > 3000
    assert [pair for pair in wanted if not seen[pair]] == []


@pytest.mark.parametrize("suite", ["core", "full", "sanitizer"])
def test_slugs_are_unique_and_stable(suite: str) -> None:
    slugs = [case.slug for case in cases_of(suite, "cuda")]
    assert len(slugs) == len(set(slugs))
    assert slugs == [case.slug for case in cases_of(suite, "cuda")]


def test_edges_are_all_there() -> None:
    assert {case.spec for case in core_cases() if case.suite == "edges"} == set(core_edges())


def test_cases_of_the_cpu_are_small() -> None:
    assert 50 <= len(core_cases("cpu")) <= 200
    assert all(case.spec.keys <= CPU_KEYS for case in core_cases("cpu"))
    assert len(sanitizer_cases()) <= 12 and all(case.spec.keys <= CPU_KEYS for case in sanitizer_cases())


@pytest.mark.parametrize("case", sanitizer_cases(), ids=lambda case: case.spec.layout)
def test_sanitizer_cases_read_keys(case: VerifyCase) -> None:
    """A run in which every row is empty reads no cache, and finds nothing: its errors are exactly 0."""
    truth = attention_reference(make_case(case.spec))
    assert truth.lse.isfinite().any() and truth.out.any()


def test_padded_heads_are_in_the_core() -> None:
    padded = [case for case in core_cases() if case.suite == "padding"]
    assert {case.spec.layout for case in padded} == set(WANTED["layout"])
    assert all(dict(case.flags)["pad_heads"] > case.spec.heads for case in padded)
    assert any(case.suite == "padding" for case in core_cases("cpu"))


def test_full_has_the_peers_matrices() -> None:
    cases = full_cases()
    counts = Counter(case.suite for case in cases)
    assert counts["flashmla_decode"] > 4000 and counts["deepinfer"] == 7
    assert {"flashmla_prefill", "flashinfer", "flaggems"} <= set(counts)
    assert max(case.spec.tokens for case in cases) == 70000
    decode = [case.spec for case in cases if case.suite == "flashmla_decode"]
    assert {spec.page for spec in decode} >= {2, 53, 61, 64, 69, 576}
    assert {spec.tokens // spec.s_q for spec in decode} >= {4, 74, 321}


def test_flash_mla_bounds_hold_for_values_of_its_magnitude_and_not_for_twice_that() -> None:
    """The best kernel that rounds P to bf16: two keys share the weight, their values cancel, and only P's rounding is left.

    Its error is at most 2^-9 |v|, where groups reach 2 * value_scale per sigma. Two keys at 4 sigma at once: 4 of 10^9
    elements; at 5 sigma one key of two would do for the bound to break at twice the scale, as it did on an H200.
    """
    weights = torch.linspace(0.5, 0.75, 4001, dtype=torch.float64)
    pair = torch.stack([weights, 1 - weights])
    rounding = (pair.to(torch.bfloat16).double() - pair).abs().sum(0).max().item()
    assert 2**-10 < rounding <= 2**-9
    cases = [c for c in full_cases() if c.suite in ("flashmla_prefill", "flashmla_decode")]
    cases += [c for c in full_cases() if c.suite == "flaggems" and c.spec.layout == "bf16_d576"]
    for case in cases:
        bound, sigma = tolerance_for(case.spec).out.abs, 2 * case.spec.value_scale
        assert rounding * 4 * sigma <= bound
        assert rounding * 5 * (2 * sigma) > bound


def test_an_exact_maximum_breaks_the_bound_of_flag_gems_shapes_at_twice_the_magnitude() -> None:
    """One element as it was drawn at value_scale 0.1 (seed 3 of flaggems' 128 heads, 128 keys and 512 tokens, of 16 draws): P of
    its four keys under the final maximum, and their values, at most 4 sigma. All else exact, it still needs 9.0e-4; with the
    93 small keys 8.3e-4. Divided by the sum of the rounded P it needs as much, and half of it at half the magnitude."""
    p = torch.tensor([1.0, 0.5762, 0.5563, 0.3644], dtype=torch.float64)
    v = torch.tensor([-0.15625, 0.7890625, -0.447265625, 0.018310546875], dtype=torch.float64)
    case = next(c for c in full_cases() if c.suite == "flaggems" and "bf16_d576-h128-k128-s2048-t512" in c.slug)
    bound, twice = tolerance_for(case.spec).out, 2 * case.spec.value_scale
    assert v.abs().max() < 4 * 2 * twice
    rounded, true = p.to(torch.bfloat16).double(), (p * v).sum() / p.sum()
    for total in (p.sum(), rounded.sum()):
        error = ((rounded * v).sum() / total - true).abs()
        assert bound.abs < error < 2 * bound.abs and error > bound.rel * true.abs()
