"""K that kernels round: which references count, and that a result must be that of one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kgen.check import (
    TOLERANCES,
    CaseSpec,
    Inputs,
    Reference,
    Report,
    attention_reference,
    compare,
    compare_any,
    core_edges,
    make_case,
    mutations,
    references,
    roundings,
    tolerance_for,
)
from kgen.check.mutations import Quirks, emulate
from kgen.check.reference import decode_slots, exactly, rounded_to_bf16, rounded_to_fp16
from kgen.verify import verify
from kgen.verify_cases import verify_case

V32 = CaseSpec(
    layout="v32", heads=8, topk=48, page=64, slots=300, lengths="none", scale_rule="arbitrary", index="clean"
)
ROW = TOLERANCES["fp8_rounded"]
ALL = ("exact", "bf16", "fp16")
ROUNDED = [spec for spec in core_edges() if tolerance_for(spec) is ROW]


def _as_stored(reference: Reference) -> dict[str, torch.Tensor]:
    """What a kernel gives that computes this without further errors: out in bf16, the others in fp32."""
    return {
        "out": reference.out.to(torch.bfloat16), "lse": reference.lse.float(), "max_logits": reference.max_logits.float()
    }  # fmt: skip


def test_rounding_of_latents_by_hand() -> None:
    """One e4m3 code times one scale, rounded to nearest even: 8 significant bits in bf16, 11 in fp16."""
    code = torch.tensor([1.125, 1.0, 1.0]).double()
    scale = torch.tensor([1.0 + 2**-7, 1 + 2**-8, 1 + 3 * 2**-8]).double()
    assert exactly(code, scale).tolist() == [1.125 * (1 + 2**-7), 1 + 2**-8, 1 + 3 * 2**-8]
    assert rounded_to_bf16(code, scale).tolist() == [1.1328125, 1.0, 1 + 2**-6]  # 1.13378…: 145/128 is nearest
    assert rounded_to_fp16(code, scale).tolist() == [1.1337890625, 1 + 2**-8, 1 + 3 * 2**-8]
    fine = torch.tensor([1 + 2**-12]).double()
    assert rounded_to_fp16(code[1:2], fine).tolist() == [1.0]  # the scale is rounded, too


@pytest.mark.parametrize("spec", [V32, replace(V32, scale_rule="odd_fp32")], ids=lambda s: s.scale_rule)
def test_rounding_moves_no_logit_further_than_it_can(spec: CaseSpec) -> None:
    """Each K by 2^-8 of itself in bf16 and by 2^-10 in fp16, a logit by sm_scale * sum |q| |K - rounded K| at most."""
    inputs = make_case(spec)
    slot = inputs.indices.long()
    known, keys = references(inputs, ALL), decode_slots(inputs.kv, "v32", slot.flatten())
    for kind, latents, part in (("bf16", rounded_to_bf16, 2.0**-8), ("fp16", rounded_to_fp16, 2.0**-10)):
        moved = (decode_slots(inputs.kv, "v32", slot.flatten(), latents) - keys).abs()
        assert (moved <= part * (1 + 2**-10) * keys.abs() + 2**-25).all() and moved[:, :512].any()
        assert not moved[:, 512:].any()
        most = torch.einsum("thd,tkd->thk", inputs.q.double().abs(), moved.view(*slot.shape, -1)) * inputs.sm_scale
        for name in ("lse", "max_logits"):
            far = (getattr(known[kind], name) - getattr(known["exact"], name)).abs()
            assert (far <= most.amax(2)).all() and far.max() > most.amax() / 100


def test_which_roundings_count() -> None:
    inputs = make_case(V32)
    assert roundings(ROW, inputs) == ("exact", "bf16") and roundings(ROW, inputs, stated=True) == ALL
    for layout in ("bf16_d512", "v4", "v32"):
        spec = CaseSpec(layout=layout, heads=2, topk=8, slots=64)
        assert roundings(tolerance_for(spec), make_case(spec), stated=True) == ("exact",)


@pytest.mark.parametrize(("scale", "fits"), [(5.9e-5, False), (6.1e-5, True), (145.9, True), (146.5, False)])
def test_scales_that_fp16_does_not_hold_leave_no_room_for_it(scale: float, fits: bool) -> None:
    spec = replace(V32, heads=1, topk=1, tokens=1)
    inputs = make_case(spec)
    page, at = divmod(int(inputs.indices.flatten()[0]), 64)
    inputs.kv[page, at, 0, 512:528] = torch.full((4,), scale).view(torch.uint8)
    assert ("fp16" in roundings(ROW, inputs, stated=True)) is fits


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("spec", [V32, *ROUNDED], ids=lambda s: s.slug)
def test_a_result_of_each_kind_passes_and_says_how_far_it_is_from_the_truth(spec: CaseSpec, kind: str) -> None:
    known = references(make_case(spec), ALL)
    found = _as_stored(known[kind])
    report = compare_any(known, ROW, **found)
    assert report.ok, report.sentence
    assert ("K as it is stored" if kind == "exact" else f"K rounded to {kind}") in report.sentence
    for name, x in found.items():
        truth = getattr(known["exact"], name)
        apart = (x.double() - truth)[truth.isfinite()].abs().max().item()
        assert report.from_truth[name] == apart and f"{name} {apart:.2e}" in report.sentence.split("From the truth")[1]
    others = {k: v for k, v in known.items() if k != kind}
    assert not compare_any(others, ROW, **found).ok, f"what comes of {kind} is taken for another's"


@pytest.mark.parametrize("spec", [V32, *ROUNDED], ids=lambda s: s.slug)
def test_a_kernel_has_ample_room_against_its_own_reference(spec: CaseSpec) -> None:
    """fp32 sums and P in bf16 or fp16: lse and max_logits need a hundredth of rel, and a thousandth of the cosine."""
    inputs = make_case(spec)
    for kind in ("bf16", "fp16"):
        got = emulate(inputs, Quirks(latents=kind))
        report = compare(references(inputs, (kind,))[kind], ROW, got.out, got.lse, got.max_logits)
        assert report.ok and report["out"].needed_abs < 0.7 * ROW.out.abs, report.sentence
        for name in ("lse", "max_logits"):
            assert report[name].max_rel < ROW.lse.rel / 100 and report[name].cos_diff < ROW.lse.cos / 1000


def test_all_tensors_must_be_those_of_one_reference() -> None:
    """lse of rounded K beside max_logits of exact K is what no kernel computes."""
    known = references(make_case(V32), ALL)
    for kind, other in (("exact", "bf16"), ("bf16", "exact"), ("bf16", "fp16"), ("fp16", "bf16")):
        for name in ("lse", "max_logits"):
            mixed = _as_stored(known[kind]) | {name: _as_stored(known[other])[name]}
            assert not compare_any(known, ROW, **mixed).ok, (kind, other, name)


@pytest.mark.parametrize("name", ["lse", "max_logits"])
@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0])
def test_an_error_of_the_size_of_rounding_is_seen(name: str, factor: float) -> None:
    """Half as far as rounding moves it, or twice as far: the size of an error is no excuse."""
    known = references(make_case(V32), ("exact", "bf16"))
    found = _as_stored(known["bf16"])
    exact, rounded = (getattr(known[kind], name) for kind in ("exact", "bf16"))
    found[name] = (exact + factor * (rounded - exact)).float()
    seen = compare_any(known, ROW, **found)
    assert not seen.ok and [t.name for t in seen.tensors if not t.ok] == [name]
    assert seen.sentence.startswith("Against K as it is stored: ") and "Against K rounded to bf16: " in seen.sentence
    assert set(seen.from_truth) == set(found)


@pytest.mark.parametrize("latents", ["fp16", "scale_in_fp16"])
def test_being_closer_to_the_truth_is_not_enough(latents: str) -> None:
    """What a bound on the distance from the truth cannot see: not stated, these are no function that a kernel computes."""
    inputs = make_case(V32)
    known = references(inputs, ("exact", "bf16"))
    good, bad = emulate(inputs), emulate(inputs, Quirks(latents=latents))
    reports = [compare_any(known, ROW, x.out, x.lse, x.max_logits) for x in (good, bad)]
    assert [report.ok for report in reports] == [True, False]
    for name in ("lse", "max_logits"):
        assert reports[1].from_truth[name] < reports[0].from_truth[name]


def _one_key_in_fp16(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    made = (code * scale).to(torch.bfloat16).float()
    made[:, 7] = (code.half() * scale.half()).float()[:, 7]
    return made


def _one_token_in_fp16(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    made = (code * scale).to(torch.bfloat16).float()
    made[0] = (code.half() * scale.half()).float()[0]
    return made


def _scales_of_the_key_before(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    made = (code * scale).to(torch.bfloat16).float()
    made[:, 7] = (code * scale.roll(1, 1)).to(torch.bfloat16).float()[:, 7]
    return made


@pytest.mark.parametrize("latents", [_one_key_in_fp16, _one_token_in_fp16, _scales_of_the_key_before])
def test_keys_and_rows_of_one_result_are_rounded_alike(latents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key of 48, or one row of a few, otherwise than the rest: each element is near some reference, the result is not."""
    inputs = make_case(V32)
    known = references(inputs, ALL)
    monkeypatch.setitem(mutations._LATENTS, "mixed", latents)
    good, bad = emulate(inputs), emulate(inputs, Quirks(latents="mixed"))
    reports = [compare_any(known, ROW, x.out, x.lse, x.max_logits) for x in (good, bad)]
    assert [report.ok for report in reports] == [True, False]


