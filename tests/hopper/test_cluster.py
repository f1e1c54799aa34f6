"""Clusters of two CTAs, in the model and in the protocol check, on small kernels with known faults."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kgen.check.gluon_model import Deadlock, ModelError, Trace, run_module, trace_module
from kgen.check.protocol import Protocol, check_protocol
from kgen.check.protocol_order import Order

from .interleaved import fault_of

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

TILE = gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[0, 0]])
WORDS = gl.NVMMASharedLayout(128, 32, 2, cga_layout=[[0, 0]])
OWN = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, 4, 1], [2, 1, 0], cga_layout=[[1, 0, 0]])
reinterpret = gl.shared_memory_descriptor._reinterpret

# the model's stand in for these
def cluster_rank(): ...
def cluster_sync(): ...
def find_shared(tiles, barriers): ...
def copy_to_peer(source, barrier, CHUNKS): ...
def arrive_at_peer(barrier): ...

def new_barrier(count):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout(cga_layout=[[0]]))
    mbarrier.init(barrier, count=count)
    return barrier
"""


def run(body: str, *args: Any, grid: int = 1, seed: int = 0, ctas: int = 2, before: str = "") -> None:
    """Run a kernel whose parameters are a0, a1, ..."""
    names = ", ".join(f"a{i}" for i in range(len(args)))
    lines = "\n".join("    " + line for line in body.strip("\n").splitlines())
    text = f"{HEAD}{before}\ndef kernel({names}):\n{lines}\n"
    run_module(text, {}, args, (grid,), seed, kernel="kernel", num_ctas=ctas)


# ---------------------------------------------------------------------------------------------- what a CTA holds

BY_CTA = """
cta = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, OWN)))[:, None, None]
col = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, OWN)))[None, None, :]
at = a0 + gl.program_id(0) * 8 + cta * 4 + col
"""


def test_a_cta_stores_the_slice_of_its_rank() -> None:
    """Programs are clusters; of a block whose first dim is the CTA each has its own part."""
    out = torch.full((16,), -1, dtype=torch.int32)
    x = "gl.full([2, 1, 4], 100, gl.int32, OWN)"
    run(BY_CTA + f"gl.store(at, {x} * gl.program_id(0) + 10 * cluster_rank() + gl.num_programs(0))", out, grid=2)
    assert out.view(2, 2, 4)[:, :, 0].tolist() == [[2, 12], [102, 112]]
    assert bool((out.view(4, 4) == out.view(4, 4)[:, :1]).all())


def test_registers_of_the_grid() -> None:
    """CTAs of a cluster are neighbours in the grid."""
    out = torch.zeros(2, 2, 4, dtype=torch.int32)
    asm = "mov.u32 $0, %nctaid.x; mul.lo.s32 $0, $0, 100; mov.u32 $1, %ctaid.x; add.s32 $0, $0, $1;"
    call = f'gl.inline_asm_elementwise("{asm}", "=r,=r", [], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)[0]'
    run(BY_CTA + f"gl.store(at, gl.full([2, 1, 4], 1, gl.int32, OWN) * {call})", out, grid=2)
    assert out[:, :, 0].tolist() == [[400, 401], [402, 403]]


def test_what_both_hold_is_stored_by_the_first() -> None:
    out = torch.full((4,), -1, dtype=torch.int32)
    run("gl.store(a0 + gl.arange(0, 4, None), 7 + cluster_rank())", out)
    assert out.tolist() == [7] * 4


def test_a_cta_loads_the_slice_of_its_rank() -> None:
    """The rest is not there: as little as shared memory of the other CTA."""
    out, source = torch.zeros(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    run(BY_CTA + "gl.store(at, gl.load(a1 + cta * 4 + col, mask=col < 4))", out, source)
    assert out.tolist() == list(range(8))
    run(BY_CTA + "x = gl.load(a1 + cta * 4 + col)\ngl.store(at + (1 - 2 * cta) * 0, x)", out, source)
    assert out.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("gl.sum(cta * 1, 0)", "reduces a block of which each CTA has its own part"),
        ("gl.convert_layout(cta, gl.BlockedLayout([1], [1], [1], [0], cga_layout=[[0]]))", "moves to another CTA"),
        ("gl.arange(0, 4, gl.BlockedLayout([1], [1], [1], [0], cga_layout=[[1], [2]]))", "has one for two CTAs"),
        ("cluster_sync()", "outside warp_specialize"),
        ("arrive_at_peer(find_shared((), (new_barrier(1),))[0])", "before both CTAs have met"),
        ("arrive_at_peer(find_shared((), (new_barrier(1),))[0] + 4)", "is no barrier"),
        ("arrive_at_peer(find_shared((), (new_barrier(1),))[0] + 512)", "where nothing lies"),
        (
            "copy_to_peer(find_shared((), (new_barrier(1),))[0], 0, 4)",
            "no tile of 64 rows",
        ),
        (
            "copy_to_peer(find_shared((gl.allocate_shared_memory(gl.float16, [64, 256], TILE),), ())[0] + 128, 0, 4)",
            "which are not 32 rows of it",
        ),
    ],
)
def test_mistakes_are_sentences(body: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        run(BY_CTA + body, torch.zeros(16, dtype=torch.int32))


def test_a_helper_must_be_the_models() -> None:
    with pytest.raises(ModelError, match=r"arrive_at_peer takes \['barrier', 'count'\]"):
        run("pass", before="def arrive_at_peer(barrier, count): ...\n")
    with pytest.raises(ModelError, match="it runs with one"):
        run("cluster_rank()", ctas=1)


# ---------------------------------------------------------------------------------------------- views of a tile

VIEWS = {
    "32 rows of 64 columns": "reinterpret(tile, gl.int32, [8, 32, 32], WORDS).index(5)",
    "64 rows of 128 columns": "reinterpret(tile, gl.float16, [2, 64, 128], TILE).index(1)",
    "32 rows of all columns": """reinterpret(
    reinterpret(tile, gl.int32, [8, 32, 32], WORDS).index(1), gl.int32, [32, 128],
    gl.SharedLinearLayout({bases}, [[0, 0]], 1024))""",
}
SWIZZLED = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4], [2, 8], [4, 16], [8, 0], [16, 0], [0, 0], [0, 32], [0, 64]]


