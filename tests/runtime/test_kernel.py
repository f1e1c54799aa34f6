"""Later launches of a form go past Triton's binder: to the kernel that it would choose, with the arguments that it would pass.

In processes of their own, which do not interpret: kernels are compiled and bound, and the launch itself is recorded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kgen.runtime import kernel
from kgen.runtime.kernel import Kernel, passes_all_arguments

ROOT = Path(__file__).resolve().parents[2]
NEWER = os.environ.get("KGEN_NEWER_TRITON", "")


def run(first: str = "") -> str:
    path = os.pathsep.join(part for part in (first, str(ROOT)) if part)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.past_binder"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_past_the_binder() -> None:
    assert run().count(" with Triton ") == 6


@pytest.mark.skipif(not NEWER, reason="KGEN_NEWER_TRITON names no folder with a newer Triton; make test sets it")
def test_past_the_binder_of_a_newer_triton() -> None:
    assert run(str(Path(NEWER).resolve())).count(" with Triton 3.9") == 6


class Compiled:
    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self._log.append(("compiled", grid, args))


class Jit:
    """Stands for a jitted function of three arguments and two constants."""

    arg_names = ["a", "b", "c", "X", "Y"]

    def __init__(self, gives: bool = True) -> None:
        self.log: list[Any] = []
        self.pre_run_hooks: list[Any] = []
        self._gives = gives

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launched(*args: Any, **keywords: Any) -> Compiled | None:
            self.log.append(("binder", grid, args, keywords))
            return Compiled(self.log) if self._gives else None

        return launched


KEYWORDS = {"Y": 2, "X": 1, "num_warps": 4}


def ways(jit: Jit) -> list[str]:
    return [entry[0] for entry in jit.log]


def test_constants_follow_the_arguments_in_the_order_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "passes_all_arguments", lambda: True)
    jit = Jit()
    made = Kernel(jit, (7,), KEYWORDS)
    for args in ((1, 2, 3), (4, 5, 6), (7, 8, 9)):
        made(args)
    assert jit.log[0] == ("binder", (7,), (1, 2, 3), KEYWORDS)
    assert jit.log[1:] == [("compiled", (7, 1, 1), (4, 5, 6, 1, 2)), ("compiled", (7, 1, 1), (7, 8, 9, 1, 2))]


def test_the_binder_is_asked_where_it_knows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter, a Triton that was not looked up, a function with defaults, someone who listens to every run."""
    monkeypatch.setattr(kernel, "passes_all_arguments", lambda: True)
    interpreter, default, listened = Jit(gives=False), Jit(), Jit()
    default.arg_names = [*Jit.arg_names, "Z"]
    for jit in (interpreter, default, listened):
        made = Kernel(jit, (1,), KEYWORDS)
        made((1, 2, 3))
        if jit is listened:
            jit.pre_run_hooks.append(print)
        made((1, 2, 3))
        assert ways(jit) == ["binder", "binder"]
    listened.pre_run_hooks.clear()
    made((1, 2, 3))
    assert ways(listened)[-1] == "compiled"
    monkeypatch.setattr(kernel, "passes_all_arguments", lambda: False)
    unknown = Jit()
    made = Kernel(unknown, (1,), KEYWORDS)
    made((1, 2, 3))
    made((1, 2, 3))
    assert ways(unknown) == ["binder", "binder"]


VERSIONS = {
    "3.5.1": False,
    "3.6.0": True,
    "3.7.1+git12": True,
    "3.9.0": True,
    "3.10.0": False,
    "4.6.0": False,
    "odd": False,
}


@pytest.mark.parametrize(("version", "known"), VERSIONS.items())
def test_versions_that_were_looked_up(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    passes_all_arguments.cache_clear()
    try:
        assert passes_all_arguments() is known
    finally:
        passes_all_arguments.cache_clear()
