"""The barrier protocol of every template is right in all interleavings."""

from __future__ import annotations

import pytest

from .forms import VALUES
from .running import Form
from .test_protocol import barrier_calls
from .works import protocol, traces, works_of


@pytest.mark.parametrize(("layout", "form"), VALUES)
def test_all_interleavings_are_right(layout: str, form: Form) -> None:
    lines = {line for first, last in barrier_calls(form.text(layout)) for line in range(first, last + 1)}
    for work in works_of(layout, form):
        sites = {event.site for trace in traces(form, layout, work) for event in trace.events if event.barrier}
        assert sites <= lines, "a barrier operation that is no plain call, which test_protocol does not leave out"
        verdict = protocol(form, layout, work).check()
        assert verdict.ok, f"{form.family}, {layout}, {work.slug}: {verdict.fault and verdict.fault.sentence}"
