"""The process that may die: `python -m kgen.worker_child FD PARENT module:evaluate [module:finals]`.

It says `("ready",)` on the pipe FD, then answers each job with `("done", answer, poisoned)`. After a CUDA error that
poisons the context it answers and ends; the pool starts another.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from kgen.failures import from_exception, poisons
from kgen.jobs import Answer, FinalsJob, Job, Outcome

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Serve jobs until the pipe is closed."""
    pipe: Connection[Any, Any] = Connection(int(argv[0]))
    die_with(int(argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    try:
        evaluate = load_function(argv[2])
        finals = load_function(argv[3]) if len(argv) > 3 else None
    except BaseException as error:
        pipe.send(("broken", from_exception(error).message))
        return 1
    pipe.send(("ready",))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return 0
        answer, poisoned = _answer(job, evaluate, finals)
        try:
            pipe.send(("done", answer, poisoned))
        except (BrokenPipeError, ConnectionError):
            return 0
        if poisoned:
            sys.stdout.flush()
            os._exit(0)  # the context is lost: ordinary shutdown would call into it


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def checked_answer(job: Job, evaluate: Callable[..., Any], finals: Callable[..., Any] | None) -> Answer:
    """Run a job; TypeError when the evaluator gives something else than what `kgen.jobs` asks for."""
    if isinstance(job, FinalsJob):
        if finals is None:
            raise TypeError("this evaluator has no finals function")
        outcomes = tuple(finals(job.jobs, job.rounds))
        if len(outcomes) != len(job.jobs) or not all(isinstance(outcome, Outcome) for outcome in outcomes):
            raise TypeError(f"the finals function gave {len(outcomes)} answers for {len(job.jobs)} jobs")
        return outcomes
    outcome = evaluate(job)
    if not isinstance(outcome, Outcome):
        raise TypeError(f"the evaluator gave {type(outcome).__name__}, not Outcome")
    return outcome


def _answer(job: Job, evaluate: Callable[..., Any], finals: Callable[..., Any] | None) -> tuple[Answer, bool]:
    try:
        answer = checked_answer(job, evaluate, finals)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a candidate cost that candidate, too
        text = f"{type(error).__name__}: {error}"
        return Outcome(failure=from_exception(error)), poisons(text)
    outcomes = answer if isinstance(answer, tuple) else (answer,)
    return answer, any(outcome.failure is not None and poisons(outcome.failure.message) for outcome in outcomes)


def die_with(parent: int) -> None:
    """Be killed when the parent's thread that started us ends: a worker never outlives its run."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass  # no Linux: a worker ends with its pipe, when the job is done
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
