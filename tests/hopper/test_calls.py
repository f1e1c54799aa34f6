"""Kinds of calls on the CPU model: scales, strides and pages, long rows, and the names of another Triton."""

from __future__ import annotations

import dataclasses

import pytest

from kgen.check import CaseSpec

from .forms import USUAL, exact_scales
from .running import Form, check, few_heads


@pytest.mark.parametrize(("layout", "form"), [p for p in USUAL if p.values[0] in ("v32", "v4")])
def test_scales(layout: str, form: Form) -> None:
    """A NaN scale of a valid key reaches its rows; scales that fp16 cannot hold go the bf16 way."""
    spec = CaseSpec(layout=layout, heads=few_heads(form), topk=70, tokens=3, index="random")
    check(form, dataclasses.replace(spec, scale_rule="nan_scale", tokens=4), splits=3)
    odd = "odd_fp32" if layout == "v32" else "ue8m0_extremes"
    check(exact_scales(form), dataclasses.replace(spec, scale_rule=odd))


@pytest.mark.parametrize(("layout", "form"), USUAL)
def test_strides_and_pages(layout: str, form: Form) -> None:
    page = {"v32": 61, "v4": 2}.get(layout, 0)
    gap = {"v32": 64, "v4": 4608}.get(layout, 64)
    heads = few_heads(form)
    spec = CaseSpec(layout=layout, heads=heads, topk=70, tokens=4, s_q=2, page=page, page_gap=gap, index="random")
    check(form, spec, exact=False)


@pytest.mark.parametrize(("layout", "form"), USUAL)
def test_names_of_the_next_triton(layout: str, form: Form) -> None:
    check(form, CaseSpec(layout=layout, heads=few_heads(form), topk=70, tokens=1), api="3.9")


@pytest.mark.parametrize(("layout", "form"), USUAL)
def test_many_tiles(layout: str, form: Form) -> None:
    """More than the 2048 keys of the models, for which a kernel may have room."""
    heads = few_heads(form)
    check(form, CaseSpec(layout=layout, heads=heads, topk=2240, slots=2400, tokens=1, lengths="none", index="clean"))
