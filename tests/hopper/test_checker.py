"""The protocol check itself, on small kernels with known faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kgen.check.gluon_model import ModelError, Trace, run_module, trace_module
from kgen.check.protocol import Verdict, check_protocol

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    b = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(b.index(i), count=COUNT)
    return b
"""

RING = """
@gluon.jit
def producer(src, n, ring, full, empty, STAGES: gl.constexpr):
    for i in range(n):
        st = i % STAGES
        mbarrier.wait(empty.index(st), ((i // STAGES) & 1) ^ 1)
        {copy}
        {arrive}

@gluon.jit
def consumer(out, n, ring, full, empty, STAGES: gl.constexpr):
    for i in range(n):
        st = i % STAGES
        mbarrier.wait(full.index({slot}), {parity})
        x = ring.index(st).load(None)
        {release}
        gl.store(out + i * 16 + gl.arange(0, 16, None), x)

@gluon.jit
def kernel(src, out, n, STAGES: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, 16], None)
    full = barriers({fulls}, {count})
    empty = barriers(STAGES, 1)
    gl.warp_specialize([
        (consumer, (out, n, ring, full, empty, STAGES)),
        (producer, (src, n, ring, full, empty, STAGES)),
    ], [4], [24])
"""

GOOD = {
    "copy": "async_copy.async_copy_global_to_shared(ring.index(st), src + i * 16 + gl.arange(0, 16, None))",
    "arrive": "async_copy.mbarrier_arrive(full.index(st), increment_count=False)",
    "release": "mbarrier.arrive(empty.index(st), count=1)",
    "slot": "st",
    "parity": "(i // STAGES) & 1",
    "fulls": "STAGES",
    "count": "128",
}
PLAIN = GOOD | {
    "copy": "ring.index(st).store(gl.load(src + i * 16 + gl.arange(0, 16, None)))",
    "arrive": "mbarrier.arrive(full.index(st), count=1)",
    "count": "1",
}
FAULTS: dict[str, tuple[dict[str, str], str]] = {
    "the slot is released before it is read": (GOOD | {"release": "pass"}, "deadlock"),
    "nothing says that the slot is full": (PLAIN | {"arrive": "pass"}, "deadlock"),
    "the copy is said to be there at its issue": (
        GOOD | {"arrive": "mbarrier.arrive(full.index(st), count=128)"},
        "own",  # and the next one to the slot begins
    ),
    "one barrier for all slots": (
        PLAIN | {"slot": "0", "arrive": "mbarrier.arrive(full.index(0), count=1)", "fulls": "1", "parity": "i & 1"},
        "lapped",
    ),
    "twice as many arrivals": (PLAIN | {"arrive": "mbarrier.arrive(full.index(st), count=2)"}, "arrivals"),
    "the wrong parity": (GOOD | {"parity": "((i // STAGES) & 1) ^ 1"}, "race"),
}


def ring_args(n: int) -> list[Any]:
    return [torch.arange(16 * n, dtype=torch.int32), torch.full((16 * n,), -1, dtype=torch.int32), n]


def ring_verdict(pieces: dict[str, str], n: int = 5, stages: int = 2) -> Verdict:
    text = HEAD + RING.format(**pieces)
    return check_protocol(trace_module(text, {"STAGES": stages}, ring_args(n), (1,), kernel="kernel"))


