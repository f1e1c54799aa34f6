"""Runs each partition alone, without values, and writes down what it does to barriers and to shared memory.

Tensors lie on torch's meta device; ints are real, and so are loads through scalar pointers (lengths), so that control flow
is that of a real run. So is one int that a partition tells the others through shared memory: the n-th load of its place is
taken to see the n-th store, as a protocol of a single place must have it. An event carries its site, the line of the
kernel's text that made it.

A condition on values, which a trace does not have, is taken to hold, and in a second trace not to hold. `unlike` says whether
the first stands for both, and for every mixture: what such a branch adds may be plain loads and stores, no more.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import state
from .machine import Barrier, Machine, Place
from .memory import Region, Shared

KERNEL_FILE = "<kernel>"


@dataclass(frozen=True)
class Event:
    """One step of a partition.

    wait (barrier, number: parity), arrive (barrier, number: count), fire (barrier, number: count; happens in the background,
    after the copies that were begun before), read and write (region; from `begin` to `end`, or for copies from `begin` to the
    next fire). number of begin and end is that of the access.

    In a cluster: expect (barrier; arrives once, and the phase waits for `size` bytes), post (barrier of the other CTA: one arrival
    there, at any later time), send (a copy from region to target, the same of the other CTA, whose barrier counts its `size` bytes;
    at any later time), meet (barrier: of all partitions of both CTAs; number: parity of the meeting).
    """

    kind: str  # "wait", "arrive", "fire", "begin", "end", "copy", "copied", "expect", "post", "send", "meet"
    site: int
    barrier: Barrier | None = None
    number: int = 0
    region: Region | None = None
    writes: bool = False
    size: int = 0
    target: Region | None = None
    place: Place | None = None  # of a barrier of the other CTA, which may not exist yet


@dataclass
class Trace:
    """The events of one partition, in order."""

    name: str
    events: list[Event] = field(default_factory=list)
    cta: int = 0


def _site() -> int:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename != KERNEL_FILE:
        frame = frame.f_back
    return frame.f_lineno


class Tracer(Machine):
    device = "meta"

    def __init__(self, *args: Any, holds: bool = True) -> None:
        super().__init__(*args)
        self.decided = False
        self._holds = holds
        self.traces: list[Trace] = []
        self._accesses = 0
        self._told: dict[Region, list[torch.Tensor]] = defaultdict(list)
        self._heard: dict[tuple[str, Region], int] = defaultdict(int)
        self._trace = Trace("the kernel", cta=self.rank)

    def _add(self, kind: str, **fields: Any) -> None:
        self._trace.events.append(Event(kind, _site(), **fields))

    def _begin(self, shared: Shared, writes: bool) -> int:
        self._accesses += 1
        self._add("begin", number=self._accesses, region=shared.region, writes=writes)
        return self._accesses

    def _end(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._add("end", number=number)

    def decide(self) -> bool:
        self.decided = True
        return self._holds

    def wait(self, barrier: Barrier, parity: int) -> None:
        self._add("wait", barrier=barrier, number=parity)

    def arrive(self, barrier: Barrier, count: int) -> None:
        self._add("arrive", barrier=barrier, number=count)

    def expect(self, barrier: Barrier, size: int) -> None:
        if size:
            self._add("expect", barrier=barrier, number=1, size=size)
        else:  # one thread's arrival, and no more
            self.arrive(barrier, 1)

    def meet(self) -> None:
        meetings = sum(event.kind == "meet" for event in self._trace.events)
        self._add("meet", barrier=self.meeting, number=meetings & 1)

    def arrive_at_peer(self, at: Place) -> None:
        self._add("post", number=1, place=at)

    def copy_to_peer(self, rows: Region, barrier: Place) -> None:
        self._add("send", region=rows, size=math.prod(rows.shape), place=barrier)

    def addressed(self) -> list[Trace]:
        """The traces, with what they do in the other CTA, once that is traced too."""
        peer = self.peer
        for trace in self.traces if isinstance(peer, Tracer) else ():
            assert peer is not None
            for i, event in enumerate(trace.events):
                if event.place is not None:
                    number, offset = event.place
                    barrier = peer.barriers[id(peer.allocations[number]), offset // 8]
                    target = event.region and replace(
                        event.region, allocation=peer.allocations[self.number_of(event.region.allocation)]
                    )
                    trace.events[i] = replace(event, barrier=barrier, target=target)
        return self.traces

    def read(self, shared: Shared) -> None:
        self._end([self._begin(shared, False)])

    def write(self, shared: Shared) -> None:
        self._end([self._begin(shared, True)])

    def tell(self, shared: Shared, data: torch.Tensor) -> None:
        if not data.is_meta:
            self._told[shared.region].append(data)

    def told(self, shared: Shared) -> torch.Tensor | None:
        said = self._told.get(shared.region)
        if said is None:
            return None
        number = self._heard[self._trace.name, shared.region]
        self._heard[self._trace.name, shared.region] += 1
        return said[min(number, len(said) - 1)]  # a load behind the last store sees that one

    def copy(self, target: Shared, finish: Callable[[], None]) -> None:
        self._accesses += 1
        self._add("copy", number=self._accesses, region=target.region, writes=True)
        self.partition.copies.append(self._accesses)

    def copy_arrive(self, barrier: Barrier, increment: bool) -> None:
        # what the increment adds to the count is taken back by the arrive, so that neither moves the phase
        self.partition.copies.clear()
        self._add("fire", barrier=barrier, number=0 if increment else self.partition.threads)

    def commit_copies(self) -> None:
        self.partition.groups.append(self.partition.copies)
        self.partition.copies = []

    def wait_copies(self, outstanding: int) -> None:
        while len(self.partition.groups) > outstanding:
            for number in self.partition.groups.pop(0):
                self._add("copied", number=number)

    def issue(self, operation: Any) -> None:
        operation.run()
        operation.accesses = [self._begin(source, False) for source in operation.sources]
        self.partition.in_flight.append(operation)

    def retire(self, outstanding: int) -> None:
        while len(self.partition.in_flight) > outstanding:
            operation = self.partition.in_flight.pop(0)
            operation.done = True
            self._end(operation.accesses)

    def bulk_store(self, source: Shared, finish: Callable[[], None]) -> None:
        self.partition.bulk.append(self._begin(source, False))

    def wait_bulk(self, outstanding: int) -> None:
        while len(self.partition.bulk) > outstanding:
            self._end([self.partition.bulk.pop(0)])

    def specialize(self, functions: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Sequence[int]) -> Any:
        result: Any = None
        before = self._trace
        partitions = self.partitions_of(functions, warps)
        self.traces += [Trace(partition.name, cta=self.rank) for partition in partitions]
        # the last first: producers come last, and tell the others what to do
        for i in reversed(range(len(partitions))):
            partition, (function, arguments) = partitions[i], functions[i]
            self._trace = self.traces[i - len(partitions)]
            state.set_partition(partition)
            try:
                returned = function(*arguments)
                self.retire(0)
                self.wait_bulk(0)
            finally:
                state.set_partition(None)
            result = returned if i == 0 else result
        self._trace = before
        return result


def unlike(full: Tracer, bare: Tracer) -> int | None:
    """A line that keeps the events of `bare` from being those of `full` without some of its plain loads and stores; None where
    there is none. `full` then has every conflict and every order of barrier operations that `bare` has."""
    for mine, other in zip(full.traces, bare.traces, strict=True):
        numbers: dict[int, int] = {}  # of accesses: in `bare`, in `full`
        at = 0
        events = mine.events
        skip = False
        for i, event in enumerate(events):
            if skip:  # the end of a plain access that was passed over
                skip = False
            elif at < len(other.events) and _alike(full, event, bare, other.events[at], numbers):
                at += 1
            elif event.kind == "begin" and events[i + 1].kind == "end" and events[i + 1].number == event.number:
                skip = True
            else:
                return event.site
        if at < len(other.events):
            return other.events[at].site
    return None


def _alike(full: Tracer, mine: Event, bare: Tracer, other: Event, numbers: dict[int, int]) -> bool:
    if mine.kind in ("end", "copied"):
        return other.kind == mine.kind and numbers.get(other.number) == mine.number
    if _step(full, mine) != _step(bare, other):
        return False
    if mine.kind in ("begin", "copy"):
        numbers[other.number] = mine.number
        return True
    return mine.number == other.number


def _step(machine: Tracer, event: Event) -> tuple[Any, ...]:
    """What an event does and to what, told alike in two traces of a kernel. Numbers of accesses are not."""
    barrier = None if event.barrier is None else event.barrier.name
    if event.region is None:
        return (event.kind, event.site, event.writes, barrier, event.place, event.size)
    r = event.region
    at = (machine.number_of(r.allocation), r.offset, r.shape, r.strides, r.itemsize)
    return (event.kind, event.site, event.writes, barrier, event.place, event.size, *at)
