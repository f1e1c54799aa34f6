"""The forms of the matrix: every tier is reached, and what a call states about its scales is true."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kgen.check import CaseSpec, make_case
from kgen.check.scales import scale_range, selected_range
from kgen.runtime.validate import build_call
from kgen.verify_cases import cases_of, verify_case
from kgen.verify_forms import STATED, aligned, asking_most, formed_cases, in_turns
from kgen.verify_shards import kernels_of


def test_a_third_of_the_cases_keeps_its_wide_buffers_and_a_third_states_its_scales() -> None:
    cases = formed_cases("full", "cuda")
    assert len({case.slug for case in cases}) == len(cases)
    fp8 = [case for case in cases if case.spec.layout in ("v32", "v4") and case.suite == "flashmla_decode"]
    shares = [
        sum(case.spec.q_pad for case in fp8),
        sum(not case.spec.q_pad and STATED not in case.flags for case in fp8),
        sum(STATED in case.flags for case in fp8),
    ]
    assert min(shares) > 0.3 * len(fp8)
    assert all(not case.spec.q_pad for case in cases if STATED in case.flags)


def test_the_core_is_run_once_more_in_the_form_that_asks_most() -> None:
    core = [case for case in cases_of("core", "cuda") if case.spec.layout in ("bf16_d576", "bf16_d512", "v32", "v4")]
    again = [case for case in formed_cases("full", "cuda") if case.suite == "hopper"]
    assert len(again) == len(core) and not any(case.spec.q_pad for case in again)
    assert all((STATED in case.flags) == (case.spec.layout in ("v32", "v4")) for case in again)


def test_sanitizers_see_every_form() -> None:
    cases = formed_cases("sanitizer", "cuda")
    for layout in ("bf16_d576", "bf16_d512", "v32", "v4"):
        mine = [case for case in cases if case.spec.layout == layout]
        assert {case.spec.q_pad for case in mine} == {True, False}
        assert any(STATED in case.flags for case in mine) == (layout in ("v32", "v4"))
        assert {case.spec.heads for case in mine if not case.spec.q_pad} >= {11}


def test_sanitizers_reach_every_hopper_kernel_text() -> None:
    """A module that no case reaches is one of which a clean report says nothing."""
    from generated.sm90 import table

    named = {entry.module for entry in table.ENTRIES if entry.module.startswith("sm90_")}
    cases = formed_cases("sanitizer", "cuda")
    reached = {kernel.module for kernel in kernels_of(cases, "generated", "sm90", "h200") if kernel is not None}
    assert len(named) >= 10 and not named - reached


def test_the_form_for_calls_without_lse_is_verified_too() -> None:
    """Of the kernels, not of the flags: the lean form serves such calls alone, and is the one that was timed."""
    from generated.sm90 import table

    named = {entry.module for entry in table.ENTRIES if entry.config.get("lean", False)}
    for suite in ("full", "sanitizer"):
        cases = formed_cases(suite, "cuda")
        kernels = [kernel for kernel in kernels_of(cases, "generated", "sm90", "h200") if kernel is not None]
        lean = [kernel for kernel in kernels if "('LEAN', True)" in kernel.constants]
        exact = [kernel for kernel in kernels if "('LEAN', False)" in kernel.constants]
        assert {kernel.module for kernel in lean} >= {"sm90_rs_fp8_v32"} and exact
        if suite == "full":
            assert {kernel.module for kernel in lean} == named and len(lean) >= 30
    for case in cases:
        if case.slug.startswith("no_lse/"):
            assert not any("lse" in flag for flag, _ in case.flags) and STATED in case.flags


def test_forms_change_the_call_alone() -> None:
    case = verify_case("core", CaseSpec(layout="v4", heads=3))
    assert in_turns([case] * 3) == [case, aligned(case), asking_most(case)]
    assert asking_most(case).spec == replace(case.spec, q_pad=False)
    assert asking_most(verify_case("core", CaseSpec(layout="v41_inline"))).flags == case.flags


def test_only_the_aligned_form_is_aligned() -> None:
    for q_pad in (True, False):
        inputs = make_case(CaseSpec(layout="v32", heads=8, q_pad=q_pad))
        assert build_call(**inputs.kwargs()).aligned is not q_pad


@pytest.mark.parametrize("layout", ["v32", "v4", "v41_footer", "v41_inline"])
def test_the_range_covers_the_selected_rows_and_no_poison(layout: str) -> None:
    """Unselected rows hold NaN scales; planting a scale in a selected row moves the range, in another one it does not."""
    inputs = make_case(
        CaseSpec(layout=layout, heads=2, topk=20, slots=200, page=5, tokens=2, index="clean", lengths="none")
    )
    found = selected_range(inputs)
    assert found is not None and 2.0**-13 <= found[0] <= found[1] < 1.0
    assert scale_range(inputs.kv, layout) is None
    chosen = torch.unique(inputs.indices)
    free = next(slot for slot in range(200) if slot not in chosen.tolist())
    for slot, moved in ((free, False), (int(chosen[0]), True)):
        planted = inputs.replace(kv=_planted(inputs.kv.clone(), layout, slot))
        wanted = (found[0], 2.0**20) if moved else found
        assert selected_range(planted) == wanted


def _planted(kv: torch.Tensor, layout: str, slot: int) -> torch.Tensor:
    """The cache with 2^20 as the last group scale of a slot; offsets written out by hand."""
    page, at = slot // 5, slot % 5
    flat = torch.as_strided(kv, (kv.shape[0], kv.stride(0)), (kv.stride(0), 1))
    if layout == "v32":
        flat[page, at * 656 + 524 : at * 656 + 528] = torch.tensor([2.0**20]).view(torch.uint8)
    else:
        place = {"v4": 5 * 576 + at * 8 + 6, "v41_footer": 5 * 512 + at * 16 + 15, "v41_inline": at * 528 + 527}[layout]
        flat[page, place] = 147
    return flat.as_strided(kv.shape, kv.stride()) if flat.data_ptr() == kv.data_ptr() else kv
