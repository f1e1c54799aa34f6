"""What racecheck is run on: the sanitizer suite by compiled kernel, and kernels with a planted fault, which it must report."""

from __future__ import annotations

import importlib
import re
import shutil
import threading
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kgen.same_code import code_digest
from kgen.verify_cases import VerifyCase
from kgen.verify_forms import formed_cases
from kgen.verify_shards import KernelForm, kernels_of

ARCH, DEVICE = "sm90", "h200"
BLOCK = 3
"""Of a case with more than FEW tokens this block (or cluster) of the grid alone is looked at; it has two items and more."""
FEW = 24
MOST_KEYS, TOKENS = 150 * 1024, 70
"""A case with more tokens times keys has TOKENS tokens here: more items than a persistent grid has programs, all the same."""

PLANTS: dict[str, tuple[str, str]] = {
    "sm90_few": (r"\n *mbarrier\.wait\(placed, 0\)\n", "\n"),
    "sm90_ws": (r"\n *mbarrier\.wait\(ready_s1, phase\)\n", "\n"),
    "sm90_ws_fp8": (r"\n *mbarrier\.wait\(p_full\.index\(st\), .*\n", "\n"),
    "sm90_pair_fp8": (r"\n *mbarrier\.wait\(ready_s1, phase\)\n", "\n"),
    "sm90_rs_fp8": (r"\n *mbarrier\.wait\(ready_s0, g & 1\)\n", "\n"),
    "sm90_cluster_fp8": (r"\n *sync_threads\(\)(?=\n *gl\.warp_specialize)", ""),
}
"""By family: a wait that is taken out, or in the kernel of clusters the meeting before what warp_specialize hands over."""

_SECONDS = {
    "sm90_rs_fp8": 31, "sm90_cluster_fp8": 34, "sm90_pair_fp8": 26, "sm90_ws": 24, "sm90_ws_fp8": 20, "sm90_few": 16, "": 12,
}  # fmt: skip
_SECONDS_MORE, _SECONDS_PLANTED = 4, 5
"""By family, of a process with one case of sixteen side by side on an H200; of each case more, and of the reports."""


@dataclass(frozen=True)
class Work:
    """What one process runs: the cases of some kernels. `planted`: the family whose fault is planted."""

    name: str
    kernels: tuple[KernelForm, ...]
    cases: tuple[VerifyCase, ...]
    planted: str = ""

    @property
    def block(self) -> int | None:
        """Which block is looked at; None: all."""
        return BLOCK if any(case.spec.tokens > FEW for case in self.cases) else None


def cases() -> list[VerifyCase]:
    """The sanitizer suite, its largest cases with fewer tokens."""
    return [smaller(case) for case in formed_cases("sanitizer", "cuda")]


def smaller(case: VerifyCase) -> VerifyCase:
    spec = case.spec
    if spec.tokens * (spec.topk + spec.extra_topk) <= MOST_KEYS:
        return case
    return replace(case, spec=replace(spec, tokens=TOKENS), slug=f"{case.slug}/{TOKENS}-tokens")


def family_of(module: str) -> str:
    """The longest family name that a module's begins with; "" for plain Triton kernels."""
    return max((family for family in PLANTS if module.startswith(family + "_")), key=len, default="")


def plan(package: str = "generated", arch: str = ARCH, device_class: str = DEVICE) -> list[Work]:
    """Hopper kernels and planted faults, a process each, the longest first; then plain Triton kernels, small ones by fours."""
    suite = cases()
    groups: dict[KernelForm, list[VerifyCase]] = {}
    for case, kernel in zip(suite, kernels_of(suite, package, arch, device_class), strict=True):
        if kernel is None:
            raise ValueError(f"No kernel serves {case.slug}.")
        groups.setdefault(kernel, []).append(case)
    hopper = [kernel for kernel in groups if family_of(kernel.module)]
    made = [Work("", (kernel,), tuple(groups[kernel])) for kernel in hopper]
    for family in dict.fromkeys(family_of(kernel.module) for kernel in hopper):
        least = min((k for k in hopper if family_of(k.module) == family), key=lambda k: _work_of(groups[k][0]))
        made.append(Work("", (least,), tuple(groups[least][:1]), family))
    made.sort(key=lambda work: -_seconds(work))
    plain = [kernel for kernel in groups if not family_of(kernel.module)]
    large = [kernel for kernel in plain if any(case.spec.tokens > FEW for case in groups[kernel])]
    small = [kernel for kernel in plain if kernel not in large]
    for some in [(kernel,) for kernel in large] + [tuple(small[at : at + 4]) for at in range(0, len(small), 4)]:
        made.append(Work("", some, tuple(case for kernel in some for case in groups[kernel])))
    return [replace(work, name=f"{at:02}-{_named(work)}") for at, work in enumerate(made)]


def _work_of(case: VerifyCase) -> int:
    return case.spec.tokens * (case.spec.topk + case.spec.extra_topk) * case.spec.heads


def _seconds(work: Work) -> int:
    first = _SECONDS[family_of(work.kernels[0].module)]
    return first + _SECONDS_MORE * (len(work.cases) - 1) + (_SECONDS_PLANTED if work.planted else 0)


def _named(work: Work) -> str:
    module = work.kernels[0].module + (f"-and-{len(work.kernels) - 1}" if len(work.kernels) > 1 else "")
    return f"planted-{module}" if work.planted else module


# ---------------------------------------------------------------------------------------------- emitted texts


_PARSING = threading.Lock()
"""One text at a time: `ast.parse` of CPython 3.11 counts its depth per interpreter, so that two threads trip over each other."""


def folder_of(package: str, arch: str = ARCH) -> Path:
    return Path(str(importlib.import_module(package).__file__)).parent / arch


def fingerprint(kernel: KernelForm, package: str = "generated", arch: str = ARCH) -> dict[str, Any]:
    """A kernel of a record: its module, digest of that one's code (comments are none), its constants and launch options."""
    text = (folder_of(package, arch) / f"{kernel.module}.py").read_text()
    constants = kernel.constants.replace(
        "('UPCAST', True)", "('UPCAST', False)"
    )  # True is the interpreter's; the tool has a GPU
    return {"module": kernel.module, "code": _digest(text), "constants": constants}


@cache
def _digest_once(text: str) -> str:
    return code_digest([text])


def _digest(text: str) -> str:
    with _PARSING:
        return _digest_once(text)


def planted(text: str, family: str) -> str:
    """A module's text with the family's fault; ValueError where its place is not there, or not there once."""
    pattern, into = PLANTS[family]
    made, times = re.subn(pattern, into, text)
    if times != 1:
        raise ValueError(f"{family}: {pattern} is there {times} times, not once.")
    return made


def plant(work: Work, to: Path, package: str = "generated", arch: str = ARCH) -> Path:
    """A copy of the emitted package with the fault of a work; returns the folder that holds it."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder_of(package, arch).parent, to / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = to / package / arch / f"{work.kernels[0].module}.py"
    path.write_text(planted(path.read_text(), work.planted))
    return to
