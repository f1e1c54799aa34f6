"""Traces as agents of the protocol check: segments, accesses with the bytes they touch, and tables of what can meet.

Only what may be asked in a state is in the tables, so that entering a segment costs a few look-ups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from .gluon_model import Barrier, Event, Region, Trace

FOREVER = 1 << 30


@dataclass(frozen=True)
class Fault:
    """What is wrong, in a sentence. kind: deadlock, race, lapped, arrivals or own; of a cluster also early or ended."""

    kind: str
    sentence: str


@dataclass
class Access:
    """A use of some atoms of shared memory, from segment `begin` to `end` of its partition; `event` and `end_event` are
    positions in the trace. A copy ends when arrive number `fire` of its engine fires instead."""

    site: int
    name: str
    writes: bool
    atoms: int  # bits
    begin: int
    event: int
    copy: bool
    end: int = FOREVER
    end_event: int = FOREVER
    fire: int = -1

    @property
    def words(self) -> str:
        verb = "copies to" if self.copy else "writes" if self.writes else "reads"
        return f"{verb} {self.name} (line {self.site})"

    def conflicts(self, other: Access) -> bool:
        return bool(self.atoms & other.atoms) and (self.writes or other.writes)


@dataclass
class Agent:
    """A partition. Segment s lies before operation s; operations are waits, arrives, and arrives of its engine (`fires`)."""

    name: str
    operations: list[Event] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    fires: list[Event] = field(default_factory=list)


Key = tuple[int, int, tuple[int, ...], tuple[int, ...], int]
Atoms = dict[Key, int]


def key_of(region: Region) -> Key:
    return (id(region.allocation), region.offset, region.shape, region.strides, region.itemsize)


def atoms_of(traces: Sequence[Trace]) -> Atoms:
    """Each region as a set of atoms (bits): bytes that no region of the traces tells apart are one atom."""
    allocations: dict[int, dict[Key, Region]] = {}
    for trace in traces:
        for event in trace.events:
            for region in (event.region, event.target):
                if region is not None:
                    allocations.setdefault(id(region.allocation), {})[key_of(region)] = region
    found: Atoms = {}
    used = 0
    generator = torch.Generator().manual_seed(0)
    for regions in allocations.values():
        covered = [region.covered() for region in regions.values()]
        code = torch.zeros(
            covered[0].numel(), dtype=torch.int64
        )  # of each byte: the sum of its regions' random numbers
        for mask in covered:
            code[mask] += torch.randint(-(2**62), 2**62, (), generator=generator)
        kinds, inverse = torch.unique(code, return_inverse=True)
        sample = torch.zeros(kinds.numel(), dtype=torch.int64)
        sample[inverse] = torch.arange(code.numel())
        for key, mask in zip(regions, covered, strict=True):
            found[key] = sum(1 << (used + int(i)) for i in mask[sample].nonzero().flatten())
        used += kinds.numel()
    return found


def agents_of(traces: Sequence[Trace], atoms: Atoms, without: Collection[int] = ()) -> list[Agent]:
    """One agent per partition; barrier operations of the lines in `without` are left out. That changes segments, but not
    which accesses there are."""
    return [_agent(trace, atoms, without) for trace in traces]


def conflicts_of(agents: list[Agent]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """By pair of partitions: the numbers of accesses that touch the same bytes, one of them writing. Depends on the
    accesses alone."""
    return {
        (i, j): [
            (m, n)
            for m, mine in enumerate(one.accesses)
            for n, other in enumerate(two.accesses)
            if mine is not other and mine.conflicts(other)
        ]
        for i, one in enumerate(agents)
        for j, two in enumerate(agents)
    }


def _agent(trace: Trace, atoms: Atoms, without: Collection[int]) -> Agent:
    agent = Agent(trace.name)
    by_number: dict[int, Access] = {}
    for at, event in enumerate(trace.events):
        segment = len(agent.operations)
        if event.kind in ("begin", "copy"):
            assert event.region is not None
            name = event.region.allocation.name
            copy = event.kind == "copy"
            access = Access(event.site, name, event.writes, atoms[key_of(event.region)], segment, at, copy)
            access.fire = len(agent.fires) if copy else -1
            by_number[event.number] = access
            agent.accesses.append(access)
        elif event.kind in ("end", "copied"):
            access = by_number[event.number]
            access.end, access.end_event, access.fire = segment, at, -1
        elif event.site not in without:
            agent.operations.append(event)
            if event.kind == "fire":
                agent.fires.append(event)
    for access in agent.accesses:
        if access.fire >= len(agent.fires):  # nothing says when it is over
            access.fire = -1
    return agent


Pair = tuple[Access, Access]


class Tables:
    """What the search looks up, by partition and segment."""

    def __init__(self, agents: list[Agent], conflicts: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
        self.agents = agents
        self._conflicts = conflicts
        self.number: dict[Barrier, int] = {}
        for agent in agents:
            for event in agent.operations:
                assert event.barrier is not None
                self.number.setdefault(event.barrier, len(self.number))
        engine_of = {i: e for e, i in enumerate(i for i, agent in enumerate(agents) if agent.fires)}
        self.operations = [[self._flat(event) for event in agent.operations] for agent in agents]
        self.issued = [
            [(at, *flat[1:]) for at, flat in enumerate(operations) if flat[0] == "fire"]
            for operations in self.operations
        ]
        self.arrivals = self._arrivals(engine_of)
        sizes = [len(agent.operations) + 1 for agent in agents]
        # (partition, its segments in which something of this segment meets something of it, the pairs)
        self.meets: list[list[list[tuple[int, set[int], list[Pair]]]]] = [[[] for _ in range(n)] for n in sizes]
        # (engine, pairs of an access of this segment and a copy)
        self.meets_engine: list[list[list[tuple[int, list[Pair]]]]] = [[[] for _ in range(n)] for n in sizes]
        # (engine or -1, partition, pairs of a copy that begins in this segment and a copy of the engine or a use of the partition)
        self.copies_meet: list[list[list[tuple[int, int, list[Pair]]]]] = [[[] for _ in range(n)] for n in sizes]
        for i in range(len(agents)):
            for j in range(len(agents)):
                self._fill(i, j, engine_of, sizes[i])

    def _flat(self, event: Event) -> tuple[str, int, int, int]:
        assert event.barrier is not None
        return (event.kind, self.number[event.barrier], event.number, event.barrier.count)

    def _arrivals(self, engine_of: dict[int, int]) -> list[list[tuple[int, list[int]]]]:
        """By barrier: (slot of the state, arrivals of that agent by its position)."""
        found: list[list[tuple[int, list[int]]]] = [[] for _ in self.number]
        for i, operations in enumerate(self.operations):
            for kind, slot, sequence in (
                ("arrive", i, operations),
                ("fire", len(self.agents) + engine_of.get(i, 0), [o for o in operations if o[0] == "fire"]),
            ):
                for barrier in {b for k, b, _, _ in sequence if k == kind}:
                    counts = [0]
                    for k, b, number, _ in sequence:
                        counts.append(counts[-1] + (number if k == kind and b == barrier else 0))
                    found[barrier].append((slot, counts))
        return found

    def _fill(self, i: int, j: int, engine_of: dict[int, int], size: int) -> None:
        meeting: list[list[Pair]] = [[] for _ in range(size)]
        engine_pairs: list[list[Pair]] = [[] for _ in range(size)]
        copy_pairs: list[list[Pair]] = [[] for _ in range(size)]
        copy_copies: list[list[Pair]] = [[] for _ in range(size)]
        for m, n in self._conflicts[i, j]:
            mine, theirs = self.agents[i].accesses[m], self.agents[j].accesses[n]
            if mine.fire >= 0:  # a copy: whom does it meet when it begins
                if theirs.fire >= 0:
                    if i != j or theirs.event < mine.event:
                        copy_copies[mine.begin].append((mine, theirs))
                elif i != j:
                    copy_pairs[mine.begin].append((mine, theirs))
                continue
            for segment in range(mine.begin, min(mine.end, size - 1) + 1):
                if theirs.fire < 0:
                    if i != j:
                        meeting[segment].append((mine, theirs))
                elif i != j or mine.end_event > theirs.event:
                    engine_pairs[segment].append((mine, theirs))
        last = len(self.agents[j].operations)
        for segment in range(size):
            pairs = meeting[segment]
            if pairs:
                where = {s for _, t in pairs for s in range(t.begin, min(t.end, last) + 1)}
                self.meets[i][segment].append((j, where, pairs))
            if engine_pairs[segment]:
                self.meets_engine[i][segment].append((engine_of[j], engine_pairs[segment]))
            if copy_pairs[segment]:
                self.copies_meet[i][segment].append((-1, j, copy_pairs[segment]))
            if copy_copies[segment]:
                self.copies_meet[i][segment].append((engine_of[j], j, copy_copies[segment]))
