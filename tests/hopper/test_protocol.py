"""No barrier call of a template can be left out: the protocol check notices each."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from kgen.check.gluon_model import Event, Trace

from .forms import FORMS
from .running import traces_of
from .works import Work, protocol, traces, works_of

BARRIER_CALLS = ("mbarrier.wait", "mbarrier.arrive", "async_copy.mbarrier_arrive")


def barrier_calls(text: str) -> dict[tuple[int, int], str]:
    """{(first line, last line): the call}, of every statement that is a barrier call."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) in BARRIER_CALLS:
            found[call.lineno, call.end_lineno or call.lineno] = ast.unparse(call)
    return found


FAMILIES = [
    ("bf16_d576", "sm90_ws"), ("bf16_d576", "sm90_few"), ("v4", "sm90_ws_fp8"), ("v4", "sm90_few"), ("v4", "sm90_pair_fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "family"), FAMILIES)
def test_no_barrier_call_can_be_left_out(layout: str, family: str) -> None:
    """Each call is left out once; in some form and work that must be a fault."""
    forms = [form for form in FORMS[layout] if form.family == family]
    runs = [(traces(f, layout, w), protocol(f, layout, w)) for f in forms for w in works_of(layout, f)]
    calls = barrier_calls(forms[0].text(layout))
    lines_of_calls = {line for first, last in calls for line in range(first, last + 1)}
    events = [event for run, _ in runs for trace in run for event in trace.events if event.barrier]
    assert {event.site for event in events} <= lines_of_calls, "a barrier operation that is no plain call"
    unnoticed = []
    for (first, last), call in calls.items():
        lines = range(first, last + 1)
        if not any(executed(run, lines) and not ready.check(lines).ok for run, ready in runs):
            unnoticed.append(f"line {first}: {call}")
    assert unnoticed == []


def executed(run: list[Trace], lines: range) -> bool:
    return any(event.site in lines and event.barrier is not None for trace in run for event in trace.events)


def without_call(text: str, at: tuple[int, int]) -> str:
    """The text with one statement replaced by `pass`; lines stay where they are."""
    lines = text.splitlines()
    first, last = at
    indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
    lines[first - 1 : last] = [" " * indent + "pass"] + [""] * (last - first)
    return "\n".join(lines) + "\n"


def step(event: Event) -> tuple[Any, ...]:
    return (event.kind, event.site, event.number, event.barrier and event.barrier.name)


def test_leaving_out_events_is_deleting_the_call() -> None:
    """`check_protocol(..., without)` sees what the changed text would give."""
    form = FORMS["bf16_d576"][0]
    text = form.text("bf16_d576")
    work = Work((130,))
    for at in barrier_calls(text):
        changed = traces_of(form, "bf16_d576", work.lengths, text=without_call(text, at))
        kept = [
            [step(e) for e in trace.events if not (e.barrier and at[0] <= e.site <= at[1])]
            for trace in traces(form, "bf16_d576", work)
        ]
        assert kept == [[step(e) for e in trace.events] for trace in changed]
