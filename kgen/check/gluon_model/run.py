"""Entry points: run a rendered module's kernel over a grid, or trace one of its programs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import state
from . import types as ty
from .machine import Machine
from .memory import GlobalMemory
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
    api: str = "3.6",
) -> None:
    """Execute `kernel` of the module `text` for every program of `grid`; outputs among `args` are written in place.

    args: the positional run-time arguments (tensors, ints, floats), as the launcher passes them; constants: the constexpr
    ones by name. seed: which interleaving of the partitions. api: whose names exist, Triton "3.6" or "3.9".
    """
    function = load(text, api)[kernel]
    memory = GlobalMemory()
    for program in itertools.product(*(range(n) for n in grid)):
        machine = Simulator(memory, tuple(grid), program, num_warps, seed)
        machine.api = api
        _call(machine, function, args, constants)


def trace_module(
    text: str,
    constants: Mapping[str, Any],
    args: Sequence[Any],
    grid: Sequence[int],
    program: Sequence[int] = (0,),
    *,
    kernel: str = "attention_kernel",
    num_warps: int = 4,
    api: str = "3.6",
) -> list[Trace]:
    """The events of each partition of one program, without values; scalar loads (lengths) read `args` all the same."""

    def traced(holds: bool) -> Tracer:
        machine = Tracer(GlobalMemory(), tuple(grid), tuple(program), num_warps, 0, holds=holds)
        machine.api = api
        _call(machine, load(text, api)[kernel], args, constants)
        return machine

    machine = traced(True)
    if machine.decided:
        line = unlike(machine, traced(False))
        if line is not None:
            raise ModelError(
                f"Control flow depends on tensor data, and with it more than plain accesses (line {line})."
            )
    return machine.traces


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
    with state.running(machine):
        function(**given)


def _argument(machine: Machine, name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return machine.memory.pointer(value, name)
    if isinstance(value, bool):
        return Scalar(value, ty.int1)
    if isinstance(value, int):
        return Scalar(value, ty.int32 if -(2**31) <= value < 2**31 else ty.int64)
    return as_tensor(value, ty.float32) if isinstance(value, float) else value
