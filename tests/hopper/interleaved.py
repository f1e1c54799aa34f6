"""All interleavings of the steps of a small protocol, visited one by one: what a proof by order is compared with."""

from __future__ import annotations

from kgen.check.gluon_model import Barrier
from kgen.check.protocol_order import Order, Step, Use

State = tuple[int, tuple[tuple[int, int, int], ...]]
"""Bits of the steps that are done; of each barrier phases, arrivals and bytes of the one that is filling."""


def fault_of(order: Order, limit: int = 300_000) -> str | None:
    """The kind of a fault that some interleaving has, if one has. Taken from `order`: the steps, and what each must come behind."""
    barriers = list({step.barrier: None for step in order.steps if step.barrier is not None})
    conflicts = [
        (one, two)
        for i, one in enumerate(order.uses)
        for two in order.uses[:i]
        if one.place == two.place and one.atoms & two.atoms and (one.writes or two.writes)
        if one.owner != two.owner or ((one.apart or two.apart) and one.event != two.event)
    ]
    ends: dict[int, list[Step]] = {cta: [] for cta in order.starts}
    for steps, trace in zip(order.threads, order.traces, strict=True):
        ends[trace.cta].append(steps[-1])
    passed: dict[Step, int] = {}
    start: State = (0, ((0, 0, 0),) * len(barriers))
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        moves = [step for step in order.steps if _may(step, state, barriers)]
        for step in moves:
            if step.waits:
                phase = _held(step, state, barriers)[0]
                if passed.setdefault(step, phase) != phase:
                    return "lapped"
            following = _do(step, state, barriers)
            if following is None:
                return "arrivals"
            if following not in seen:
                seen.add(following)
                todo.append(following)
        done = state[0]
        if not moves and done != (1 << len(order.steps)) - 1:
            return "deadlock"
        for one, two in conflicts:
            if _going_on(one, done) and _going_on(two, done):
                return "race"
        for cta, issue, landing, copies in order.posts:
            if _is(issue, done) and not _is(order.starts[cta], done):
                return "early"
            for there in {cta, 1 - cta} if copies else {cta}:
                if all(_is(end, done) for end in ends[there]) and not _is(landing, done):
                    return "ended"
        assert len(seen) < limit, "too many states"
    return None


def _is(step: Step, done: int) -> bool:
    return bool(done >> step.number & 1)


def _going_on(use: Use, done: int) -> bool:
    return _is(use.begin, done) and (use.end is None or not _is(use.end, done))


def _held(step: Step, state: State, barriers: list[Barrier]) -> tuple[int, int, int]:
    assert step.barrier is not None
    return state[1][barriers.index(step.barrier)]


def _may(step: Step, state: State, barriers: list[Barrier]) -> bool:
    done = state[0]
    if _is(step, done) or not all(_is(before, done) for before in step.after):
        return False
    return not step.waits or (_held(step, state, barriers)[0] & 1) != step.parity


def _do(step: Step, state: State, barriers: list[Barrier]) -> State | None:
    """None: more arrivals or bytes than the phase has room for."""
    done, held = state
    done |= 1 << step.number
    if step.barrier is None or step.waits:
        return done, held
    phases, arrivals, size = _held(step, state, barriers)
    arrivals, size = arrivals + step.arrivals, size + step.bytes
    full = arrivals == step.barrier.count
    if arrivals > step.barrier.count or (full and size < 0):
        return None
    at = barriers.index(step.barrier)
    made = (phases + 1, 0, 0) if full and size == 0 else (phases, arrivals, size)
    return done, (*held[:at], made, *held[at + 1 :])
