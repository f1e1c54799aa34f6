"""Runs a program: every partition is a thread, one of them moves at a time, a seeded scheduler switches at barriers.

Background work is as late or as early as the seed says: a copy lands at its issue or just before its arrive fires, a wgmma
reads its operands at its issue or at the wait that retires it, and an arrive of cp.async fires at any later time, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from . import state
from .machine import Barrier, Machine, Partition
from .memory import Shared
from .types import ModelError


class Deadlock(ModelError):
    pass


class _Abort(BaseException):
    """Unwinds the threads of a run that failed elsewhere."""


class _Agent:
    """The thread of one partition and what it waits for."""

    def __init__(self, partition: Partition, body: Callable[[], Any]) -> None:
        self.partition = partition
        self.body = body
        self.turn = threading.Semaphore(0)
        self.waits: tuple[Barrier, int] | None = None
        self.arrivals: list[tuple[list[Callable[[], None]], Barrier]] = []  # of cp.async, oldest first
        self.done = False
        self.error: BaseException | None = None
        self.result: Any = None

    @property
    def ready(self) -> bool:
        return not self.done and (self.waits is None or self.waits[0].passed(self.waits[1]))


class Simulator(Machine):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._agents: list[_Agent] = []
        self._back = threading.Semaphore(0)
        self._aborting = False
        self._sticky = self.rng.choice((0.0, 0.5, 0.9))  # how often the same partition goes on
        self._lazy = self.rng.choice((0.0, 0.5, 1.0))  # how much of the background work is late

    def _agent(self) -> _Agent | None:
        own = state.partition()
        return next((agent for agent in self._agents if agent.partition is own), None)

    # ---------------------------------------------------------------------------------- barriers

    def wait(self, barrier: Barrier, parity: int) -> None:
        agent = self._agent()
        if agent is None:
            if not barrier.passed(parity):
                raise Deadlock(f"The kernel waits for {barrier.name} before there are partitions.")
            return
        agent.waits = (barrier, parity)
        self._switch(agent)
        agent.waits = None

    def arrive(self, barrier: Barrier, count: int) -> None:
        barrier.arrive(count)
        agent = self._agent()
        if agent is not None:
            self._switch(agent)

    def _switch(self, agent: _Agent) -> None:
        self._back.release()
        agent.turn.acquire()
        if self._aborting:
            raise _Abort

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
        agent = self._agent()
        if agent is None:
            _fire((copies, barrier), own)
            return
        agent.arrivals.append((copies, barrier))
        self._switch(agent)

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

    # ---------------------------------------------------------------------------------- scheduling

    def specialize(self, functions: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Sequence[int]) -> Any:
        partitions = self.partitions_of(functions, warps)
        self._agents = [
            _Agent(partition, lambda f=function, a=arguments: f(*a))  # type: ignore[misc]
            for partition, (function, arguments) in zip(partitions, functions, strict=True)
        ]
        threads = [threading.Thread(target=self._body, args=(agent,), daemon=True) for agent in self._agents]
        for thread in threads:
            thread.start()
        try:
            self._schedule()
        finally:
            self._aborting = True
            for agent in self._agents:
                agent.turn.release()
            for thread in threads:
                thread.join()
        result = self._agents[0].result
        self._agents = []
        self._aborting = False
        return result

    def _body(self, agent: _Agent) -> None:
        agent.turn.acquire()
        if self._aborting:
            return
        state.set_partition(agent.partition)
        try:
            agent.result = agent.body()
            self.wait_bulk(0)
            if agent.partition.in_flight:
                raise ModelError(f"{state.where()} ends with wgmma in flight.")
        except _Abort:
            return
        except BaseException as error:  # noqa: BLE001 - raised again by the scheduler, in the caller's thread
            agent.error = error
        agent.done = True
        self._back.release()

    def _schedule(self) -> None:
        current: _Agent | None = None
        while True:
            ready = [agent for agent in self._agents if agent.ready]
            firing = [agent for agent in self._agents if agent.arrivals]
            if not ready and not firing:
                if all(agent.done for agent in self._agents):
                    return
                raise Deadlock(self._who_waits())
            if current in ready and self.rng.random() < self._sticky:
                chosen = current
            else:
                pick = self.rng.randrange(len(ready) + len(firing))
                if pick >= len(ready):
                    owner = firing[pick - len(ready)]
                    _fire(owner.arrivals.pop(0), owner.partition)
                    continue
                chosen = current = ready[pick]
            assert chosen is not None
            chosen.turn.release()
            self._back.acquire()
            if chosen.error is not None:
                raise chosen.error

    def _who_waits(self) -> str:
        parts = []
        for agent in self._agents:
            if agent.waits is None:
                parts.append(f"{agent.partition.name} has ended")
                continue
            barrier, parity = agent.waits
            parts.append(
                f"{agent.partition.name} waits for parity {parity} of {barrier.name} ({barrier.completed} phases "
                f"complete, {barrier.pending} of {barrier.count} arrivals missing)"
            )
        return "Deadlock: " + "; ".join(parts) + "."


def _fire(arrival: tuple[list[Callable[[], None]], Barrier], partition: Partition) -> None:
    copies, barrier = arrival
    for finish in copies:
        finish()
    barrier.arrive(partition.threads)
