"""Every two choices of a search space together, on the CPU model."""

from __future__ import annotations

import pytest

from .forms import PAIRS
from .running import Form, check, plain_case


@pytest.mark.parametrize(
    ("layout", "form", "splits"),
    [pytest.param(*p.values, 1 + i % 3, id=f"{p.id}-{1 + i % 3}") for i, p in enumerate(PAIRS)],
)
def test_every_pair_of_choices_is_right(layout: str, form: Form, splits: int) -> None:
    check(form, plain_case(layout, form, splits), splits, seed=splits)
