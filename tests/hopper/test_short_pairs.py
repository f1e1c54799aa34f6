"""sm90_ws: a tile 1 at or beyond the length is neither copied nor multiplied, and everything else is."""

from __future__ import annotations

import pytest
import torch

from kgen.check import CaseSpec, Inputs, make_case

from .forms import USUAL
from .running import Form, report

CASES = [each for each in USUAL if "sm90_ws" in {getattr(value, "family", "") for value in each.values}]
LENGTHS = (1, 64, 65, 128, 129, 192, 193, 0, 200)
PRODUCT = "        if follow >= SAME_ITEM:  # the pair has a tile 1\n"
COPY = "    if not short:\n"


def on_the_edges(layout: str) -> tuple[CaseSpec, Inputs]:
    """Lengths around multiples of 64. Shared memory of the model starts as NaN, so that what was not copied shows."""
    spec = CaseSpec(layout=layout, heads=5, topk=200, tokens=len(LENGTHS), lengths="random", index="clean", sink="near")
    inputs = make_case(spec)
    assert inputs.topk_length is not None
    inputs.topk_length.copy_(torch.tensor(LENGTHS))
    return spec, inputs


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("layout", "form"), CASES)
def test_every_length_counts_its_keys(layout: str, form: Form, splits: int) -> None:
    spec, inputs = on_the_edges(layout)
    for programs in (1, 3):
        found = report(form, spec, splits=splits, programs=programs, inputs=inputs)
        assert found.ok, found.sentence


@pytest.mark.parametrize(("layout", "form"), CASES)
def test_a_product_with_rows_that_were_not_copied_is_seen(layout: str, form: Form) -> None:
    spec, inputs = on_the_edges(layout)
    text = form.text(layout)
    assert text.count(PRODUCT) == 2
    found = report(form, spec, programs=3, inputs=inputs, text=text.replace(PRODUCT, "        if True:\n"))
    assert not found.ok


@pytest.mark.parametrize(("layout", "form"), CASES)
@pytest.mark.parametrize(
    ("right", "wrong"), [("length - pos <= 64", "length - pos <= 65"), ("gl.where(short, -2 - item, item)", "item")]
)
def test_a_tile_that_is_wrongly_missed_is_seen(layout: str, form: Form, right: str, wrong: str) -> None:
    """Keys that count are not copied, or rows that were not copied count."""
    spec, inputs = on_the_edges(layout)
    text = form.text(layout)
    assert text.count(right) == 1
    found = report(form, spec, programs=3, inputs=inputs, text=text.replace(right, wrong))
    assert not found.ok
