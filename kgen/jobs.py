"""What goes to an evaluator and what comes back: plain data that is pickled between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kgen.types import Candidate, Failure, KernelSpec, Measurement, ResourceUse, Scalar

Options = tuple[tuple[str, Scalar], ...]
"""What a plan passes on to its evaluator."""


@dataclass(frozen=True)
class TuneJob:
    """Try one candidate: verify it on adversarial inputs, then time it with `tokens` tokens."""

    spec: KernelSpec
    candidate: Candidate
    tokens: int
    options: Options = ()

    @property
    def slug(self) -> str:
        return f"{self.spec.slug} {self.candidate.slug}"


@dataclass(frozen=True)
class FinalsJob:
    """Time several candidates of one spec side by side, in `rounds` rounds; the answer is one Outcome for each job."""

    jobs: tuple[TuneJob, ...]
    rounds: int

    @property
    def slug(self) -> str:
        return f"finals of {self.jobs[0].spec.slug}" if self.jobs else "finals"


@dataclass(frozen=True)
class Outcome:
    """What came of a candidate: exactly one of `measurement` and `failure`, and what is known beside it."""

    measurement: Measurement | None = None
    failure: Failure | None = None
    resources: ResourceUse | None = None
    max_error: float | None = None

    def __post_init__(self) -> None:
        if (self.measurement is None) == (self.failure is None):
            raise ValueError("an outcome is a measurement or a failure: set exactly one of the two")


Job = TuneJob | FinalsJob
Answer = Outcome | tuple[Outcome, ...]


@dataclass(frozen=True)
class Finished:
    """A job that ended on a worker; a failed FinalsJob answers with the one failure that it died of."""

    worker: int
    job: Job
    answer: Answer


class Evaluator(Protocol):
    """Runs jobs on `workers` workers; `kgen.worker.WorkerPool` for GPUs, `InlineEvaluator` in this process."""

    @property
    def workers(self) -> int: ...

    @property
    def has_finals(self) -> bool:
        """Whether it takes FinalsJob; if not, the driver re-measures finalists one by one, in turns."""
        ...

    def submit(self, worker: int, job: Job) -> None:
        """Start a job on an idle worker."""
        ...

    def wait(self, timeout_s: float) -> list[Finished]:
        """The jobs that ended, after at most `timeout_s` seconds (empty when none did)."""
        ...

    def cancel(self) -> None:
        """Abandon running jobs at once; their candidates count as not tried."""
        ...


class EvaluateFunction(Protocol):
    """Signature of an evaluator's `evaluate`: what it raises becomes a typed Failure."""

    def __call__(self, job: TuneJob, /) -> Outcome: ...


class FinalsFunction(Protocol):
    """Signature of an evaluator's `finals`: one Outcome for each job, in order."""

    def __call__(self, jobs: Sequence[TuneJob], rounds: int, /) -> Sequence[Outcome]: ...
