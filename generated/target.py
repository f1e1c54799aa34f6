"""What a call runs on: arch, device class and the arch's table. Looked up once per device, without side effects."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from .kernel import interpreting
from .table import Entry

ARCHS = {(9, 0): "sm90", (10, 0): "sm100", (12, 0): "sm120", (12, 1): "sm121"}
"""Compute capability -> arch. Exact: a kernel of one arch is never run on another one, not even within a family."""

INTERPRETER = "interpreter"
"""Device class of Triton's interpreter: it runs plain Triton only."""

MAX_CLUSTER = 8
"""Blocks of a cluster that every device of these archs allows if it has as many SMs (CUDA's portable cluster size)."""

_PACKAGE = __package__ or "generated"


class NoTarget(RuntimeError):
    """There is no device, or no arch, that the kernels can run on; one sentence says why and what would help."""


@dataclass(frozen=True)
class Target:
    """Where kernels run. `device_class` None: no class of the arch's table matches the GPU's name. `cluster`: blocks of the
    largest cluster that it can be asked for, at least; a slice of a GPU may have one SM alone."""

    arch: str
    device_class: str | None
    gpu: str
    cluster: int = MAX_CLUSTER


@dataclass(frozen=True)
class Table:
    """The table of one arch: literals of `<arch>/table.py`."""

    entries: tuple[Entry, ...]
    device_classes: Mapping[str, tuple[str, ...]]


def target_of(device: torch.device) -> Target:
    """Arch and device class of a tensor's device. Raises `NoTarget`."""
    if device.type == "cuda":
        return _cuda_target(device.index if device.index is not None else torch.cuda.current_device())
    if device.type != "cpu":
        raise NoTarget(f"Tensors are on {device}: the kernels run on NVIDIA GPUs (cuda).")
    if not interpreting():
        raise NoTarget(
            "Tensors are on the CPU: move them to a GPU (cuda), or set TRITON_INTERPRET=1 before triton is imported "
            "to run in Triton's slow interpreter."
        )
    return Target(known_arch(os.environ.get("KGEN_ARCH", "sm90")), INTERPRETER, "Triton interpreter")


def default_target() -> Target:
    """The target of the current device, for questions that come without a tensor. Raises `NoTarget`."""
    if torch.cuda.is_available():
        return target_of(torch.device("cuda"))
    if interpreting():
        return target_of(torch.device("cpu"))
    raise NoTarget(
        "No GPU is visible: name the arch (arch='sm90'), or set TRITON_INTERPRET=1 to run in Triton's interpreter."
    )


def known_arch(arch: str) -> str:
    if arch not in ARCHS.values():
        raise NoTarget(f"Arch {arch!r} is unknown: there are kernels for {', '.join(ARCHS.values())}.")
    return arch


def arch_of(capability: tuple[int, int]) -> str:
    """The arch of a compute capability. Raises `NoTarget`, for sm103 by name."""
    arch = ARCHS.get(capability)
    if arch is not None:
        return arch
    name = "sm{}{}".format(*capability)
    known = ", ".join(ARCHS.values())
    if name == "sm103":
        raise NoTarget(f"sm103 (B300, GB300) is not built yet, and sm100 kernels are not run on it: there are {known}.")
    raise NoTarget(f"This GPU is {name}: there are kernels for exactly {known}.")


@lru_cache(maxsize=64)
def _cuda_target(index: int) -> Target:
    arch = arch_of(torch.cuda.get_device_capability(index))
    gpu = torch.cuda.get_device_name(index)
    table = load_table(arch)
    sms = torch.cuda.get_device_properties(index).multi_processor_count
    found = match_device_class(table.device_classes, gpu) if table else None
    return Target(arch, found, gpu, min(sms, MAX_CLUSTER))


def match_device_class(classes: Mapping[str, tuple[str, ...]], gpu: str) -> str | None:
    """The first class with a pattern that occurs in the GPU's name as whole words ("H20" is not in "H200").

    A pattern that starts with "!" rules the class out when the rest of it occurs.
    """
    for name, patterns in classes.items():
        allowed = any(_has_words(gpu, p) for p in patterns if not p.startswith("!"))
        if allowed and not any(_has_words(gpu, p[1:]) for p in patterns if p.startswith("!")):
            return name
    return None


def _has_words(text: str, words: str) -> bool:
    return re.search(rf"(?<![0-9A-Za-z]){re.escape(words)}(?![0-9A-Za-z])", text, re.IGNORECASE) is not None


@lru_cache(maxsize=16)
def load_table(arch: str) -> Table | None:
    """The table of an arch, imported on first use; None when the package has none. A broken table raises."""
    name = f"{_PACKAGE}.{arch}.table"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, f"{_PACKAGE}.{arch}"):
            return None
        raise
    return Table(module.ENTRIES, getattr(module, "DEVICE_CLASSES", {}))
