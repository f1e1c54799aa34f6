"""The Hopper templates on the CPU model, against the reference: adversarial cases with the bounds of real runs.

NaN lies in every slot that no valid index names, beside every tensor and in shared memory that was not written.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kgen.check import CaseSpec

from .forms import FORMS, VALUES
from .running import Form, check, few_heads, heads_of, plain_case

EXTRA: dict[str, Any] = {"extra_topk": 100, "extra_page": 2, "extra_slots": 90}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("layout", "form"), VALUES)
def test_every_form_is_right(layout: str, form: Form, splits: int) -> None:
    check(form, plain_case(layout, form, splits), splits, seed=splits, exact=splits > 1)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("form", FORMS["v4"], ids=lambda form: form.family)
def test_two_caches(form: Form, splits: int) -> None:
    """The extra cache's tiles come behind the main one's, so that a tile never mixes them; pages differ."""
    heads = heads_of(form) if splits == 1 else few_heads(form)
    spec = CaseSpec(layout="v4", heads=heads, topk=130, tokens=2, sink="mixed", s_q=2, lengths="half", **EXTRA)
    check(form, spec, splits, seed=splits, exact=splits == 1)
    empty_main = dataclasses.replace(spec, index="all_invalid", heads=few_heads(form), lengths="random", seed=4)
    check(form, empty_main, splits, seed=2)
