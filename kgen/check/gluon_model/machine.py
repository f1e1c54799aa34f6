"""What a kernel runs on. `Machine` is the interface; `simulator.Simulator` computes, `tracer.Tracer` only records.

The calls that matter for a protocol all come through here: barrier operations, accesses to shared memory, and the three
things that go on in the background: cp.async copies, wgmma and bulk stores.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import state
from .memory import Allocation, GlobalMemory, Region, Shared
from .types import ModelError

Place = tuple[int, int]
"""Number of an allocation and a byte in it: the same in both CTAs of a cluster."""


@dataclass(eq=False)
class Barrier:
    """An mbarrier: a phase completes when `count` arrivals have come and as many bytes as these expect; the next begins at
    once. Bytes may come before they are expected."""

    name: str
    count: int
    pending: int
    completed: int = 0
    bytes: int = 0  # that are expected and have not come

    def arrive(self, count: int, expects: int = 0) -> None:
        self.pending -= count
        if self.pending < 0:
            raise ModelError(
                f"{state.where()} arrives at {self.name} with {count} where only {self.pending + count} of "
                f"{self.count} arrivals are missing in this phase."
            )
        self._count(expects)

    def land(self, size: int) -> None:
        """Bytes of a copy have come."""
        self._count(-size)

    def _count(self, expects: int) -> None:
        self.bytes += expects
        if self.pending == 0 and self.bytes < 0:
            raise ModelError(f"{-self.bytes} more bytes come to {self.name} than its arrivals in this phase expect.")
        if self.pending == 0 and self.bytes == 0:
            self.completed += 1
            self.pending = self.count

    def passed(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity returns: the phase that runs now has the other parity."""
        return (self.completed & 1) != parity


@dataclass(eq=False)
class Partition:
    """One group of warps of a `warp_specialize`."""

    name: str
    warps: int
    in_flight: list[Any] = field(default_factory=list)  # wgmma, oldest first
    copies: list[Any] = field(default_factory=list)  # cp.async that no arrive or group covers yet
    groups: list[list[Any]] = field(default_factory=list)  # committed cp.async groups
    bulk: list[Any] = field(default_factory=list)  # bulk stores
    apart: bool = False  # threads have loaded or stored since they met, so that one may be behind the others

    @property
    def threads(self) -> int:
        return 32 * self.warps


