"""The Hopper templates on the CPU model, against the reference: adversarial cases with the bounds of real runs.

NaN lies in every slot that no valid index names, beside every tensor and in shared memory that was not written.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kgen.check import CaseSpec

from .forms import FORMS, USUAL, VALUES, exact_scales
from .running import Form, check, heads_of, plain_case

EXTRA: dict[str, Any] = {"extra_topk": 100, "extra_page": 2, "extra_slots": 90}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("layout", "form"), VALUES)
def test_every_form_is_right(layout: str, form: Form, splits: int) -> None:
    check(form, plain_case(layout, form, splits), splits, seed=splits, exact=splits > 1)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("form", FORMS["v4"], ids=lambda form: form.family)
def test_two_caches(form: Form, splits: int) -> None:
    """The extra cache's tiles come behind the main one's, so that a tile never mixes them; pages differ."""
    heads = heads_of(form) if splits == 1 else 5
    spec = CaseSpec(layout="v4", heads=heads, topk=130, tokens=2, sink="mixed", s_q=2, lengths="half", **EXTRA)
    check(form, spec, splits, seed=splits, exact=splits == 1)
    empty_main = dataclasses.replace(spec, index="all_invalid", heads=5, lengths="random", seed=4)
    check(form, empty_main, splits, seed=2)


@pytest.mark.parametrize(("layout", "form"), [p for p in USUAL if p.values[0] in ("v32", "v4")])
def test_scales(layout: str, form: Form) -> None:
    """A NaN scale of a valid key reaches its rows; scales that fp16 cannot hold go the bf16 way."""
    spec = CaseSpec(layout=layout, heads=5, topk=70, tokens=3, index="random")
    check(form, dataclasses.replace(spec, scale_rule="nan_scale", tokens=4), splits=3)
    odd = "odd_fp32" if layout == "v32" else "ue8m0_extremes"
    check(exact_scales(form), dataclasses.replace(spec, scale_rule=odd))


@pytest.mark.parametrize(("layout", "form"), USUAL)
def test_strides_and_pages(layout: str, form: Form) -> None:
    page = {"v32": 61, "v4": 2}.get(layout, 0)
    gap = {"v32": 64, "v4": 4608}.get(layout, 64)
    spec = CaseSpec(layout=layout, heads=5, topk=70, tokens=4, s_q=2, page=page, page_gap=gap, index="random")
    check(form, spec, exact=False)


@pytest.mark.parametrize(("layout", "form"), USUAL)
def test_names_of_the_next_triton(layout: str, form: Form) -> None:
    check(form, CaseSpec(layout=layout, heads=5, topk=70, tokens=1), api="3.9")