def seen(view: str) -> torch.Tensor:
    """A tile [64, 256] of 16-bit elements, of which a view was filled with ones."""
    out = torch.zeros(64, 256, dtype=torch.float16)
    body = f"""
tile = gl.allocate_shared_memory(gl.float16, [1, 64, 256], TILE)
tile.index(0).store(gl.zeros([64, 256], gl.float16, None))
view = {view}
one = 0x3C003C00 if view.dtype == gl.int32 else 1.0
view.store(gl.full(view.shape, one, view.dtype, None))
at = a0 + gl.arange(0, 64, None)[:, None] * 256 + gl.arange(0, 256, None)[None, :]
gl.store(at, tile.index(0).load(None))
"""
    run(body, out)
    return out


def test_views_by_their_place_in_memory() -> None:
    """64 columns of all rows lie side by side in memory, so that 4 KB are half of the rows of those."""
    expected = torch.zeros(64, 256, dtype=torch.float16)
    expected[32:, 128:192] = 1
    assert torch.equal(seen(VIEWS["32 rows of 64 columns"]), expected)
    expected.zero_()[:, 128:] = 1
    assert torch.equal(seen(VIEWS["64 rows of 128 columns"]), expected)
    expected.zero_()[32:] = 1
    assert torch.equal(seen(VIEWS["32 rows of all columns"].format(bases=SWIZZLED)), expected)


@pytest.mark.parametrize("at", range(5, 8))
def test_another_swizzle_is_no_view(at: int) -> None:
    wrong = [[row, 0] if i == at else [row, col] for i, (row, col) in enumerate(SWIZZLED)]
    with pytest.raises(ModelError, match="whose rows are no rows of the tile"):
        seen(VIEWS["32 rows of all columns"].format(bases=wrong))
    with pytest.raises(ModelError, match="ends behind its buffer"):
        seen(VIEWS["32 rows of all columns"].format(bases=SWIZZLED).replace("index(1)", "index(3)"))


# ---------------------------------------------------------------------------------------------- copies to each other

EXCHANGE = """
def producer(out, n, tile, full, free, at, at_full, at_free):
    {start}
    rank = cluster_rank()
    for i in range(n):
        {wait}
        tile.index(0).slice(rank * 32, 32).store(gl.full([32, 256], 10.0, gl.float16, None) * i + (rank + 1))
        {threads}
        {expect}
        {send}
        {behind}
    {end}

def consumer(out, n, tile, full, free, at, at_full, at_free):
    {start}
    cta = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, OWN)))[:, None, None]
    row = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    col = gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, OWN)))[None, None, :]
    for i in range(n):
        {arrived}
        x = tile.index(0).load(gl.SliceLayout(0, OWN))
        {release}
        {post}
        gl.store(out + i * 32768 + cta * 16384 + row * 256 + col, x[None, :, :])
    {end}

def kernel(out, n):
    tile = gl.allocate_shared_memory(gl.float16, [1, 64, 256], TILE)
    full = new_barrier(1)
    free = new_barrier({count})
    at, at_full, at_free = find_shared((tile,), (full, free))
    args = (out, n, tile, full, free, at, at_full, at_free)
    gl.warp_specialize([(consumer, args), (producer, args)], [4], [24])
"""
GOOD = {
    "start": "cluster_sync()",
    "wait": "mbarrier.wait(free, (i & 1) ^ 1)",
    "threads": "gl.thread_barrier()",
    "expect": "mbarrier.expect(full, 16384)",
    "send": "copy_to_peer(at + rank * 4096, at_full, 4)",
    "behind": "pass",
    "end": "cluster_sync()",
    "arrived": "mbarrier.wait(full, i & 1)",
    "release": "mbarrier.arrive(free, count=1)",
    "post": "arrive_at_peer(at_free)",
    "count": "2",
}
FAULTS: dict[str, tuple[dict[str, str], str, set[str]]] = {
    # what differs, what the model may say about it in some interleaving, kinds that the protocol check may find
    "speaking before the other CTA is there": ({"start": "pass"}, "before both CTAs have met", {"early"}),
    "ending without the other CTA": ({"end": "pass"}, "has ended", {"ended"}),
    "too few bytes": ({"expect": "mbarrier.expect(full, 8192)"}, "8192 more bytes|wrong", {"arrivals"}),
    "too many bytes": ({"expect": "mbarrier.expect(full, 32768)"}, "16384 bytes missing", {"deadlock"}),
    "no bytes": ({"expect": "mbarrier.arrive(full, count=1)"}, "16384 more bytes|wrong|arrives at full", {"arrivals"}),
    "half of the columns": (
        {"send": "copy_to_peer(at + rank * 4096, at_full, 2)", "expect": "mbarrier.expect(full, 8192)"},
        "wrong",
        set(),  # bytes that nobody writes are no matter of order
    ),
    "writing while the other CTA reads": (
        {"count": "1", "post": "pass"},
        "wrong|its source has changed|more bytes|arrives at full",
        {"race", "arrivals", "ended"},
    ),
    "never free": ({"post": "pass"}, "consumer of CTA . waits|producer of CTA . waits", {"deadlock"}),
    "not waiting for rows": ({"arrived": "pass"}, "wrong|arrives at f|waits for parity", {"deadlock"}),
    "writing over what is being sent": (
        {"behind": "tile.index(0).slice(rank * 32, 32).store(gl.zeros([32, 256], gl.float16, None))"},
        "wrong|its source has changed",
        {"race"},
    ),
    "one arrival for two": ({"release": "pass", "post": "arrive_at_peer(at_free)"}, "waits for parity", {"deadlock"}),
}


