"""What the running kernel is part of: the machine (a simulator or a tracer, one per CTA), the program's number, the partition.

Only one partition runs at any moment, but each has a thread of its own; both are therefore thread-local.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .types import ModelError

if TYPE_CHECKING:
    from .machine import Machine

_local = threading.local()


def _stack() -> list[Machine]:
    if not hasattr(_local, "machines"):
        _local.machines = []
    machines: list[Machine] = _local.machines
    return machines


def machine() -> Machine:
    current = _stack()
    if not current:
        raise ModelError("A device function was called outside run_module.")
    return current[-1]


class running:  # noqa: N801
    """Context: `machine` executes what is called inside."""

    def __init__(self, current: Machine) -> None:
        self._machine = current

    def __enter__(self) -> None:
        _stack().append(self._machine)

    def __exit__(self, *_: Any) -> None:
        _stack().pop()


def set_partition(partition: Any) -> None:
    _local.partition = partition


def partition() -> Any:
    """The partition of the calling thread; None before and after `warp_specialize`."""
    return getattr(_local, "partition", None)


def where() -> str:
    """The beginning of a sentence about the running code."""
    current = partition()
    return "The kernel" if current is None else f"Partition {current.name}"
