"""Runs a CTA of a program: every partition is a thread, one of them moves at a time, a seeded scheduler switches at barriers.

Background work is as late or as early as the seed says: a copy lands at its issue or just before its arrive fires, a wgmma
reads its operands at its issue or at the wait that retires it, an arrive of cp.async fires at any later time, in order, and
what is said to the other CTA of a cluster comes there at any later time, in no order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import state
from .machine import Barrier, Machine, Place
from .memory import Region, Shared
from .scheduler import Agent, Deadlock, Delivery, Scheduler
from .types import ModelError


class Simulator(Machine):
    scheduler: Scheduler

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._agents: list[Agent] = []
        self._lazy = self.rng.choice((0.0, 0.5, 1.0))  # how much of the background work is late

    # ---------------------------------------------------------------------------------- barriers

    def wait(self, barrier: Barrier, parity: int) -> None:
        if state.partition() is None:
            if not barrier.passed(parity):
                raise Deadlock(f"The kernel waits for {barrier.name} before there are partitions.")
            return
        self.scheduler.wait(barrier, parity)

    def arrive(self, barrier: Barrier, count: int) -> None:
        barrier.arrive(count)
        self._switch()

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.arrive(1, size)
        self._switch()

    def _switch(self) -> None:
        if state.partition() is not None:
            self.scheduler.switch()

    # ---------------------------------------------------------------------------------- the other CTA

    @property
    def ended(self) -> bool:
        return bool(self._agents) and all(agent.done for agent in self._agents)

    def _reach(self, what: str) -> Simulator:
        """The other CTA, if it is there to be spoken to."""
        peer = self.peer
        assert isinstance(peer, Simulator)
        if self.meeting is None or not self.meeting.completed:
            raise ModelError(f"{state.where()} {what} before both CTAs have met: its barriers may not exist yet.")
        if peer.ended:
            raise ModelError(f"{state.where()} {what}, but CTA {peer.rank} has ended.")
        return peer

    def meet(self) -> None:
        assert self.meeting is not None
        self.scheduler.own.meet_deliveries()
        parity = self.meeting.completed & 1
        self.meeting.arrive(1)
        self.scheduler.wait(self.meeting, parity)

    def arrive_at_peer(self, at: Place) -> None:
        self._reach("arrives at a barrier of the other CTA")
        partition = self.partition.name

        def finish() -> None:
            barrier = self._barrier_there(at, f"has an arrival of {partition} on its way to the other CTA")
            barrier.arrive(1)

        self._deliver(finish, True)

    def _barrier_there(self, at: Place, what: str) -> Barrier:
        peer = self._reach(what)
        number, offset = at
        return peer.barriers[id(peer.allocations[number]), offset // 8]

    def copy_to_peer(self, rows: Region, barrier: Place) -> None:
        peer = self._reach(f"copies {rows.allocation.name} to the other CTA")
        number = self.number_of(rows.allocation)
        source, target = (
            torch.as_strided(machine.allocations[number].bytes, rows.shape, rows.strides, rows.offset)
            for machine in (self, peer)
        )
        before = source.clone()
        what = f"has a copy of {rows.allocation.name} by {self.partition.name} on its way"
        if self._late():
            target.copy_(source)

        def finish() -> None:
            there = self._barrier_there(barrier, what)
            if self.ended:
                raise ModelError(f"{state.where()} {what}, but CTA {self.rank}, which it reads, has ended.")
            if not torch.equal(source, before):
                raise ModelError(f"{state.where()} {what}, but its source has changed since it was issued.")
            target.copy_(source)
            there.land(source.numel())

        self._deliver(finish, False)

    def _deliver(self, finish: Callable[[], None], ordered: bool) -> None:
        if self._late():
            self.scheduler.own.deliveries.append(Delivery(finish, ordered))
        else:
            finish()
        self._switch()

    # ---------------------------------------------------------------------------------- background work

    def read(self, shared: Shared) -> None:
        pass

    def write(self, shared: Shared) -> None:
        pass

    def _late(self) -> bool:
        return self.rng.random() < self._lazy

    def copy(self, target: Shared, finish: Callable[[], None]) -> None:
        if self._late():
            self.partition.copies.append(finish)
        else:
            finish()

    def copy_arrive(self, barrier: Barrier, increment: bool) -> None:
        own = self.partition
        if increment:
            barrier.pending += own.threads
        copies, own.copies = own.copies, []

        def fire() -> None:
            for finish in copies:
                finish()
            barrier.arrive(own.threads)

        if state.partition() is None:
            fire()
            return
        self.scheduler.own.arrivals.append(fire)
        self._switch()

    def commit_copies(self) -> None:
        own = self.partition
        own.groups.append(own.copies)
        own.copies = []

    def wait_copies(self, outstanding: int) -> None:
        own = self.partition
        while len(own.groups) > outstanding:
            for finish in own.groups.pop(0):
                finish()

    def issue(self, operation: Any) -> None:
        if not self._late():
            for earlier in (*self.partition.in_flight, operation):
                earlier.run()
        self.partition.in_flight.append(operation)

    def retire(self, outstanding: int) -> None:
        queue = self.partition.in_flight
        while len(queue) > outstanding:
            operation = queue.pop(0)
            operation.run()
            operation.done = True

    def bulk_store(self, source: Shared, finish: Callable[[], None]) -> None:
        self.partition.bulk.append(finish)

    def wait_bulk(self, outstanding: int) -> None:
        while len(self.partition.bulk) > outstanding:
            self.partition.bulk.pop(0)()

    # ---------------------------------------------------------------------------------- partitions

    def specialize(self, functions: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Sequence[int]) -> Any:
        partitions = self.partitions_of(functions, warps)
        self._agents = [
            Agent(self, partition, lambda f=function, a=arguments: self._partition(f, a))  # type: ignore[misc]
            for partition, (function, arguments) in zip(partitions, functions, strict=True)
        ]
        return self.scheduler.fork(self._agents)

    def _partition(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        result = function(*arguments)
        self.wait_bulk(0)
        if self.partition.in_flight:
            raise ModelError(f"{state.where()} ends with wgmma in flight.")
        return result
