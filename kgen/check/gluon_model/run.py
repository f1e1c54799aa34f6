"""Entry points: run a rendered module's kernel over a grid, or trace one of its programs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from . import state
from . import types as ty
from .machine import Machine
from .memory import GlobalMemory
from .scheduler import Scheduler
from .simulator import Simulator
from .source import constexpr_names, load
from .tracer import Trace, Tracer, unlike
from .types import ModelError
from .values import Scalar, as_tensor


def run_module(
    text: str,
    constants: Mapping[str, Any],
    args: Sequence[Any],
    grid: Sequence[int],
    seed: int = 0,
    *,
    kernel: str = "attention_kernel",
    num_warps: int = 4,
    num_ctas: int = 1,
    api: str = "3.6",
) -> None:
    """Execute `kernel` of the module `text` for every program of `grid`; outputs among `args` are written in place.

    args: the positional run-time arguments (tensors, ints, floats), as the launcher passes them; constants: the constexpr
    ones by name. seed: which interleaving of the partitions. num_ctas: 2 makes a program a cluster of two CTAs. api: whose
    names exist, Triton "3.6" or "3.9".
    """
    function = load(text, api)[kernel]
    memory = GlobalMemory()
    for program in itertools.product(*(range(n) for n in grid)):
        ctas = [Simulator(memory, tuple(grid), program, num_warps, seed, rank) for rank in range(num_ctas)]
        _pair(ctas, api)
        scheduler = Scheduler(ctas[0].rng)
        for cta in ctas:
            cta.scheduler = scheduler
        scheduler.run(ctas, [partial(_call, cta, function, args, constants) for cta in ctas])


def trace_module(
    text: str,
    constants: Mapping[str, Any],
    args: Sequence[Any],
    grid: Sequence[int],
    program: Sequence[int] = (0,),
    *,
    kernel: str = "attention_kernel",
    num_warps: int = 4,
    num_ctas: int = 1,
    api: str = "3.6",
) -> list[Trace]:
    """The events of each partition of one program, without values; scalar loads (lengths) read `args` all the same. Of a cluster:
    the partitions of CTA 0, then those of CTA 1."""

    def traced(holds: bool) -> list[Tracer]:
        memory = GlobalMemory()
        ctas = [
            Tracer(memory, tuple(grid), tuple(program), num_warps, 0, rank, holds=holds) for rank in range(num_ctas)
        ]
        _pair(ctas, api)
        for cta in ctas:
            with state.running(cta):
                _call(cta, load(text, api)[kernel], args, constants)
        return ctas

    counters = [(arg, arg.clone()) for arg in args if isinstance(arg, torch.Tensor) and arg.numel() == 1]
    machines = traced(True)
    if any(machine.decided for machine in machines):
        for counter, before in counters:  # what a trace takes from a counter, the other one takes as well
            counter.copy_(before)
        for machine, bare in zip(machines, traced(False), strict=True):
            line = unlike(machine, bare)
            if line is not None:
                raise ModelError(
                    f"Control flow depends on tensor data, and with it more than plain accesses (line {line})."
                )
    return [trace for machine in machines for trace in machine.addressed()]


def _pair(ctas: Sequence[Machine], api: str) -> None:
    for cta in ctas:
        cta.api = api
    if len(ctas) > 2:
        raise ModelError("A cluster of more than two CTAs is not modelled.")
    if len(ctas) == 2:
        ctas[0].peer, ctas[1].peer = ctas[1], ctas[0]


def _call(machine: Machine, function: Callable[..., Any], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters)
    fixed = constexpr_names(function)
    run_time = [name for name in parameters if name not in fixed and name not in constants]
    if len(args) > len(run_time):
        raise ModelError(f"{len(args)} arguments for the {len(run_time)} run-time parameters of {function.__name__}.")
    given = {name: _argument(machine, name, value) for name, value in zip(run_time, args, strict=False)} | dict(
        constants
    )
    unknown = [name for name in constants if name not in parameters]
    if unknown:
        raise ModelError(f"{function.__name__} has no constant {', '.join(unknown)}.")
    missing = [n for n, p in inspect.signature(function).parameters.items() if n not in given and p.default is p.empty]
    if missing:
        raise ModelError(f"{function.__name__} is called without {', '.join(missing)}.")
    function(**given)


def _argument(machine: Machine, name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return machine.memory.pointer(value, name)
    if isinstance(value, bool):
        return Scalar(value, ty.int1)
    if isinstance(value, int):
        return Scalar(value, ty.int32 if -(2**31) <= value < 2**31 else ty.int64)
    return as_tensor(value, ty.float32) if isinstance(value, float) else value
