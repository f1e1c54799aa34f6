"""A CPU model of the Gluon subset that the Hopper templates use.

`run_module` executes the text of a rendered module on CPU tensors, with its partitions interleaved by a seeded scheduler;
`trace_module` runs each partition alone, without values, and gives its barrier operations and shared-memory accesses.
A program may be a cluster of two CTAs.
"""

from .machine import Barrier
from .memory import Region
from .run import run_module, trace_module
from .scheduler import Deadlock
from .tracer import Event, Trace
from .types import ModelError

__all__ = ["Barrier", "Deadlock", "Event", "ModelError", "Region", "Trace", "run_module", "trace_module"]
