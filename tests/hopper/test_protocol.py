"""No barrier call of a template can be left out: the protocol check notices each."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from kgen.check.gluon_model import Event, Trace

from .forms import FORMS, usual
from .running import traces_of
from .works import WORKS, Work, protocol, traces, works_of

BARRIER_CALLS = (
    "mbarrier.wait", "mbarrier.arrive", "async_copy.mbarrier_arrive",
    "mbarrier.expect", "cluster_sync", "arrive_at_peer", "copy_to_peer",
)  # fmt: skip


def barrier_calls(text: str) -> dict[tuple[int, int], str]:
    """{(first line, last line): the call}, of every statement that is a barrier call, in the text's order."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) in BARRIER_CALLS:
            found[call.lineno, call.end_lineno or call.lineno] = ast.unparse(call)
    return dict(sorted(found.items()))


def named_calls(text: str) -> dict[tuple[str, int], tuple[int, int]]:
    """{(function, how many of its barrier calls come before): lines}, which another layout's text has at other lines."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    for at in barrier_calls(text):
        function = next(f.name for f in functions if f.lineno <= at[0] <= (f.end_lineno or 0))
        found[function, sum(name == function for name, _ in found)] = at
    return found


FAMILIES = [
    ("bf16_d576", "sm90_ws"), ("bf16_d576", "sm90_few"), ("v4", "sm90_ws_fp8"), ("v4", "sm90_few"), ("v4", "sm90_pair_fp8"),
    ("v32", "sm90_rs_fp8"), ("v4", "sm90_rs_fp8"),
]  # fmt: skip
FAMILIES += [(layout, form.family) for layout in ("v32", "v4") for form in usual(layout) if form.ctas > 1]


@pytest.mark.parametrize(("layout", "family"), FAMILIES)
def test_no_barrier_call_can_be_left_out(layout: str, family: str) -> None:
    """Each call is left out once; in some form and work that must be a fault. A call that this layout's constants leave out, so
    that it runs in another layout's short works alone, is looked at there."""
    forms = [form for form in FORMS[layout] if form.family == family]
    works = [(form, work) for form in forms for work in works_of(layout, form)]
    text = forms[0].text(layout)
    unnoticed = []
    for (first, last), call in barrier_calls(text).items():
        lines = range(first, last + 1)
        if not runs(family, layout, lines) and runs_elsewhere(family, layout, name_of(text, (first, last))):
            continue
        if not any(
            executed(traces(f, layout, w), lines) and not protocol(f, layout, w).check(lines).ok for f, w in works
        ):
            unnoticed.append(f"line {first}: {call}")
    assert unnoticed == []


@pytest.mark.parametrize(("layout", "family"), [pair for pair in FAMILIES if "cluster" not in pair[1]])
def test_the_proof_by_order_says_what_all_interleavings_say(layout: str, family: str) -> None:
    """Of the families whose states can all be visited: what a cluster is checked by, which has too many of them."""
    form = next(form for form in FORMS[layout] if form.family == family)
    protocol_of = protocol(form, layout, WORKS[1])
    assert protocol_of.order().ok
    for first, last in barrier_calls(form.text(layout)):
        lines = range(first, last + 1)
        assert protocol_of.order(lines).ok == protocol_of.check(lines).ok, first


def name_of(text: str, at: tuple[int, int]) -> tuple[str, int]:
    return next(name for name, lines in named_calls(text).items() if lines == at)


def runs(family: str, layout: str, lines: range) -> bool:
    """Whether a form of the family executes these lines in a short work."""
    forms = [form for form in FORMS[layout] if form.family == family]
    return any(executed(traces(form, layout, work), lines) for form in forms for work in WORKS[:2])


def runs_elsewhere(family: str, layout: str, name: tuple[str, int]) -> bool:
    """Whether that holds of the same call in another layout that the test above goes through."""
    for other in (pair[0] for pair in FAMILIES if pair[1] == family and pair[0] != layout):
        text = next(form for form in FORMS[other] if form.family == family).text(other)
        at = named_calls(text).get(name)
        if at is not None and runs(family, other, range(at[0], at[1] + 1)):
            return True
    return False


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