class Machine(ABC):
    """One CTA. `peer`: the other CTA of its cluster; program and grid count clusters then."""

    device = "cpu"
    api = "3.6"

    def __init__(
        self,
        memory: GlobalMemory,
        grid: tuple[int, ...],
        program: tuple[int, ...],
        warps: int,
        seed: int,
        rank: int = 0,
    ) -> None:
        self.memory = memory
        self.grid = grid
        self.program = program
        self.rank = rank
        self.peer: Machine | None = None
        self.meeting: Barrier | None = None  # of all partitions of a cluster
        self.tiles: dict[int, Shared] = {}  # by number of the allocation: what `find_shared` was asked for
        self.rng = random.Random(f"{seed} {program} {rank}" if rank else f"{seed} {program}")
        self.allocations: list[Allocation] = []
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.main = Partition("the kernel", warps)

    @property
    def partition(self) -> Partition:
        return state.partition() or self.main

    def barrier(self, shared: Shared) -> Barrier:
        key = (id(shared.allocation), int(shared.data.storage_offset()))
        found = self.barriers.get(key)
        if found is None:
            raise ModelError(f"{state.where()} uses the barrier {shared}, which was never initialised.")
        return found

    def init_barrier(self, shared: Shared, count: int) -> None:
        if shared.numel != 1:
            raise ModelError(f"{state.where()} initialises {shared}, which is not one barrier; take index(i) of it.")
        at = int(shared.data.storage_offset())
        allocation = shared.allocation
        self.barriers[(id(allocation), at)] = Barrier(self._barrier_name(allocation, at), count, count)

    def _barrier_name(self, allocation: Allocation, at: int) -> str:
        name = f"{allocation.name}[{at}]" if allocation.bytes.numel() > 8 else allocation.name
        return name + self.whose

    @property
    def whose(self) -> str:
        """Behind a name, where there are two CTAs."""
        return "" if self.peer is None else f" of CTA {self.rank}"

    def rename_barriers(self, allocation: Allocation) -> None:
        """The allocation got its name after its barriers were made."""
        for (owner, at), barrier in self.barriers.items():
            if owner == id(allocation):
                barrier.name = self._barrier_name(allocation, at)

    def number_of(self, allocation: Allocation) -> int:
        return next(i for i, each in enumerate(self.allocations) if each is allocation)

    def decide(self) -> bool:
        """Whether a condition on values that are not there holds."""
        raise ModelError("Control flow depends on tensor data, which is not there.")

    @abstractmethod
    def wait(self, barrier: Barrier, parity: int) -> None: ...

    @abstractmethod
    def arrive(self, barrier: Barrier, count: int) -> None: ...

    @abstractmethod
    def expect(self, barrier: Barrier, size: int) -> None:
        """Arrive once, and let the phase wait for `size` bytes."""

    @abstractmethod
    def meet(self) -> None:
        """Wait for all partitions of both CTAs."""

    @abstractmethod
    def arrive_at_peer(self, at: Place) -> None:
        """One arrival at the other CTA's barrier at this place."""

    @abstractmethod
    def copy_to_peer(self, rows: Region, barrier: Place) -> None:
        """A bulk copy to the same bytes of the other CTA, whose barrier counts them: reads and writes at any time until then."""

    @abstractmethod
    def read(self, shared: Shared) -> None:
        """A plain load: instantaneous."""

    @abstractmethod
    def write(self, shared: Shared) -> None:
        """A plain store: instantaneous."""

    def tell(self, shared: Shared, data: torch.Tensor) -> None:  # noqa: B027 - only a trace has something to do
        """What a plain store has stored; a trace keeps the ints."""

    def told(self, shared: Shared) -> torch.Tensor | None:
        """What a plain load gives where that is not what lies there: the ints of a trace."""
        return None

    @abstractmethod
    def copy(self, target: Shared, finish: Callable[[], None]) -> None:
        """cp.async: `finish` writes the target, at any time from now until an arrive or a wait covers it."""

    @abstractmethod
    def copy_arrive(self, barrier: Barrier, increment: bool) -> None:
        """Every thread of the partition arrives once its copies so far are complete."""

    @abstractmethod
    def commit_copies(self) -> None: ...

    @abstractmethod
    def wait_copies(self, outstanding: int) -> None: ...

    @abstractmethod
    def issue(self, operation: Any) -> None:
        """A wgmma: has `run()`, `done` and the shared operands `sources`, which are read until it is retired."""

    @abstractmethod
    def retire(self, outstanding: int) -> None: ...

    @abstractmethod
    def bulk_store(self, source: Shared, finish: Callable[[], None]) -> None: ...

    @abstractmethod
    def wait_bulk(self, outstanding: int) -> None: ...

    @abstractmethod
    def specialize(
        self, functions: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Sequence[int]
    ) -> Any: ...

    def partitions_of(
        self, functions: Sequence[tuple[Callable[..., Any], Any]], warps: Sequence[int]
    ) -> list[Partition]:
        names = [function.__name__ for function, _ in functions]
        if len(names) != len(warps) + 1:
            raise ModelError(f"warp_specialize got {len(names)} partitions and warp counts for {len(warps)} workers.")
        if self.peer is not None:
            count = 2 * len(names)
            self.meeting = self.peer.meeting or Barrier("cluster_sync", count, count)
            if self.meeting.count != count:
                raise ModelError(
                    f"The CTAs of a cluster have {self.meeting.count - len(names)} and {len(names)} partitions."
                )
        made = []
        for i, name in enumerate(names):
            shown = f"{name}#{names[:i].count(name)}" if names.count(name) > 1 else name
            made.append(Partition(shown + self.whose, self.main.warps if i == 0 else int(warps[i - 1])))
        return made
