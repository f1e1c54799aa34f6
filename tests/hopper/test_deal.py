"""Items that programs take from a counter: the model's counter and messages, and sm90_ws with DYNAMIC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kgen.check import CaseSpec, attention_reference, compare, make_case, tolerance_for
from kgen.check.gluon_model import ModelError, run_module, trace_module
from kgen.check.protocol import check_protocol
from kgen.runtime import launch
from kgen.runtime.call import AttentionCall

from .forms import FORMS
from .running import Form, aligned, bound_call, parts_of, traces_of

STATIC = next(form for form in FORMS["bf16_d576"] if form.family == "sm90_ws").replace(dynamic=False)
DYNAMIC = STATIC.replace(dynamic=True)
# lengths from none to several pairs of tiles, so that programs end items at different times
SPEC = CaseSpec(layout="bf16_d512", heads=70, topk=300, tokens=4, lengths="random", index="random", sink="near")
ITEMS = 4 * 2

TEAM = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

@gluon.jit
def hearer(out, word, full, empty):
    i = 0
    item = 0
    while item < 5:
        {wait}
        item = gl.sum(word.load(None), 0)
        mbarrier.arrive(empty, count=1)
        gl.store(out + i, item)
        i += 1

@gluon.jit
def teller(counter, word, full, empty):
    i = 0
    item = 0
    while item < 5:
        item = gl.atomic_add(counter, 2, sem="relaxed")
        mbarrier.wait(empty, (i & 1) ^ 1)
        word.store(gl.full([1], item, gl.int32, None))
        mbarrier.arrive(full, count=1)
        i += 1

@gluon.jit
def kernel(counter, out):
    word = gl.allocate_shared_memory(gl.int32, [1], None)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize([(hearer, (out, word, full, empty)), (teller, (counter, word, full, empty))], [4], [24])
"""


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def team(wait: str = "mbarrier.wait(full, i & 1)") -> str:
    return TEAM.replace("{wait}", wait)


@pytest.mark.parametrize("seed", range(4))
def test_an_item_goes_from_the_counter_to_the_others(seed: int) -> None:
    counter, out = ints(1), ints(*[-1] * 5)
    run_module(team(), {}, (counter, out), (1,), seed, kernel="kernel")
    assert (out.tolist(), counter.tolist()) == ([1, 3, 5, -1, -1], [7])


def test_a_trace_knows_what_is_told() -> None:
    """Three items, each with a wait and an arrive of both; a trace that took other numbers would have more or fewer."""
    traces = trace_module(team(), {}, (ints(1), ints(*[-1] * 5)), (1,), kernel="kernel")
    assert [trace.name for trace in traces] == ["hearer", "teller"]
    assert [sum(event.barrier is not None for event in trace.events) for trace in traces] == [6, 6]
    assert check_protocol(traces).ok
    unasked = trace_module(team("pass"), {}, (ints(1), ints(*[-1] * 5)), (1,), kernel="kernel")
    fault = check_protocol(unasked).fault
    assert fault is not None and fault.kind == "race"


def test_only_one_int_is_added_to() -> None:
    text = team().replace("gl.atomic_add(counter,", "gl.atomic_add(counter + gl.arange(0, 2, None),")
    with pytest.raises(ModelError, match="adds atomically to more than one int"):
        run_module(text, {}, (ints(1), ints(*[-1] * 5)), (1,), kernel="kernel")


def outcome(form: Form, spec: CaseSpec, programs: int, start: int = 0, splits: int = 1) -> tuple[Any, ...]:
    """(bits of out or its parts, lse, max_logits, what the counter holds afterwards, call, inputs)"""
    inputs = aligned(make_case(replace(spec, q_pad=False)))
    call, _ = bound_call(inputs)
    parts = parts_of(call, splits)
    plan = form.plan(call, splits, exact=True)
    counter = launch.item_counter(call, plan)
    if counter is not None:
        counter += start
    args = launch.attention_args(call, parts, plan, counter)
    run_module(form.text(spec.layout), plan.constants, args, form.grid(call, splits, programs), seed=programs)
    results = (call.out, call.lse, call.max_logits) if splits == 1 else parts
    bits = [x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32) for x in results]
    return bits, None if counter is None else int(counter), call, inputs