def exchanged(pieces: dict[str, str], n: int, seed: int) -> bool:
    """Whether every CTA has the rows of both."""
    out = torch.full((n, 2, 64, 256), -1.0, dtype=torch.float16)
    run_module(HEAD + EXCHANGE.format(**pieces), {}, [out, n], (1,), seed, kernel="kernel", num_ctas=2)
    expected = 10 * torch.arange(n)[:, None] + torch.arange(64) // 32 + 1
    return torch.equal(out, expected.half()[:, None, :, None].expand(out.shape))


def traces_of(pieces: dict[str, str], n: int) -> list[Trace]:
    out = torch.zeros(n, 2, 64, 256, dtype=torch.float16)
    return trace_module(HEAD + EXCHANGE.format(**pieces), {}, [out, n], (1,), kernel="kernel", num_ctas=2)


@pytest.mark.parametrize("n", [1, 4])
def test_an_exchange_is_right(n: int) -> None:
    assert all(exchanged(GOOD, n, seed) for seed in range(10))
    verdict = check_protocol(traces_of(GOOD, n))
    assert verdict.ok, verdict.fault


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_an_exchange_show_in_the_model(name: str) -> None:
    """In one of a few interleavings at least, as a sentence or as wrong numbers."""
    change, says, _ = FAULTS[name]
    found = set()
    for seed in range(12):
        try:
            found.add("right" if exchanged(GOOD | change, 3, seed) else "wrong")
        except (Deadlock, ModelError) as error:
            found.add(str(error))
    assert any(re.search(says, sentence) for sentence in found), found


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_an_exchange_are_proved(name: str) -> None:
    change, _, kinds = FAULTS[name]
    verdict = check_protocol(traces_of(GOOD | change, 3))
    assert (verdict.fault.kind in kinds) if verdict.fault else not kinds, verdict


def test_one_thread_must_not_arrive_for_others() -> None:
    with pytest.raises(ModelError, match="that some threads may not have done"):
        exchanged(GOOD | {"threads": "pass"}, 1, 0)
    with pytest.raises(ModelError, match="that some threads may not have done"):
        traces_of(GOOD | {"threads": "pass"}, 1)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_call_of_an_exchange_can_be_left_out(n: int) -> None:
    """By line, of a text in which every call stands once. A tile that is written once is free."""
    traces = traces_of(GOOD, n)
    sites = {event.site for trace in traces for event in trace.events if event.barrier}
    protocol = Protocol(traces)
    lines = (HEAD + EXCHANGE.format(**GOOD)).splitlines()
    unnoticed = {lines[site - 1].strip() for site in sites if protocol.check({site}).ok}
    assert unnoticed == ({GOOD[name] for name in ("wait", "release", "post")} if n == 1 else set())


@pytest.mark.parametrize("name", ["nothing", *FAULTS])
def test_the_proof_is_what_all_interleavings_say(name: str) -> None:
    """All states of a short exchange are visited, as it is and with each call left out: there is a fault exactly if the proof
    finds one."""
    change = {} if name == "nothing" else FAULTS[name][0]
    for n in (1, 2):
        traces = traces_of(GOOD | change, n)
        protocol = Protocol(traces)
        for left_out in (None, *{event.site for trace in traces for event in trace.events if event.barrier}):
            without = () if left_out is None else (left_out,)
            proved = protocol.check(without).fault
            visited = fault_of(Order(traces, protocol.atoms, without))
            assert (proved is None) == (visited is None), (name, n, left_out, proved, visited)