def test_one_reference_is_a_plain_comparison() -> None:
    spec = CaseSpec(layout="v4", heads=2, topk=8, slots=64)
    inputs = make_case(spec)
    got = emulate(inputs)
    plain = compare(attention_reference(inputs), tolerance_for(spec), got.out, got.lse, got.max_logits)
    assert compare_any(references(inputs), tolerance_for(spec), got.out, got.lse, got.max_logits) == plain
    assert plain.from_truth == {}


def test_the_row_is_as_tight_as_that_of_exact_latents() -> None:
    """Decision 15 gives kernels that round K a row. Its bounds are those of fp8 but for the cosines."""
    plain = TOLERANCES["fp8"]
    for name in ("out", "lse", "max_logits"):
        ours, theirs = getattr(ROW, name), getattr(plain, name)
        assert (ours.abs, ours.rel) == (theirs.abs, theirs.rel)
        assert name == "out" or ours.cos < theirs.cos
    assert ROW.out.cos == 2.0 ** (-8 * 2) / 2


# ---- through kgen verify --------------------------------------------------------------------------------------------


def _verified(latents: str, flags: str = "both", **more: Any) -> Any:
    def attention(inputs: Inputs, **given: Any) -> Any:
        got = emulate(inputs, Quirks(latents=latents))
        given["out"].copy_(got.out)
        lse = got.lse.masked_fill(got.lse.isneginf(), float("inf")) if given.get("facade") else got.lse
        return given["out"], lse, got.max_logits if given.get("return_max_logits") else None

    case = verify_case("test", replace(V32, index="some_empty"), flags)
    return verify([replace(case, flags=(*case.flags, *more.items()))], attention, "cpu")


def test_verification_takes_fp16_only_where_the_scales_are_stated() -> None:
    assert _verified("bf16").ok and _verified("bf16", stated=True).ok and _verified("fp16", stated=True).ok
    assert not _verified("fp16").ok and not _verified("scale_in_bf16", stated=True).ok


def test_verification_knows_the_convention_of_empty_rows_for_every_reference() -> None:
    summary = _verified("bf16", "facade")
    assert summary.ok, summary.failures


def test_verification_records_how_far_results_are_from_the_truth() -> None:
    summary = _verified("bf16")
    worst = summary.worst()["fp8_rounded"]
    assert 1e-3 < worst["max_logits"]["from_truth"] < 1e-2 and worst["max_logits"]["needed_abs"] < 1e-6
    assert any("max_logits" in line and "from the truth" in line for line in summary.lines())


def test_a_wrong_shape_is_a_report() -> None:
    known = references(make_case(V32), ("exact", "bf16"))
    report: Report = compare_any(known, ROW, known["exact"].out[:1])
    assert not report.ok and "shape" in report.sentence
