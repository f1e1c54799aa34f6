"""Exhaustive check of a kernel's barrier protocol, from the traces of its partitions (`gluon_model.trace_module`).

An agent is a partition, or the copy engine of one (its cp.async, which complete in order at any later time). What a partition
does between two barrier operations is a segment. A state is the segment of each partition and how many of its arrives each
engine has fired; which phase a barrier is in follows from that. All reachable states are visited, and in each it is asked:

* deadlock: can nobody move, though somebody has not ended?
* race: may two agents use the same bytes now, one of them writing? Nothing orders those two uses.
* lapped: does a wait find its phase complete in one interleaving, and a later one in another? Parity cannot tell them apart.
* arrivals: does an arrive bring more than its phase misses?
* own: does a partition touch bytes that its own wgmma, bulk store or copy still uses?

Plain loads and stores are instantaneous; wgmma reads until the wait that retires it; a copy writes until its arrive fires or
a wait_group of its partition covers it. The search stops at the first fault.
Two CTAs of a cluster have too many states to visit: `protocol_order` proves the same of theirs.

Where there is none, every read sees the same write in all interleavings. No wait is lapped, so that what may move goes on being
able to move while others do, and for two reachable states the state that has the further segment of each agent is reachable too.
If a use of A came before a conflicting one of B in one interleaving and behind it in another, take the state in which A entered
its segment in the first and that in which B entered its own in the second: both stand in those segments at once, a race.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .gluon_model import Trace
from .protocol_agents import Access, Agent, Fault, Tables, agents_of, atoms_of, conflicts_of
from .protocol_order import Order

__all__ = ["Fault", "Protocol", "Verdict", "check_protocol"]


@dataclass(frozen=True)
class Verdict:
    """The first fault that was found, or None after all states. `states`: how many; of a proof, its steps."""

    fault: Fault | None
    states: int

    @property
    def ok(self) -> bool:
        return self.fault is None


class Protocol:
    """The traces of a program's partitions, ready to be checked, also with barrier operations left out."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces
        self.atoms = atoms_of(traces)
        self._cluster = any(trace.cta for trace in traces)
        self._conflicts = {} if self._cluster else conflicts_of(agents_of(traces, self.atoms))

    def check(self, without: Collection[int] = (), limit: int = 2_000_000) -> Verdict:
        """Explore all interleavings. `without`: lines of the kernel's text whose barrier operations are left out, as if they
        had been deleted. More than `limit` states raise a ValueError: choose fewer tiles or items. Of a cluster: see `order`."""
        if self._cluster:
            return self.order(without)
        agents = agents_of(self._traces, self.atoms, without)
        for agent in agents:
            fault = _own_fault(agent)
            if fault:
                return Verdict(fault, 0)
        return _Search(agents, Tables(agents, self._conflicts), limit).run()

    def order(self, without: Collection[int] = ()) -> Verdict:
        """The same by a proof (`protocol_order`), whose cost grows with the steps, not with the interleavings."""
        order = Order(self._traces, self.atoms, without)
        return Verdict(order.check(), len(order.steps))


def check_protocol(traces: Sequence[Trace], without: Collection[int] = ()) -> Verdict:
    """`Protocol(traces).check(without)`."""
    return Protocol(traces).check(without)


def _own_fault(agent: Agent) -> Fault | None:
    """Uses of bytes that background work of the same partition still uses; copies that fire are left to the search."""
    for slow in agent.accesses:
        if slow.fire >= 0 or slow.end_event <= slow.event + 1:
            continue
        for other in agent.accesses:
            inside = slow.event < other.event < slow.end_event
            if inside and other.atoms & slow.atoms and (other.writes or slow.writes):
                return Fault("own", f"{agent.name} {other.words} while its own {slow.words} is not known to be over.")
    return None


State = tuple[int, ...]


