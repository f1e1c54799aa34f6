"""Interleaves the CTAs of a program and their partitions: each is a thread, one of which moves at a time.

The threads switch at barriers. Which one moves next, and when background work happens that may happen at any time, a seed says.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import state
from .machine import Barrier, Machine, Partition
from .types import ModelError


class Deadlock(ModelError):
    pass


class _Abort(BaseException):
    """Unwinds the threads of a run that failed elsewhere."""


@dataclass
class Delivery:
    """What happens at the other CTA at any time from now on, in no order. `ordered`: a meeting of the CTAs waits for it."""

    finish: Callable[[], None]
    ordered: bool


class Agent:
    """A thread: of a CTA before it has partitions (`partition` is None then), or of a partition; and what it waits for."""

    def __init__(self, machine: Machine, partition: Partition | None, body: Callable[[], Any]) -> None:
        self.machine = machine
        self.partition = partition
        self.body = body
        self.turn = threading.Semaphore(0)
        self.waits: tuple[Barrier, int] | None = None
        self.joins: Sequence[Agent] = ()
        self.arrivals: list[Callable[[], None]] = []  # of cp.async, oldest first
        self.deliveries: list[Delivery] = []
        self.done = False
        self.error: BaseException | None = None
        self.result: Any = None

    @property
    def ready(self) -> bool:
        if self.done or not all(agent.done for agent in self.joins):
            return False
        return self.waits is None or self.waits[0].passed(self.waits[1])

    def meet_deliveries(self) -> None:
        for delivery in [d for d in self.deliveries if d.ordered]:
            self.deliveries.remove(delivery)
            delivery.finish()


class Scheduler:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._sticky = rng.choice((0.0, 0.5, 0.9))  # how often the same agent goes on
        self._favourite: int | None = None  # the CTA that usually goes first
        self._agents: list[Agent] = []
        self._threads: list[threading.Thread] = []
        self._local = threading.local()
        self._back = threading.Semaphore(0)
        self._aborting = False

    def run(self, machines: Sequence[Machine], bodies: Sequence[Callable[[], None]]) -> None:
        """Execute the kernel of every CTA to its end."""
        if len(machines) > 1:
            self._favourite = self.rng.choice((None, *range(len(machines))))
        self._start([Agent(machine, None, body) for machine, body in zip(machines, bodies, strict=True)])
        try:
            self._schedule()
        finally:
            self._aborting = True
            for agent in self._agents:
                agent.turn.release()
            for thread in self._threads:
                thread.join()

    def _start(self, agents: list[Agent]) -> None:
        self._agents += agents
        threads = [threading.Thread(target=self._body, args=(agent,), daemon=True) for agent in agents]
        self._threads += threads
        for thread in threads:
            thread.start()

    def fork(self, agents: list[Agent]) -> Any:
        """Run the agents; their first one's result once all have ended."""
        self._start(agents)
        own = self.own
        own.joins = agents
        self.switch()
        return agents[0].result

    @property
    def own(self) -> Agent:
        """The agent of the calling thread."""
        agent: Agent = self._local.agent
        return agent

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.own.waits = (barrier, parity)
        self.switch()
        self.own.waits = None

    def switch(self) -> None:
        self._back.release()
        self.own.turn.acquire()
        if self._aborting:
            raise _Abort

    def _body(self, agent: Agent) -> None:
        agent.turn.acquire()
        if self._aborting:
            return
        self._local.agent = agent
        state.set_partition(agent.partition)
        try:
            with state.running(agent.machine):
                agent.result = agent.body()
        except _Abort:
            return
        except BaseException as error:  # noqa: BLE001 - raised again by the scheduler, in the caller's thread
            agent.error = error
        agent.done = True
        self._back.release()

    def _schedule(self) -> None:
        current: Agent | None = None
        while True:
            ready = [agent for agent in self._agents if agent.ready]
            firing = [agent for agent in self._agents if agent.arrivals or agent.deliveries]
            if not ready and not firing:
                if all(agent.done for agent in self._agents):
                    return
                raise Deadlock(self._who_waits())
            if current in ready and self.rng.random() < self._sticky:
                chosen = current
            else:
                pick = self.rng.randrange(len(ready) + len(firing))
                if pick >= len(ready):
                    self._fire(firing[pick - len(ready)])
                    continue
                chosen = current = self._preferred(ready, ready[pick])
            assert chosen is not None
            chosen.turn.release()
            self._back.acquire()
            if chosen.error is not None:
                raise chosen.error

    def _preferred(self, ready: list[Agent], chosen: Agent) -> Agent:
        """Usually one of the CTA that goes first in this run, so that it gets as far ahead as it may."""
        if self._favourite is None or chosen.machine.rank == self._favourite or self.rng.random() < 0.1:
            return chosen
        first = [agent for agent in ready if agent.machine.rank == self._favourite]
        return self.rng.choice(first) if first else chosen

    def _fire(self, agent: Agent) -> None:
        pick = self.rng.randrange(len(agent.deliveries) + bool(agent.arrivals))
        if pick < len(agent.deliveries):
            agent.deliveries.pop(pick).finish()
        else:
            agent.arrivals.pop(0)()

    def _who_waits(self) -> str:
        parts = []
        for agent in self._agents:
            if agent.partition is None:
                continue
            if agent.waits is None:
                parts.append(f"{agent.partition.name} has ended")
                continue
            barrier, parity = agent.waits
            missing = f"{barrier.pending} of {barrier.count} arrivals missing"
            missing += f", {barrier.bytes} bytes missing" if barrier.bytes > 0 else ""
            parts.append(
                f"{agent.partition.name} waits for parity {parity} of {barrier.name} ({barrier.completed} phases "
                f"complete, {missing})"
            )
        return "Deadlock: " + "; ".join(parts) + "."
