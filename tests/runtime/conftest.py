"""A fake emitted tree: an sm90 table and kernel modules in `sys.modules`, and a launch that only records."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import triton  # noqa: F401  before any test sets TRITON_INTERPRET: its own functions are made when it is imported

from kgen.runtime import launch, lookup, target
from kgen.runtime.call import AttentionCall
from kgen.runtime.table import Entry, Shape

from .samples import toy_table

CACHES = (lookup.serve, lookup._log_once, lookup._triton_problem, target.load_table, target._cuda_target)


@dataclass
class Launched:
    call: AttentionCall
    arch: str
    entry: Entry
    exact: bool
    workspace: Any
    package: str


@dataclass
class FakeTree:
    """What the fake holds: `set_table` and `set_module` change it, `launched` is what came out."""

    monkeypatch: pytest.MonkeyPatch
    launched: list[Launched] = field(default_factory=list)

    def set_table(self, entries: tuple[Entry, ...], arch: str = "sm90", classes: Any = None) -> None:
        table = ModuleType(f"kgen.runtime.{arch}.table")
        table.ENTRIES = entries  # type: ignore[attr-defined]
        table.DEVICE_CLASSES = classes or {"h100": ("H100", "!PCIe"), "h200": ("H200",), "h20": ("H20",)}  # type: ignore[attr-defined]
        self.monkeypatch.setitem(sys.modules, table.__name__, table)
        for name in {row.module for row in entries}:
            self.set_module(name, arch)
        self.clear()

    def set_module(self, name: str, arch: str = "sm90", triton_range: tuple[str, str] = ("3.0", "9.0")) -> None:
        module = ModuleType(f"kgen.runtime.{arch}.{name}")
        module.TRITON_RANGE = triton_range  # type: ignore[attr-defined]
        self.monkeypatch.setitem(sys.modules, module.__name__, module)
        self.clear()

    def clear(self) -> None:
        for cached in CACHES:
            cached.cache_clear()


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTree]:
    fake = FakeTree(monkeypatch)

    def run(call: AttentionCall, arch: str, entry: Entry, exact: bool, workspace: Any, package: str) -> None:
        fake.launched.append(Launched(call, arch, entry, exact, workspace, package))

    def scratch_bytes(shape: Shape, entry: Entry, exact: bool) -> int:
        """As a kernel with about 64 programs: few tokens are split, 64 and more are not."""
        splits = -(-64 // max(1, shape.tokens))
        return 0 if splits == 1 else shape.tokens * splits * shape.heads * 8

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("KGEN_ARCH", raising=False)
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "scratch_bytes", scratch_bytes)
    fake.set_table(toy_table())
    yield fake
    fake.clear()