@pytest.mark.parametrize("pieces", [GOOD, PLAIN], ids=["copies", "stores"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_ring_is_right(pieces: dict[str, str], stages: int) -> None:
    verdict = ring_verdict(pieces, 2 * stages + 1, stages)
    assert verdict.ok, verdict.fault
    for seed in range(5):
        args = ring_args(7)
        run_module(HEAD + RING.format(**pieces), {"STAGES": stages}, args, (1,), seed, kernel="kernel")
        assert torch.equal(args[0], args[1])


def test_states_of_a_ring_by_hand() -> None:
    """One slot, one item: the producer waits, stores, arrives; the consumer waits, loads, releases. In order, 5 states."""
    assert ring_verdict(PLAIN, 1, 1).states == 5


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_ring(name: str) -> None:
    pieces, kind = FAULTS[name]
    verdict = ring_verdict(pieces)
    assert verdict.fault is not None and verdict.fault.kind == kind, verdict


def test_a_read_meets_a_copy() -> None:
    early = GOOD | {"arrive": "mbarrier.arrive(full.index(st), count=128)"}
    verdict = ring_verdict(early, n=2)
    assert verdict.fault is not None and verdict.fault.kind == "race"


def test_two_consumers_must_both_release() -> None:
    """A barrier that one consumer completes alone lets the producer overwrite what the other still reads."""
    for count, sound in ((2, True), (1, False)):
        text = HEAD + TWO.format(count=count)
        traces = trace_module(text, {}, [torch.zeros(16, dtype=torch.int32)], (1,), kernel="kernel")
        verdict = check_protocol(traces)
        assert verdict.ok == sound
        assert sound or (verdict.fault is not None and verdict.fault.kind in ("race", "lapped"))


TWO = """
@gluon.jit
def producer(src, buf, full, empty):
    for i in range(4):
        mbarrier.wait(empty.index(0), (i & 1) ^ 1)
        buf.store(gl.load(src + gl.arange(0, 16, None)))
        mbarrier.arrive(full.index(0), count=1)

@gluon.jit
def consumer(buf, full, empty):
    for i in range(4):
        mbarrier.wait(full.index(0), i & 1)
        x = buf.load(None)
        mbarrier.arrive(empty.index(0), count=1)

@gluon.jit
def kernel(src):
    buf = gl.allocate_shared_memory(gl.int32, [16], None)
    full = barriers(1, 1)
    empty = barriers(1, {count})
    gl.warp_specialize([
        (consumer, (buf, full, empty)), (consumer, (buf, full, empty)), (producer, (src, buf, full, empty)),
    ], [4, 4], [24, 24])
"""

OWN = """
@gluon.jit
def group(a, b, n):
    acc = gl.zeros([64, 64], gl.float32, None)
    for i in range(n):
        {early}
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        {late}

@gluon.jit
def other(n):
    pass

@gluon.jit
def kernel(n):
    a = gl.allocate_shared_memory(gl.float16, [64, 64], None)
    b = gl.allocate_shared_memory(gl.float16, [64, 64], None)
    gl.warp_specialize([(group, (a, b, n)), (other, (n,))], [4], [24])
"""


def test_a_store_under_the_own_wgmma() -> None:
    store = "a.store(gl.zeros([64, 64], gl.float16, None))"
    right = OWN.format(early=store, late="pass")
    wrong = right.replace(f"        {store}\n", "").replace("is_async=True)\n", f"is_async=True)\n        {store}\n")
    for text, sound in ((right, True), (wrong, False)):
        verdict = check_protocol(trace_module(HEAD + text, {}, [3], (1,), kernel="kernel"))
        assert verdict.ok == sound
        assert sound or (verdict.fault is not None and verdict.fault.kind == "own")


HALVES = """
@gluon.jit
def writer(buf):
    buf.slice(0, 32, dim=1).store(gl.zeros([8, 32], gl.int32, None))

@gluon.jit
def reader(buf):
    x = buf.slice({start}, 32, dim=1).load(None)

@gluon.jit
def kernel(n):
    buf = gl.allocate_shared_memory(gl.int32, [8, 64], None)
    gl.warp_specialize([(writer, (buf,)), (reader, (buf{view},))], [4], [24])
"""


@pytest.mark.parametrize(
    ("start", "view", "sound"),
    [(32, "", True), (31, "", False), (0, "._reinterpret(gl.int32, [4, 64], None)", False)],
    ids=["other half", "one column", "another view"],
)
def test_slices_overlap_by_their_bytes(start: int, view: str, sound: bool) -> None:
    text = HEAD + HALVES.format(start=start, view=view)
    if view:
        text = text.replace("x = buf", "x = buf.slice(0, 4, dim=0)")
    verdict = check_protocol(trace_module(text, {}, [1], (1,), kernel="kernel"))
    assert verdict.ok == sound


BRANCH = """
@gluon.jit
def writer(buf, bar):
    buf.slice(0, 32, dim=1).store(gl.zeros([8, 32], gl.int32, None))

@gluon.jit
def reader(buf, bar):
    x = buf.slice(32, 32, dim=1).load(None)
    if gl.max(x) > 0:
        {then}
    else:
        {otherwise}

@gluon.jit
def kernel(n):
    buf = gl.allocate_shared_memory(gl.int32, [8, 64], None)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(writer, (buf, bar)), (reader, (buf, bar))], [4], [24])
"""


def branched(then: str, otherwise: str = "pass") -> list[Trace]:
    text = HEAD + BRANCH.format(then=then, otherwise=otherwise)
    return trace_module(text, {}, [1], (1,), kernel="kernel")


@pytest.mark.parametrize(("start", "sound"), [(32, True), (31, False)])
def test_what_a_branch_on_data_reads_counts(start: int, sound: bool) -> None:
    assert check_protocol(branched("pass")).ok
    assert check_protocol(branched(f"buf.slice({start}, 32, dim=1).load(None)")).ok == sound


@pytest.mark.parametrize("other", ["mbarrier.arrive(bar, count=1)", "mbarrier.wait(bar, 1)", "buf.load(None)"])
def test_control_flow_on_data_is_refused(other: str) -> None:
    """Where the way that is not traced has more than the one that is, and where either has barrier operations."""
    with pytest.raises(ModelError, match="Control flow depends on tensor data"):
        branched("pass", other)
    if "mbarrier" in other:
        with pytest.raises(ModelError, match="Control flow depends on tensor data"):
            branched(other)
