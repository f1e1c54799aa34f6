"""The comparison's own failure modes, and each mutation caught. K that is rounded: test_rounding.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kgen.check import (
    TOLERANCES,
    Reference,
    attention_reference,
    compare,
    compare_any,
    deepinfer_rule,
    make_case,
    references,
    roundings,
    tolerance_for,
)
from kgen.check.mutations import MUTATIONS, Mutation, emulate

BF16 = TOLERANCES["bf16"]


def _reference() -> Reference:
    gen = torch.Generator().manual_seed(0)
    out = torch.randn(5, 2, 512, generator=gen, dtype=torch.float64)
    lse = torch.randn(5, 2, generator=gen, dtype=torch.float64) + 6
    lse[4], out[4] = float("-inf"), 0.0
    return Reference(out, lse, lse - 1)


def test_equal_passes_and_says_so() -> None:
    ref = _reference()
    report = compare(ref, BF16, ref.out, ref.lse, ref.max_logits)
    assert report.ok and bool(report) and report.max_abs == 0.0
    assert "As the reference (bf16)" in report.sentence


@pytest.mark.parametrize(
    ("value", "error", "ok"),
    [(1.0, 0.023, True), (1.0, 0.024, False), (1e-3, 7.9e-4, True), (1e-3, 8.1e-4, False), (0.0, 8.1e-4, False)],
)
def test_abs_or_rel(value: float, error: float, ok: bool) -> None:
    ref = _reference()
    ref.out[0, 0, 0] = value
    out = ref.out.clone()
    out[0, 0, 0] += error
    report = compare(ref, BF16, out)
    assert report.ok is ok and report["out"].outside == (not ok)


def test_cosine_sees_what_elements_do_not() -> None:
    ref = _reference()
    report = compare(ref, BF16, ref.out * 1.02)  # every element within rel = 2.35 %
    assert not report.ok and report["out"].outside == 0 and "cosine" in report.sentence
    # 0.02^2 / (1 + 1.02^2) = 1.96e-4
    assert report["out"].cos_diff == pytest.approx(1.96e-4, rel=1e-2)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_special_values_must_match(wrong: float) -> None:
    ref = _reference()
    out = ref.out.clone()
    out[1, 1, 7] = wrong
    report = compare(ref, BF16, out)
    assert not report.ok and report["out"].special == 1
    ref.out[1, 1, 7] = wrong
    assert compare(ref, BF16, out).ok
    ref.out[1, 1, 7] = -wrong if wrong == wrong else 0.0
    assert not compare(ref, BF16, out).ok


def test_empty_rows_of_lse() -> None:
    ref = _reference()
    for empty in (float("inf"), 0.0, -1e30, float("nan")):
        lse = ref.lse.clone()
        lse[4] = empty
        report = compare(ref, BF16, ref.out, lse)
        assert not report.ok and report["out"].ok and report["lse"].special == 2
    everything = Reference(torch.zeros(1, 2, 512), torch.full((1, 2), float("-inf")), torch.full((1, 2), float("-inf")))
    assert compare(everything, BF16, everything.out, everything.lse, everything.max_logits).ok
    assert not compare(everything, BF16, everything.out, torch.zeros(1, 2)).ok
    assert not compare(everything, BF16, torch.full((1, 2, 512), float("nan"))).ok


def test_lse_bounds_are_tight() -> None:
    ref = _reference()
    assert compare(ref, BF16, ref.out, ref.lse * (1 + 3.0e-5)).ok
    assert not compare(ref, BF16, ref.out, ref.lse * (1 + 3.2e-5)).ok
    assert not compare(ref, BF16, ref.out, ref.lse, ref.max_logits * (1 + 3.2e-5)).ok


def test_wrong_shapes_are_reports() -> None:
    ref = _reference()
    assert "shape (4, 2, 512) where (5, 2, 512)" in compare(ref, BF16, ref.out[:4]).sentence
    assert not compare(ref, BF16, ref.out.transpose(1, 2)).ok
    assert not compare(ref, BF16, ref.out, ref.lse.T).ok
    assert compare(ref, BF16, ref.out[None]).ok  # leading dims are free
    empty = Reference(ref.out[:0], ref.lse[:0], ref.max_logits[:0])
    assert compare(empty, BF16, ref.out[:0], ref.lse[:0]).ok


def test_deepinfer_rule() -> None:
    ref = Reference(torch.tensor([1.0, -4.0]).double(), torch.zeros(1), torch.zeros(1))
    unit = 4 / 256
    assert deepinfer_rule(ref.out + torch.tensor([2 * unit, 0.0]), ref) == (True, 2.0)
    ok, error = deepinfer_rule(ref.out + torch.tensor([0.0, 2.1 * unit]), ref)
    assert not ok and error == pytest.approx(2.1)
    assert not deepinfer_rule(torch.tensor([1.0, float("nan")]), ref)[0]


def test_every_tolerance_has_a_reason() -> None:
    for name, tolerance in TOLERANCES.items():
        assert tolerance.name == name and len(tolerance.reason) > 20 and len(tolerance.source) > 20


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_checks_can_see(mutation: Mutation) -> None:
    inputs = make_case(mutation.spec)
    tolerance = tolerance_for(mutation.spec)
    known = references(inputs, roundings(tolerance, inputs))
    good = emulate(inputs)
    report = compare_any(known, tolerance, good.out, good.lse, good.max_logits)
    assert report.ok, report.sentence
    bad = mutation(inputs)
    seen = compare_any(known, tolerance, bad.out, bad.lse if mutation.seen_on == "lse" else None)
    assert not seen[mutation.seen_on].ok, f"{mutation.name} is not seen on {mutation.seen_on}"


def test_gaussian_inputs_hide_a_lost_key_from_the_element_bounds() -> None:
    """Why inputs are peaked (decision 16): without peaks, FlashMLA's element bounds pass a lost key of 2048.

    Only the cosine over the whole tensor sees it, and only if most rows lose one.
    """
    mutation = next(m for m in MUTATIONS if m.name == "drop_last_key_topk2048")
    spec = replace(mutation.spec, peaked=False, sink="none")
    inputs = make_case(spec)
    report = compare(attention_reference(inputs), tolerance_for(spec), mutation(inputs).out)
    assert report["out"].outside == 0 and report["out"].special == 0
    peaked = make_case(mutation.spec)
    report = compare(attention_reference(peaked), tolerance_for(mutation.spec), mutation(peaked).out)
    assert report["out"].outside > peaked.tokens * peaked.heads * 256  # more than half of all elements
