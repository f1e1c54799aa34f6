"""The barrier protocol of every template: all interleavings are right, and no barrier call can be left out.

One program serves all items, so that rings and parities go round several times and items of different lengths follow each other.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from kgen.check.gluon_model import Event, Trace
from kgen.check.protocol import Protocol

from .forms import FORMS, VALUES
from .running import Form, traces_of

BARRIER_CALLS = ("mbarrier.wait", "mbarrier.arrive", "async_copy.mbarrier_arrive")

HARMLESS: dict[str, tuple[str, str]] = {}
"""Calls that may be left out, by family: (the call's text, why). There should be none."""


@dataclass(frozen=True)
class Work:
    """What one program does: an item per token and split."""

    lengths: tuple[int, ...]
    splits: int = 1
    extra: tuple[int, ...] = ()

    @property
    def slug(self) -> str:
        return "-".join(map(str, self.lengths + self.extra)) + f"x{self.splits}"


WORKS = (
    Work((64,)),
    Work((200, 130)),
    Work((64,) * 6),
    Work((200, 0, 64, 300)),
    Work((300, 70), splits=3),
    Work((580, 600)),
)
DUAL_WORKS = (Work((100, 0, 70), 1, (64, 130, 0)), Work((200, 64), 3, (100, 30)))


def works_of(layout: str) -> tuple[Work, ...]:
    return WORKS + (DUAL_WORKS if layout == "v4" else ())


@cache
def traces(form: Form, layout: str, work: Work) -> list[Trace]:
    # a form that is not persistent serves one item per program: here the first
    return traces_of(form, layout, work.lengths, work.splits, work.extra)


@cache
def protocol(form: Form, layout: str, work: Work) -> Protocol:
    return Protocol(traces(form, layout, work))


@pytest.mark.parametrize(("layout", "form"), VALUES)
def test_all_interleavings_are_right(layout: str, form: Form) -> None:
    for work in works_of(layout):
        verdict = protocol(form, layout, work).check()
        assert verdict.ok, f"{form.family}, {layout}, {work.slug}: {verdict.fault and verdict.fault.sentence}"


def barrier_calls(text: str) -> dict[tuple[int, int], str]:
    """{(first line, last line): the call}, of every statement that is a barrier call."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) in BARRIER_CALLS:
            found[call.lineno, call.end_lineno or call.lineno] = ast.unparse(call)
    return found


FAMILIES = [("bf16_d576", "sm90_ws"), ("bf16_d576", "sm90_few"), ("v4", "sm90_ws_fp8"), ("v4", "sm90_few")]


@pytest.mark.parametrize(("layout", "family"), FAMILIES)
def test_no_barrier_call_can_be_left_out(layout: str, family: str) -> None:
    """Each call is left out once; in some form and work that must be a fault."""
    forms = [form for form in FORMS[layout] if form.family == family]
    runs = [(traces(form, layout, w), protocol(form, layout, w)) for w in works_of(layout) for form in forms]
    calls = barrier_calls(forms[0].text(layout))
    assert len(calls) > 5
    unnoticed = []
    for (first, last), call in calls.items():
        lines = range(first, last + 1)
        if not any(executed(run, lines) and not ready.check(lines).ok for run, ready in runs):
            unnoticed.append(f"line {first}: {call}")
    allowed = HARMLESS.get(family, ())
    assert [call for call in unnoticed if not any(words in call for words in allowed[:1])] == []


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
