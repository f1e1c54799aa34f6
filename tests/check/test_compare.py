"""The comparison's own failure modes, and each mutation caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kgen.check import (
    TOLERANCES,
    CaseSpec,
    Inputs,
    Reference,
    Tolerance,
    attention_reference,
    compare,
    core_edges,
    deepinfer_rule,
    make_case,
    narrowed,
    tolerance_for,
)
from kgen.check.mutations import MUTATIONS, Mutation, emulate
from kgen.check.reference import exactly, rounded_to_bf16, rounded_to_fp16

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
    ref = attention_reference(inputs)
    tolerance = narrowed(tolerance_for(mutation.spec), inputs, ref)
    good = emulate(inputs)
    report = compare(ref, tolerance, good.out, good.lse, good.max_logits)
    assert report.ok, report.sentence
    bad = mutation(inputs)
    seen = compare(ref, tolerance, bad.out, bad.lse if mutation.seen_on == "lse" else None)
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


# ---- K that is rounded ----------------------------------------------------------------------------------------------

V32 = CaseSpec(
    layout="v32", heads=8, topk=48, page=64, slots=300, lengths="none", scale_rule="arbitrary", index="clean"
)
NAMES = ("out", "lse", "max_logits")


def _bounds(spec: CaseSpec, stated: bool = False) -> tuple[Inputs, Reference, Tolerance]:
    inputs = make_case(spec)
    ref = attention_reference(inputs)
    return inputs, ref, narrowed(tolerance_for(spec), inputs, ref, stated=stated)


def test_rounding_of_latents_by_hand() -> None:
    """One e4m3 code times one scale, rounded to nearest even: 8 significant bits in bf16, 11 in fp16."""
    code, scale = (
        torch.tensor([1.125, 1.0, 1.0]).double(),
        torch.tensor([1.0 + 2**-7, 1 + 2**-8, 1 + 3 * 2**-8]).double(),
    )
    assert exactly(code, scale).tolist() == [1.125 * (1 + 2**-7), 1 + 2**-8, 1 + 3 * 2**-8]
    assert rounded_to_bf16(code, scale).tolist() == [1.1328125, 1.0, 1 + 2**-6]  # 1.13378…: 145/128 is nearest
    assert rounded_to_fp16(code, scale).tolist() == [1.1337890625, 1 + 2**-8, 1 + 3 * 2**-8]
    assert rounded_to_fp16(code[1:2], torch.tensor([1 + 2**-12]).double()).tolist() == [
        1.0
    ]  # the scale is rounded, too


def test_no_bound_is_wider_than_the_table_and_most_are_narrower() -> None:
    specs = [spec for spec in core_edges() if tolerance_for(spec).name == "fp8_rounded"]
    specs += [replace(V32, value_scale=scale) for scale in (0.01, 0.1, 1.0)]
    assert len(specs) >= 6
    narrower = 0
    for spec in specs:
        wide, (_, _, tight) = tolerance_for(spec), _bounds(spec)
        for name in NAMES:
            before, after = getattr(wide, name), getattr(tight, name)
            assert after.abs <= before.abs and (after.rel, after.cos) == (before.rel, before.cos), (spec.slug, name)
            narrower += after.abs < before.abs / 2
    assert narrower > len(specs)


@pytest.mark.parametrize("layout", ["bf16_d512", "v4", "v32"])
def test_bounds_of_exact_latents_are_the_table_s(layout: str) -> None:
    inputs, ref, tolerance = _bounds(CaseSpec(layout=layout, heads=2, topk=8, slots=64))
    assert tolerance is tolerance_for(CaseSpec(layout=layout))


def test_bounds_follow_the_size_of_the_logits() -> None:
    """Logits a tenth as large move a tenth as far; where they are large, the table's bound holds."""
    inputs = make_case(V32)

    def scaled(factor: float) -> Tolerance:
        other = inputs.replace(sm_scale=inputs.sm_scale * factor)
        return narrowed(tolerance_for(V32), other, attention_reference(other))

    small, large, huge = scaled(0.1), scaled(1.0), scaled(100.0)
    floor = TOLERANCES["fp8"].max_logits.abs
    assert (large.max_logits.abs - floor) / (small.max_logits.abs - floor) == pytest.approx(10, rel=0.3)
    assert large.max_logits.abs < TOLERANCES["fp8_rounded"].max_logits.abs / 2
    assert huge.max_logits == TOLERANCES["fp8_rounded"].max_logits and huge.lse == TOLERANCES["fp8_rounded"].lse


@pytest.mark.parametrize("name", ["lse", "max_logits"])
def test_an_error_twice_as_large_as_rounding_is_seen(name: str) -> None:
    """The table's bounds pass it: in this case rounding K moves logits by a fifth of them."""
    inputs, ref, tight = _bounds(V32)
    rounded = attention_reference(inputs, latents=rounded_to_bf16)
    found = {other: getattr(rounded, other) for other in NAMES}
    assert compare(ref, tight, **found).ok
    found[name] = getattr(ref, name) + 2 * (getattr(rounded, name) - getattr(ref, name))
    seen = compare(ref, tight, **found)
    assert not seen.ok and [t.name for t in seen.tensors if not t.ok] == [name]
    assert compare(ref, tolerance_for(V32), **found).ok


def test_kernels_of_fp16_latents_have_room_where_bf16_rounds_nothing() -> None:
    """One key whose latents are exact in bf16, but whose scale is not in fp16 (2^-20 + 2^-27, in steps of 2^-24)."""
    spec = replace(V32, heads=1, topk=1, tokens=1)
    inputs = make_case(spec)
    page, at = divmod(int(inputs.indices.flatten()[0]), 64)
    token = inputs.kv[page, at, 0]
    token[:512] = 0x38  # 1.0
    token[512:528] = torch.full((4,), 2.0**-20 * (1 + 2**-7)).view(torch.uint8)
    ref = attention_reference(inputs)
    plain, stated = (narrowed(tolerance_for(spec), inputs, ref, stated=flag) for flag in (False, True))
    assert plain.max_logits.abs == TOLERANCES["fp8"].max_logits.abs
    moved = (ref.max_logits - attention_reference(inputs, latents=rounded_to_fp16).max_logits).abs().item()
    assert moved > 0 and stated.max_logits.abs == pytest.approx(plain.max_logits.abs + 1.5 * moved)


def test_lse_is_back_where_decision_15_puts_it() -> None:
    assert TOLERANCES["fp8_rounded"].lse.abs == 6e-3
