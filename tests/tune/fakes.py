"""Evaluators that misbehave on demand: the `mode` tunable of a candidate says how."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

from kgen.jobs import Outcome, TuneJob
from kgen.types import Failure

from .samples import make_measurement


class CompilationError(Exception):
    """Named as triton's, so that no triton is needed here."""


class OutOfResources(Exception):
    pass


class PTXASError(Exception):
    pass


def time_of(job: TuneJob) -> float:
    """A smooth landscape with its best point at block_k 64, 4 warps."""
    block = job.candidate["block_k"]
    assert isinstance(block, int)
    return 10.0 + abs(block - 64) / 16 + abs(job.candidate.launch.num_warps - 4)


def evaluate(job: TuneJob) -> Outcome:
    log = os.environ.get("KGEN_TEST_LOG")
    if log:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{job.slug}\n".encode())
        os.close(fd)
    time.sleep(float(os.environ.get("KGEN_TEST_SLEEP", "0")))
    mode = dict(job.candidate.tunables).get("mode", "ok")
    _misbehave(str(mode))
    if mode == "wrong":
        return Outcome(failure=Failure("wrong", "The last key of a row is dropped."), max_error=0.5)
    return Outcome(make_measurement(time_of(job)), max_error=1e-3)


def _misbehave(mode: str) -> None:
    print(f"noise on stdout about {mode}")
    print(f"noise on stderr about {mode}", file=sys.stderr, flush=True)
    if mode == "compilation":
        raise CompilationError("at 3:4: invalid operands of type /root/x/kernel.py")
    if mode == "resources":
        raise OutOfResources("out of resource: shared memory, Required: 262944, Hardware limit: 232448.")
    if mode == "ptxas":
        raise PTXASError("PTXAS error: internal error")
    if mode == "passes":
        raise RuntimeError("PassManager::run failed")
    if mode == "assert":
        raise AssertionError("layout mismatch")
    if mode == "illegal":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if mode == "abort":
        print("Assertion `idx < size' failed.", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    if mode == "segv":
        ctypes.string_at(0)
    if mode == "exit":
        sys.exit(3)
    if mode == "hard-exit":
        os._exit(4)
    if mode == "hang":
        time.sleep(600)


def pid(job: TuneJob) -> Outcome:
    return Outcome(make_measurement(float(os.getpid())))


def not_an_outcome(job: TuneJob) -> float:
    return 1.0


def environment(job: TuneJob) -> Outcome:
    return Outcome(failure=Failure("wrong", f"visible={os.environ['CUDA_VISIBLE_DEVICES']}"))


def finals(jobs: Sequence[TuneJob], rounds: int) -> list[Outcome]:
    if any(dict(job.candidate.tunables).get("mode") == "dies-in-finals" for job in jobs):
        os.abort()
    return [Outcome(make_measurement(time_of(job), samples=rounds)) for job in jobs]