class _Search:
    """Depth-first over the states: segments of the partitions, then fired arrives of the engines."""

    def __init__(self, agents: list[Agent], tables: Tables, limit: int) -> None:
        self.agents = agents
        self.limit = limit
        self.tables = tables
        self.engines = [i for i, agent in enumerate(agents) if agent.fires]
        # by (partition, operation): phases complete when its wait returned, and the most with which it did not
        self._passed: dict[tuple[int, int], int] = {}
        self._blocked: dict[tuple[int, int], int] = {}

    def run(self) -> Verdict:
        count = len(self.agents)
        start: State = (0,) * (count + len(self.engines))
        for i in range(count):
            fault = self._enter(start, i)
            if fault:
                return Verdict(fault, 1)
        seen = {start}
        todo = [start]
        last = [len(agent.operations) for agent in self.agents]
        total = [len(self.agents[i].fires) for i in self.engines]
        while todo:
            state = todo.pop()
            moved = False
            for i in range(count + len(total)):
                outcome = self._step(state, i) if i < count else self._fire(state, i - count)
                if outcome is None:
                    continue
                if isinstance(outcome, Fault):
                    return Verdict(outcome, len(seen))
                moved = True
                if outcome not in seen:
                    seen.add(outcome)
                    fault = self._enter(outcome, i) if i < count else None
                    if fault:
                        return Verdict(fault, len(seen))
                    todo.append(outcome)
            if not moved and any(state[i] < last[i] for i in range(count)):
                return Verdict(self._deadlock(state), len(seen))
            if len(seen) > self.limit:
                raise ValueError(f"More than {self.limit} states: choose fewer tiles or items.")
        return Verdict(None, len(seen))

    # ---------------------------------------------------------------------------------- moves

    def _arrived(self, state: State, barrier: int) -> int:
        return sum(counts[state[slot]] for slot, counts in self.tables.arrivals[barrier])

    def _step(self, state: State, i: int) -> State | Fault | None:
        """Partition i executes its next operation; None if it cannot."""
        at = state[i]
        if at == len(self.agents[i].operations):
            return None
        kind, barrier, number, size = self.tables.operations[i][at]
        if kind != "fire":
            arrived = self._arrived(state, barrier)
            if kind == "wait":
                outcome = self._wait(i, at, arrived // size, number)
                if isinstance(outcome, Fault):
                    return outcome
                if not outcome:
                    return None
            elif arrived % size + number > size:
                return self._too_many(i, at, arrived)
        return (*state[:i], at + 1, *state[i + 1 :])

    def _wait(self, i: int, at: int, phases: int, parity: int) -> Fault | bool:
        """Whether it returns."""
        key = (i, at)
        if (phases & 1) == parity:
            if phases > self._passed.get(key, phases):
                return self._lapped(i, at)
            self._blocked[key] = max(phases, self._blocked.get(key, 0))
            return False
        before = self._passed.setdefault(key, phases)
        if before != phases or self._blocked.get(key, 0) > phases:
            return self._lapped(i, at)
        return True

    def _fire(self, state: State, e: int) -> State | Fault | None:
        """Engine e completes the copies of its next arrive, once the partition has issued that."""
        slot = len(self.agents) + e
        owner = self.engines[e]
        fired = state[slot]
        issued = self.tables.issued[owner]
        if fired == len(issued) or state[owner] <= issued[fired][0]:
            return None
        at, barrier, number, size = issued[fired]
        arrived = self._arrived(state, barrier)
        if arrived % size + number > size:
            return self._too_many(owner, at, arrived)
        return (*state[:slot], fired + 1, *state[slot + 1 :])

    # ---------------------------------------------------------------------------------- what a new segment meets

    def _enter(self, state: State, i: int) -> Fault | None:
        at = state[i]
        for other, segments, pairs in self.tables.meets[i][at]:
            if state[other] in segments:
                return self._race(i, other, next(p for p in pairs if p[1].begin <= state[other] <= p[1].end))
        for engine, pairs in self.tables.meets_engine[i][at]:
            owner = self.engines[engine]
            fired = state[len(self.agents) + engine]
            for mine, copy in pairs:
                if copy.fire >= fired and copy.begin <= state[owner]:
                    return self._race(i, owner, (mine, copy))
        for engine, other, pairs in self.tables.copies_meet[i][at]:
            fired = 0 if engine < 0 else state[len(self.agents) + engine]
            for copy, theirs in pairs:
                active = theirs.begin <= state[other] and (
                    theirs.fire >= fired if engine >= 0 else state[other] <= theirs.end
                )
                if active:
                    return self._race(i, other, (copy, theirs))
        return None

    # ---------------------------------------------------------------------------------- sentences

    def _race(self, i: int, j: int, pair: tuple[Access, Access]) -> Fault:
        one, two = self.agents[i].name, self.agents[j].name
        return Fault("race", f"{one} {pair[0].words} while {two} {pair[1].words}.")

    def _lapped(self, i: int, at: int) -> Fault:
        event = self.agents[i].operations[at]
        assert event.barrier is not None
        return Fault(
            "lapped",
            f"{self.agents[i].name} waits in line {event.site} for parity {event.number} of {event.barrier.name}, which "
            f"may be a phase further by then: it misses its phase or takes a later one for it.",
        )

    def _too_many(self, i: int, at: int, arrived: int) -> Fault:
        event = self.agents[i].operations[at]
        assert event.barrier is not None
        size = event.barrier.count
        return Fault(
            "arrivals",
            f"{self.agents[i].name} arrives in line {event.site} at {event.barrier.name} with {event.number}, where "
            f"{size - arrived % size} of {size} are missing.",
        )

    def _deadlock(self, state: State) -> Fault:
        words = []
        for i, agent in enumerate(self.agents):
            if state[i] == len(agent.operations):
                words.append(f"{agent.name} has ended")
                continue
            event = agent.operations[state[i]]
            assert event.barrier is not None
            phases, rest = divmod(self._arrived(state, self.tables.number[event.barrier]), event.barrier.count)
            words.append(
                f"{agent.name} waits in line {event.site} for parity {event.number} of {event.barrier.name} "
                f"({phases} phases complete, {rest} of {event.barrier.count} arrivals)"
            )
        return Fault("deadlock", "Deadlock: " + "; ".join(words) + ".")
