"""sm90_ws masks a tile only where one of its keys is not valid: a single one must be enough, wherever it is.
That is for Triton 3.6; newer ones get every mask."""

from __future__ import annotations

import pytest

from kgen.check import CaseSpec, Inputs, make_case

from .forms import USUAL
from .running import Form, report

WS = [each for each in USUAL if "sm90_ws" in {getattr(value, "family", "") for value in each.values}]
PLACES = (0, 31, 32, 63, 64, 95, 96, 127)  # first and last key of each word of a pair's bits
SKIP = "needed = gl.sum((bits == -1).to(gl.int32), 0) != 2"
WRONG = ("needed = False", "needed = gl.sum((bits == -1).to(gl.int32), 0) == 0")


def one_hole(layout: str) -> tuple[CaseSpec, Inputs]:
    """A token for each place, whose key there is not valid; all others of its 256 keys are."""
    spec = CaseSpec(
        layout=layout, heads=5, topk=256, tokens=len(PLACES), lengths="none", index="clean", sink="near", q_pad=False
    )
    inputs = make_case(spec)
    indices = inputs.indices.view(len(PLACES), 256)
    for token, place in enumerate(PLACES):
        indices[token, place] = -1
    return spec, inputs


@pytest.mark.parametrize("api", ["3.6", "3.9"])
@pytest.mark.parametrize(("layout", "form"), WS)
def test_one_key_that_is_not_valid_is_masked(layout: str, form: Form, api: str) -> None:
    spec, inputs = one_hole(layout)
    found = report(form, spec, inputs=inputs, api=api)
    assert found.ok, found.sentence


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("layout", "form"), WS[:1])
def test_masks_that_are_skipped_too_often_are_seen(layout: str, form: Form, wrong: str) -> None:
    spec, inputs = one_hole(layout)
    text = form.text(layout)
    assert text.count(SKIP) == 1
    assert not report(form, spec, inputs=inputs, text=text.replace(SKIP, wrong)).ok


@pytest.mark.parametrize(("layout", "form"), WS[:1])
def test_newer_tritons_skip_no_mask(layout: str, form: Form) -> None:
    spec, inputs = one_hole(layout)
    text = form.text(layout)
    assert text.count(SKIP) == 1
    found = report(form, spec, inputs=inputs, text=text.replace(SKIP, WRONG[0]), api="3.9")
    assert found.ok, found.sentence
