"""How much shared memory is set aside for the programs of a kernel: what the driver is told, for which families, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kgen.runtime import kernel, launch
from kgen.runtime.families import FAMILIES
from kgen.runtime.kernel import Kernel, set_aside
from kgen.runtime.table import Config


class Driver:
    """Records what is asked of the CUDA driver. Functions that it does not have are an AttributeError, as in ctypes."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def cuFuncSetCacheConfig(self, function: Any, value: int) -> int:  # noqa: N802
        self._log.append(("cache", function.value, value))
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        self._log.append(("attribute", function.value, attribute, value))
        return 700  # an error, which is nobody's business


class Compiled:
    """A compiled kernel, whose launches are in the same log."""

    function = 4711

    def __init__(self, log: list[Any], shared: int = 150_000) -> None:
        self._log, self.metadata = log, SimpleNamespace(shared=shared)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self._log.append("past the binder")


class Jit:
    arg_names = ("a", "X")
    pre_run_hooks: tuple[Any, ...] = ()

    def __init__(self, log: list[Any]) -> None:
        self.log, self.compiled = log, Compiled(log)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **keywords: self.log.append("binder") or self.compiled


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    told: list[Any] = []
    monkeypatch.setattr(kernel, "_cuda", lambda: Driver(told))
    return told


@pytest.mark.parametrize(
    ("shared", "programs", "percent"),
    [
        (199_680, 1, 86),
        (199_681, 1, 86),
        (200_000, 1, 87),
        (66_000, 2, 58),
        (100_000, 2, 87),
        (232_448, 1, 100),
        (0, 1, 1),
    ],
)
def test_room_for_all_programs_of_an_sm_rounded_up(log: list[Any], shared: int, programs: int, percent: int) -> None:
    """Of 228 KB, 1 KB of which is kept per program. Less than they take would leave a program out."""
    set_aside(Compiled(log, shared), programs)
    assert log == [("cache", 4711, 0), ("attribute", 4711, 9, percent)]
    assert percent == 100 or percent * 228 * 1024 >= 100 * programs * (shared + 1024)


@pytest.mark.parametrize("versions_known", [True, False])
def test_it_is_said_once_when_the_kernel_is_there(
    log: list[Any], monkeypatch: pytest.MonkeyPatch, versions_known: bool
) -> None:
    monkeypatch.setattr(kernel, "passes_all_arguments", lambda: versions_known)
    made = Kernel(Jit(log), (3,), {"X": 1}, 1)
    for _ in range(3):
        made((0,))
    later = "past the binder" if versions_known else "binder"
    assert log == ["binder", ("cache", 4711, 0), ("attribute", 4711, 9, 65), later, later]
    log.clear()
    Kernel(Jit(log), (3,), {"X": 1})((0,))
    assert log == ["binder"]


def test_it_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, one without the functions, a Triton whose kernels have no handle, the interpreter: launches all the same."""

    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    for driver in (missing, lambda: SimpleNamespace()):
        monkeypatch.setattr(kernel, "_cuda", driver)
        log: list[Any] = []
        Kernel(Jit(log), (3,), {"X": 1}, 1)((0,))
        assert log == ["binder"]
    monkeypatch.setattr(kernel, "_cuda", lambda: Driver([]))
    for function in (None, [1]):
        odd = Jit([])
        odd.compiled.function = function  # type: ignore[assignment]
        Kernel(odd, (3,), {"X": 1}, 1)((0,))
        assert odd.log == ["binder"]
    interpreter = Jit([])
    interpreter.compiled = None  # type: ignore[assignment]
    Kernel(interpreter, (3,), {"X": 1}, 1)((0,))
    assert interpreter.log == ["binder"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("maxnreg", "programs"), [(None, 1), (128, 2), (168, 1)])
@pytest.mark.parametrize("cuda", [True, False])
def test_families_that_spare_the_l1_ask_for_what_they_take(
    family: str, maxnreg: int | None, programs: int, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only of a GPU: what stands in for one in tests has no driver's handles."""
    made = []
    monkeypatch.setattr(launch, "Kernel", lambda kernel, grid, keywords, programs: made.append(programs))
    config = Config((("block_h", 16), ("latent", "bf16")), 4, 1, maxnreg)
    plan = SimpleNamespace(
        family=FAMILIES[family], config=config, splits=1, grid=lambda call: (1,), constants={}, options={}
    )
    call = SimpleNamespace(q=SimpleNamespace(is_cuda=cuda))
    launch.Kernels(call, plan, SimpleNamespace(attention=SimpleNamespace(attention_kernel=None)))  # type: ignore[arg-type]
    expected = programs if family == "sm90_few" else 0
    assert FAMILIES[family].programs_per_sm(maxnreg) == expected and made == [expected if cuda else 0]
