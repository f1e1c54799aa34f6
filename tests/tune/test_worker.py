"""Workers: whatever a candidate does to its process, it costs that candidate and is a typed failure (B35, B47, B48)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kgen.failures import MAX_MESSAGE, from_exception, from_exit, poisons, sentence
from kgen.jobs import FinalsJob, Outcome, TuneJob
from kgen.types import Failure
from kgen.worker import InlineEvaluator, WorkerError, WorkerPool

from . import fakes
from .samples import make_candidate, make_measurement, make_spec

FAKES = fakes.__name__


def job(mode: str = "ok", block_k: int = 64) -> TuneJob:
    return TuneJob(make_spec(), make_candidate(block_k=block_k, mode=mode), 16)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(["cpu"], f"{FAKES}:evaluate", timeout_s=5.0, finals=f"{FAKES}:finals") as pool:
        yield pool


def failure_of(pool: WorkerPool, mode: str) -> Failure:
    answer = pool.evaluate(job(mode))
    assert isinstance(answer, Outcome) and answer.failure is not None
    assert answer.failure.message.endswith((".", "…")) and len(answer.failure.message) <= MAX_MESSAGE
    return answer.failure


@pytest.mark.parametrize(
    "mode, kind, text, dies",
    [
        ("compilation", "compile", "CompilationError: at 3:4", False),
        ("resources", "resource", "Required: 262944", False),
        ("ptxas", "compile", "internal error", False),
        ("passes", "compile", "PassManager", False),
        ("assert", "crash", "layout mismatch", False),
        ("exit", "crash", "SystemExit: 3", False),
        ("wrong", "wrong", "last key", False),
        ("illegal", "crash", "illegal memory access", True),
        ("abort", "crash", "died of SIGABRT", True),
        ("segv", "crash", "died of SIGSEGV", True),
        ("hard-exit", "crash", "exit code 4", True),
    ],
)
def test_failures_are_typed_and_cost_one_candidate(
    pool: WorkerPool, mode: str, kind: str, text: str, dies: bool
) -> None:
    replaced = pool.replaced
    failure = failure_of(pool, mode)
    assert failure.kind == kind and text in failure.message
    assert pool.replaced == replaced + dies
    good = pool.evaluate(job())
    assert isinstance(good, Outcome) and good.measurement is not None


def test_output_goes_into_the_sentence_only(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    failure = failure_of(pool, "abort")
    assert "Assertion `idx < size' failed." in failure.message
    assert failure_of(pool, "compilation").message.count("/") == 0  # no paths
    assert capfd.readouterr() == ("", "")


def test_hang_is_killed_with_its_output() -> None:
    with WorkerPool(["cpu"], f"{FAKES}:evaluate", timeout_s=0.5) as pool:
        start = time.monotonic()
        failure = failure_of(pool, "hang")
        assert failure.kind == "timeout" and "noise on stderr about hang" in failure.message
        assert time.monotonic() - start < 20


def test_finals(pool: WorkerPool) -> None:
    answer = pool.evaluate(FinalsJob((job(), job(block_k=32)), rounds=7))
    assert isinstance(answer, tuple) and [outcome.measurement.samples for outcome in answer if outcome.measurement] == [
        7,
        7,
    ]
    answer = pool.evaluate(FinalsJob((job("dies-in-finals"), job()), rounds=7))
    assert isinstance(answer, Outcome) and answer.failure is not None and answer.failure.kind == "crash"


def test_two_workers_run_at_once_and_see_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    with WorkerPool([0, 1], f"{FAKES}:environment", timeout_s=20) as pool:
        for worker in range(2):
            pool.submit(worker, job())
        with pytest.raises(WorkerError, match="busy"):
            pool.submit(0, job())
        seen: dict[int, str] = {}
        while len(seen) < 2:
            for done in pool.wait(20):
                assert isinstance(done.answer, Outcome) and done.answer.failure
                seen[done.worker] = done.answer.failure.message
        assert seen == {0: "visible=5", 1: "visible=7"}
    with pytest.raises(WorkerError, match="not visible"):
        WorkerPool([2], f"{FAKES}:environment", timeout_s=20)


def test_a_process_that_died_between_jobs_is_replaced() -> None:
    with WorkerPool(["cpu"], f"{FAKES}:pid", timeout_s=20) as pool:
        first = pool.evaluate(job())
        assert isinstance(first, Outcome) and first.measurement
        os.kill(int(first.measurement.median_us), signal.SIGKILL)
        time.sleep(0.2)
        second = pool.evaluate(job())
        assert isinstance(second, Outcome) and second.measurement
        assert second.measurement.median_us != first.measurement.median_us


def test_evaluator_mistakes_are_sentences() -> None:
    with WorkerPool(["cpu"], f"{FAKES}:not_an_outcome", timeout_s=20) as pool:
        assert "not Outcome" in failure_of(pool, "ok").message
    with WorkerPool(["cpu"], f"{FAKES}:missing", timeout_s=20) as pool:
        with pytest.raises(WorkerError, match="cannot be loaded: AttributeError"):
            pool.evaluate(job())
    with pytest.raises(WorkerError, match="at least one device"):
        WorkerPool([], f"{FAKES}:evaluate", timeout_s=20)


ORPHAN = """
import sys
from kgen.worker import WorkerPool
from {samples} import make_candidate, make_spec
from kgen.jobs import TuneJob
pool = WorkerPool(["cpu"], "{fakes}:evaluate", timeout_s=600)
pool.submit(0, TuneJob(make_spec(), make_candidate(block_k=64, mode="hang"), 16))
while not pool._workers[0]._ready:
    pool.wait(0.1)
print(pool._workers[0]._process.pid, flush=True)
pool.wait(600)
"""


def test_workers_die_with_the_parent() -> None:
    code = ORPHAN.format(fakes=FAKES, samples=FAKES.replace("fakes", "samples"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not _runs(worker):
            break
        time.sleep(0.05)
    assert not _runs(worker)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_outcome_is_never_both_and_never_a_number() -> None:
    failure = Failure("timeout", "x")
    with pytest.raises(ValueError, match="exactly one"):
        Outcome()
    with pytest.raises(ValueError, match="exactly one"):
        Outcome(make_measurement(), failure)
    with pytest.raises(TypeError):
        sorted([failure, Failure("crash", "y")])  # type: ignore[type-var]
    with pytest.raises(TypeError):
        min(make_measurement(), failure)  # type: ignore[call-overload]


def test_inline_evaluator_types_exceptions() -> None:
    inline = InlineEvaluator(fakes.evaluate)
    inline.submit(0, job("resources"))
    (done,) = inline.wait(0)
    assert isinstance(done.answer, Outcome) and done.answer.failure and done.answer.failure.kind == "resource"
    assert inline.wait(0) == [] and not inline.has_finals


def test_real_triton_errors_are_recognised() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    assert from_exception(errors.OutOfResources(262944, 232448, "shared memory")).kind == "resource"
    assert from_exception(errors.PTXASError("bad")).kind == "compile"
    compile_errors = pytest.importorskip("triton.compiler.errors")
    assert from_exception(compile_errors.CompilationError("x = 1", None, "no")).kind == "compile"


def test_sentences() -> None:
    assert sentence("a\n  b") == "a b."
    assert len(sentence("x" * 999, "tail")) <= MAX_MESSAGE
    assert len(sentence("x", "t " * 999)) <= MAX_MESSAGE
    assert from_exit(-6, "s").message.startswith("The worker died of SIGABRT")
    assert "signal 99" in from_exit(-99, "s").message
    assert not poisons("CUDA out of memory") and poisons("CUDA error: device-side assert triggered")
