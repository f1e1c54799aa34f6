"""Workers: one process per device, which may crash, hang or lose its CUDA context at the cost of one candidate.

The pool is driven by one thread (`submit`, `wait`). What workers print goes to a file each, never to the terminal; its
end becomes part of a failure's sentence.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import IO, Any

from kgen.errors import KgenError
from kgen.failures import from_exception, from_exit, sentence
from kgen.jobs import FinalsJob, Finished, Job, Outcome
from kgen.types import Failure
from kgen.worker_child import checked_answer, load_function

_TAIL_BYTES = 2000
_LOG_LIMIT = 1 << 20


class WorkerError(KgenError):
    """Workers cannot be started at all: no candidate is to blame."""


class WorkerPool:
    """One worker process per device.

    `devices` are CUDA device numbers as this process sees them, or "cpu"; `evaluate` and `finals` name functions of
    `kgen.jobs.EvaluateFunction` and `FinalsFunction` as "module:function". A job may take `timeout_s` seconds (a
    FinalsJob that for each of its candidates), the start of a process `start_timeout_s`.
    """

    def __init__(
        self,
        devices: Sequence[str | int],
        evaluate: str,
        timeout_s: float,
        *,
        finals: str | None = None,
        start_timeout_s: float = 180.0,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        if not devices:
            raise WorkerError("A worker pool needs at least one device: name one, or use --static.")
        functions = [evaluate] if finals is None else [evaluate, finals]
        self.has_finals = finals is not None
        self.replaced = 0
        self._error: WorkerError | None = None
        self._timeout_s = timeout_s
        self._workers = [
            _Worker(functions, {**_device_env(str(device)), **(extra_env or {})}, start_timeout_s) for device in devices
        ]

    @property
    def workers(self) -> int:
        return len(self._workers)

    def submit(self, worker: int, job: Job) -> None:
        """Give a job to an idle worker, whose process is started if need be."""
        limit = self._timeout_s * (max(1, len(job.jobs)) if isinstance(job, FinalsJob) else 1)
        self._workers[worker].submit(job, limit)

    def wait(self, timeout_s: float) -> list[Finished]:
        """Jobs that ended within `timeout_s`. WorkerError when processes cannot be started."""
        deadline = time.monotonic() + timeout_s
        while True:
            finished = []
            for index, worker in enumerate(self._workers):
                job = worker.job
                try:
                    outcome = worker.poll()
                except WorkerError as error:
                    self._error = error  # raised once the results of the other workers are handed over
                    continue
                if job is not None and outcome is not None:
                    self.replaced += not worker.alive
                    finished.append(Finished(index, job, outcome))
            if self._error is not None and not finished:
                raise self._error
            busy = [worker for worker in self._workers if worker.job is not None]
            now = time.monotonic()
            if finished or not busy or now >= deadline:
                return finished
            until = min([deadline, *(worker.deadline for worker in busy)])
            wait([worker.pipe for worker in busy if worker.pipe is not None], max(0.0, until - now))

    def evaluate(self, job: Job) -> Outcome | tuple[Outcome, ...]:
        """Run one job on the first worker and wait for its answer."""
        self.submit(0, job)
        while True:
            for finished in self.wait(60.0):
                if finished.job is job:
                    return finished.answer

    def cancel(self) -> None:
        """Kill the workers that are busy; they are started again when they get another job."""
        for worker in self._workers:
            if worker.job is not None:
                worker.kill()

    def close(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class InlineEvaluator:
    """Runs jobs in this process, one at a time: for tests and for evaluators that cannot hurt it."""

    workers = 1

    def __init__(self, evaluate: Any, finals: Any = None) -> None:
        self._evaluate = load_function(evaluate) if isinstance(evaluate, str) else evaluate
        self._finals = load_function(finals) if isinstance(finals, str) else finals
        self._finished: list[Finished] = []

    @property
    def has_finals(self) -> bool:
        return self._finals is not None

    def submit(self, worker: int, job: Job) -> None:
        try:
            answer = checked_answer(job, self._evaluate, self._finals)
        except Exception as error:
            answer = Outcome(failure=from_exception(error))
        self._finished.append(Finished(worker, job, answer))

    def wait(self, timeout_s: float) -> list[Finished]:
        finished, self._finished = self._finished, []
        return finished

    def cancel(self) -> None:
        self._finished = []


class _Worker:
    """A process, its pipe and its log; `job` is what it is busy with."""

    def __init__(self, functions: list[str], env: dict[str, str], start_timeout_s: float) -> None:
        self.pipe: Connection[Any, Any] | None = None
        self.job: Job | None = None
        self.deadline = 0.0
        self._functions = functions
        self._env = env
        self._start_timeout_s = start_timeout_s
        self._limit_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._ready = False
        self._failed_starts = 0
        self._log_from = 0

    @property
    def alive(self) -> bool:
        return self._process is not None

    def submit(self, job: Job, limit_s: float) -> None:
        if self.job is not None:
            raise WorkerError(f"This worker is busy with {self.job.slug}: wait for it first.")
        self.job, self._limit_s = job, limit_s
        if self._process is not None and self._process.poll() is not None:
            self.kill(keep_job=True)  # it died between two jobs, so no candidate is to blame
        if self._process is None:
            self._start()
        else:
            self._send()

    def poll(self) -> Any:
        """The answer to the job, or None while it runs."""
        if self.job is None or self.pipe is None:
            return None
        try:
            message = self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, OSError):
            return self._died()
        except Exception as error:  # the answer cannot be unpickled here
            return self._end(Outcome(failure=from_exception(error)), kill=True)
        if message is None:
            return self._hangs() if time.monotonic() >= self.deadline else None
        if message[0] == "broken":
            self.kill()
            raise WorkerError(sentence(f"The evaluator {self._functions[0]} cannot be loaded: {message[1]}"))
        if message[0] == "ready":
            self._ready, self._failed_starts = True, 0
            return self._send()
        return self._end(message[1], kill=message[2])

    def kill(self, keep_job: bool = False) -> None:
        """End the process and what it started (its session)."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            self._process.wait()
            if self.pipe is not None:
                self.pipe.close()
            if self._log is not None:
                self._log.close()
        self._process, self.pipe, self._log, self._ready = None, None, None, False
        if not keep_job:
            self.job = None

    def _start(self) -> None:
        self.pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile()
        os.set_inheritable(theirs.fileno(), True)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kgen.worker_child", str(theirs.fileno()), str(os.getpid()), *self._functions],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C of the terminal does not reach it
            env={**os.environ, **self._env, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )
        theirs.close()
        self.deadline = time.monotonic() + self._start_timeout_s

    def _send(self) -> Any:
        assert self.pipe is not None
        if self._log is not None and os.fstat(self._log.fileno()).st_size > _LOG_LIMIT:
            os.ftruncate(self._log.fileno(), 0)
        self._log_from = self._log_size()
        self.deadline = time.monotonic() + self._limit_s
        try:
            self.pipe.send(self.job)
        except OSError:
            return self._died()
        return None

    def _died(self) -> Any:
        assert self._process is not None and self.job is not None
        try:
            code: int | None = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        if self._ready:
            return self._end(Outcome(failure=from_exit(code, self.job.slug, self._tail())), kill=True)
        return self._bad_start(f"a worker ended with {code} before it was ready")

    def _hangs(self) -> Any:
        assert self.job is not None
        if not self._ready:
            return self._bad_start(f"a worker was not ready after {self._start_timeout_s:.0f} s")
        text = f"No result within {self._limit_s:g} s of {self.job.slug}, so the worker was killed"
        return self._end(Outcome(failure=Failure("timeout", sentence(text, self._tail()))), kill=True)

    def _bad_start(self, what: str) -> Any:
        tail = self._tail()
        self.kill(keep_job=True)
        self._failed_starts += 1
        if self._failed_starts >= 2:
            self.job = None
            raise WorkerError(sentence(f"Workers cannot be started: {what}", tail))
        self._start()
        return None

    def _end(self, answer: Any, kill: bool) -> Any:
        self.job = None
        if kill:
            self.kill()
        return answer

    def _log_size(self) -> int:
        return os.fstat(self._log.fileno()).st_size if self._log is not None else 0

    def _tail(self) -> str:
        if self._log is None:
            return ""
        start = max(self._log_from, self._log_size() - _TAIL_BYTES)
        return os.pread(self._log.fileno(), _TAIL_BYTES, start).decode("utf-8", "replace")


def _device_env(device: str) -> dict[str, str]:
    """Make one device visible, counted among those that this process may see."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and device.isdigit():
        names = visible.split(",")
        if int(device) >= len(names):
            raise WorkerError(f"Device {device} is not visible: CUDA_VISIBLE_DEVICES lists {len(names)}.")
        device = names[int(device)].strip()
    return {"CUDA_VISIBLE_DEVICES": device}
