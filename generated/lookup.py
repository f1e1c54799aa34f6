"""From a shape to the entry that serves it: `select` on the arch's table, kept per shape, fallbacks logged once."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from . import launch
from .call import AttentionCall
from .families import is_gluon, known_family
from .select import Choice, cannot_serve, select
from .table import Entry, Shape
from .target import INTERPRETER, MAX_CLUSTER, Table, Target, load_table
from .validate import Unsupported

PACKAGE = __package__ or "generated"
_log = logging.getLogger(PACKAGE)


class Serving(NamedTuple):
    """The look-up's answer for one shape on one target, kept for the next call."""

    choice: Choice
    scratch: int  # bytes


@lru_cache(maxsize=65536)
def serve(arch: str, device_class: str | None, shape: Shape, cluster: int = MAX_CLUSTER) -> Serving:
    """The choice for a shape; logs a fallback once. Raises `Unsupported` with every reason when no entry serves."""
    choice = choose(arch, device_class, shape, cluster=cluster)
    if choice.fallback is not None:
        _log_once(f"{arch}, layout {shape.layout}, {shape.heads} heads, topk {_topk(shape)}: {choice.fallback}.")
    return Serving(choice, launch.scratch_bytes(shape, choice.entry, choice.exact))


def serving_of(call: AttentionCall, target: Target) -> Serving:
    """`serve` for a call, kept with its form for as long as the table is the same."""
    memo = call.memo
    if memo is None:
        return serve(target.arch, target.device_class, launch.call_shape(call), target.cluster)
    table = load_table(target.arch)
    if memo.serving is None or memo.table is not table or memo.device_class != target.device_class:
        memo.serving = serve(target.arch, target.device_class, launch.call_shape(call), target.cluster)
        memo.table, memo.device_class = table, target.device_class
    serving: Serving = memo.serving
    return serving


def choose(
    arch: str, device_class: str | None, shape: Shape, exclude: Sequence[Entry] = (), cluster: int = MAX_CLUSTER
) -> Choice:
    """`select` on the table of `arch`, without the modules that are not valid for the Triton that is installed, nor those whose
    clusters have more than `cluster` blocks."""
    table = load_table(arch)
    if table is None:
        raise Unsupported([f"{PACKAGE} has no table for {arch}. To make one: {tune_command(arch, shape)}"])
    out: list[Entry] = list(exclude)
    reasons: list[str] = []
    while True:
        choice = select(table.entries, shape, device_class, exclude=out)
        if choice is None:
            break
        unsuited = _interpreter_problem(choice.entry, device_class) or _cluster_problem(choice.entry, cluster)
        problem = unsuited or _triton_problem(arch, choice.entry.module)
        if problem is None:
            return choice
        if unsuited is None:
            _log_once(problem)
        reasons.append(problem)
        out += [entry for entry in table.entries if entry.module == choice.entry.module]
    reasons += _table_reasons(table, shape) if not reasons else []
    raise Unsupported([*reasons, f"To add an entry: {tune_command(arch, shape)}"])


def _table_reasons(table: Table, shape: Shape) -> list[str]:
    """Why no entry serves, entries of one reason in one sentence."""
    counts: dict[str, int] = {}
    for entry in table.entries:
        sentence = cannot_serve(entry, shape)
        if sentence is not None:
            counts[sentence] = counts.get(sentence, 0) + 1
    return [f"{count} {'entry' if count == 1 else 'entries'}: {text}" for text, count in counts.items()] or [
        "The table has no entry that is left to choose."
    ]


def tune_command(arch: str, shape: Shape) -> str:
    """The command that would add an entry for a shape."""
    parts = [f"kgen tune --arch {arch} --layout {shape.layout} --heads {shape.heads} --topk {shape.topk}"]
    parts.append(f"--page {shape.page} --tokens {shape.tokens}")
    if shape.dual:
        parts.append(f"--extra-topk {shape.extra_topk} --extra-page {shape.extra_page}")
    return " ".join(parts)


def _topk(shape: Shape) -> str:
    return f"{shape.topk}+{shape.extra_topk}" if shape.dual else str(shape.topk)


@lru_cache(maxsize=256)
def _triton_problem(arch: str, module: str) -> str | None:
    """Why the installed Triton is outside the range that a kernel module states, or None."""
    import triton  # here, because importing dispatch must stay cheap

    name = f"{PACKAGE}.{arch}.{module}"
    try:
        first, below = importlib.import_module(name).TRITON_RANGE
    except ImportError as error:  # Triton 3.4 has no Gluon for Hopper
        return f"{name} does not import with Triton {triton.__version__}: {error}."
    if _version(first) <= _version(triton.__version__) < _version(below):
        return None
    return f"{name} is valid for Triton {first} up to but not including {below}; {triton.__version__} is installed."


def _interpreter_problem(entry: Entry, device_class: str | None) -> str | None:
    """Why an entry's module cannot run in Triton's interpreter, when that is the target; else None."""
    if device_class == INTERPRETER and is_gluon(entry.module, entry.layout):
        return f"{entry.module} is written in Gluon, which Triton's interpreter does not run."
    return None


def _cluster_problem(entry: Entry, cluster: int) -> str | None:
    """Why an entry's module cannot be launched where a cluster has at most `cluster` blocks; else None."""
    family = known_family(entry.module, entry.layout)
    if family is not None and family.ctas > cluster:
        return f"{entry.module} is launched in clusters of {family.ctas} blocks, for which the device has too few SMs."
    return None


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


@lru_cache(maxsize=4096)
def _log_once(text: str) -> None:
    _log.warning(text)