@pytest.mark.parametrize("splits", [1, 3])
def test_who_serves_an_item_does_not_show(splits: int) -> None:
    """Every item is served once, whoever takes it, and each program asks once more than there is something."""
    spec = SPEC if splits == 1 else replace(SPEC, tokens=2)
    items = spec.tokens * 2 * splits
    expected, _, _, _ = outcome(STATIC, spec, programs=2, splits=splits)
    for programs in (1, 3):
        found, asked, _, _ = outcome(DYNAMIC, spec, programs, splits=splits)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert asked == items


def test_items_that_others_took_are_left_alone() -> None:
    """One program of three that finds the counter at 2: it serves its own item 0 and those from 3 on."""
    _, asked, call, inputs = outcome(DYNAMIC, SPEC, programs=1, start=2)
    truth = attention_reference(inputs)
    served = torch.ones(ITEMS, dtype=torch.bool)
    served[1:3] = False  # of a grid of one, the counter's 2 is item 3
    head = served.view(4, 2).repeat_interleave(64, 1)[:, : SPEC.heads]
    assert asked == ITEMS
    assert torch.equal(call.lse.isnan(), ~head)
    rows = head[..., None].expand_as(call.out)
    report = compare(
        type(truth)(truth.out[rows].view(-1, 1, 512), truth.lse[head][None], truth.max_logits[head][None]),
        tolerance_for(SPEC), call.out[rows].view(-1, 1, 512), call.lse[head][None], call.max_logits[head][None],
    )  # fmt: skip
    assert report.ok, report.sentence


@pytest.mark.parametrize("lengths", [(0,), (64,) * 6, (580, 0, 130, 300, 64)])
def test_the_deal_is_part_of_the_protocol(lengths: tuple[int, ...]) -> None:
    """As many pairs as the lengths have, in each partition, whether the items come by stride or from the counter."""
    pairs = sum(max(1, -(-n // 128)) for n in lengths)
    for form in (STATIC, DYNAMIC):
        traces = traces_of(form, "bf16_d576", lengths)
        left, right, producer = traces
        for trace, barrier in ((left, "ready_s0"), (right, "ready_s1"), (producer, "full_0l")):
            signals = [
                e for e in trace.events if e.kind in ("arrive", "fire") and e.barrier and e.barrier.name == barrier
            ]
            assert len(signals) == pairs
        assert check_protocol(traces).ok


class Recorder:
    """A kernel that notes its arguments and spoils the counter, as one that was aborted would."""

    arg_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.last: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: Any, **_: Any) -> None:
        counter = args[-1]
        if counter.numel() > 1:
            self.last.append(counter)
        else:
            self.last.append(int(counter))
            counter.add_(77)


def launched(form: Form, times: int) -> tuple[list[Any], AttentionCall]:
    call, _ = bound_call(aligned(make_case(SPEC)))
    kernel = Recorder()
    modules = launch.Modules(type("Attention", (), {"attention_kernel": kernel}), None)  # type: ignore[arg-type]
    plan = replace(form.plan(call, 1, exact=True), config=form.replace(persistent=False).plan(call, 1, True).config)
    for _ in range(times):
        launch.launch(call, plan, modules)
    return kernel.last, call


def test_every_launch_begins_at_zero() -> None:
    counters, _ = launched(DYNAMIC, 3)
    assert counters == [0, 0, 0]


def test_without_a_counter_nothing_is_set_up() -> None:
    (placeholder,), call = launched(STATIC, 1)
    assert placeholder is call.main.indices
