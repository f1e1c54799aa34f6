"""The barrier protocol of every template is right in all interleavings."""

from __future__ import annotations

import pytest

from .forms import VALUES
from .running import Form
from .works import protocol, works_of


@pytest.mark.parametrize(("layout", "form"), VALUES)
def test_all_interleavings_are_right(layout: str, form: Form) -> None:
    for work in works_of(layout, form):
        verdict = protocol(form, layout, work).check()
        assert verdict.ok, f"{form.family}, {layout}, {work.slug}: {verdict.fault and verdict.fault.sentence}"
