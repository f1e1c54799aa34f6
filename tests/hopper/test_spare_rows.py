"""sm90_ws copies a row of the same item where a key is not valid: never one of another item, whose bytes may be NaN."""

from __future__ import annotations

import pytest

from kgen.check import CaseSpec, Inputs, make_case

from .forms import USUAL
from .running import Form, report

PERSISTENT = [each for each in USUAL if "sm90_ws" in {getattr(value, "family", "") for value in each.values}]
# Where the producer forgets the row of the item before: with d512's second buffer it does so ahead of Q, otherwise behind it.
RESET = {
    "bf16_d512": ("        if j == 0:\n            spare = -1\n", ""),
    "bf16_d576": ("            it += 1\n            spare = -1\n", "            it += 1\n"),
}


def poisoned(layout: str) -> tuple[CaseSpec, Inputs]:
    """Items 0 and 2 select a row of NaN as the first key of a pair; items 1 and 3, which follow them in the same program, have
    invalid keys, and no valid key at all."""
    spec = CaseSpec(layout=layout, heads=5, topk=140, tokens=4, lengths="none", index="clean", sink="near", q_pad=False)
    inputs = make_case(spec)
    indices = inputs.indices.view(4, 140)
    victim = int(indices[0, 128])
    inputs.kv.view(-1, inputs.d_qk)[victim] = float("nan")
    indices[0, 128] = indices[2, 128] = victim
    for item in (1, 3):
        indices[item][indices[item] == victim] = -1
        indices[item, :3] = indices[item, 128] = -1
    indices[3] = -1
    return spec, inputs


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("layout", "form"), PERSISTENT)
def test_a_row_of_another_item_is_never_taken(layout: str, form: Form, splits: int) -> None:
    spec, inputs = poisoned(layout)
    found = report(form, spec, splits=splits, programs=1, inputs=inputs)
    assert found.ok, found.sentence


@pytest.mark.parametrize(("layout", "form"), PERSISTENT)
def test_a_spare_row_that_is_kept_is_seen(layout: str, form: Form) -> None:
    spec, inputs = poisoned(layout)
    text = form.text(layout)
    forgets, keeps = RESET[layout]
    assert text.count(forgets) == 1
    found = report(form, spec, programs=1, inputs=inputs, text=text.replace(forgets, keeps))
    assert not found.ok
