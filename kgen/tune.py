"""The tuning driver: specs × budget → workers → records. It may be killed at any moment and run again.

What is recorded is never measured again under the same spec, candidate, template and compute capability; what was being
measured when the run was killed is not recorded, and tried again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from kgen.environment import STATIC, overrides, require_recordable
from kgen.errors import KgenError, RecordError
from kgen.grid import AxisLike
from kgen.jobs import Evaluator, FinalsJob, Options, Outcome, TuneJob
from kgen.ledger import Claims, Ledger
from kgen.progress import NullReporter, Reporter, SpecSummary, TuneSummary
from kgen.records import RecordStore
from kgen.search import SearchPart
from kgen.spec_run import Desk, SpecRun
from kgen.storage import check_storage
from kgen.types import Candidate, Environment, KernelSpec

__all__ = [
    "AxisLike", "Evaluator", "FinalsJob", "Outcome", "SearchPart", "SpecForecast", "SpecPlan", "TuneError", "TuneJob",
    "TunePlan", "TuneSummary", "forecast", "tune",
]  # fmt: skip


class TuneError(KgenError):
    """No spec of a run has a single valid candidate; `summary` holds what happened."""

    def __init__(self, text: str, summary: TuneSummary) -> None:
        super().__init__(text)
        self.summary = summary


@dataclass(frozen=True)
class SpecPlan:
    """A spec with its feasible candidates by family. `weight` is its share of the time; `first` are tried before
    others.
    """

    spec: KernelSpec
    parts: tuple[SearchPart, ...]
    weight: float = 1.0
    tokens: int | None = None  # None: the bucket
    first: tuple[Candidate, ...] = ()
    rejected: tuple[tuple[str, int], ...] = ()  # what fell before: by restriction or compile result


@dataclass(frozen=True)
class TunePlan:
    """What to tune and how much.

    `seconds` is shared by all specs by weight, time that one leaves goes to the later ones; `trials` is the number of
    points of a spec, those of earlier runs included. Without both, every feasible point is tried. `stale` measures
    again what other versions of Triton, torch, driver or kgen measured.
    """

    specs: tuple[SpecPlan, ...]
    environment: Environment
    template_hashes: Mapping[str, str]  # by family
    seconds: float | None = None
    trials: int | None = None
    finalists: int = 4
    rounds: int = 5
    exhaustive_limit: int = 128
    seed: int = 0
    first_worker: int = 0  # of this process among all that share a study: seeds are seed + first_worker + worker
    storage: str | None = None
    stale: bool = False
    options: Options = ()


@dataclass(frozen=True)
class SpecForecast:
    """What a run would do for one spec (`--dry-run`)."""

    spec: str
    strategy: str
    feasible: int
    known: int
    to_try: int | None  # None: as many as fit the time
    seconds: float | None
    rejected: tuple[tuple[str, int], ...]

    def line(self) -> str:
        points = f"{self.to_try} points" if self.to_try is not None else f"points for {self.seconds:.0f} s"
        return f"{self.spec}: {self.strategy}, {points} to try, {self.known} known, {self.feasible} feasible"


def forecast(plan: TunePlan, store: RecordStore) -> list[SpecForecast]:
    """What `tune` would do now; nothing is measured and nothing written."""
    ledger = Ledger(store, plan.environment, plan.template_hashes, plan.stale)
    weights = sum(item.weight for item in plan.specs) or 1.0
    out = []
    for item in plan.specs:
        points = {c: ledger.fingerprint(item.spec, c) for part in item.parts for c in part.feasible}
        known = sum(ledger.knows(point) is not None for point in points.values())
        exhaustive = len(points) <= plan.exhaustive_limit
        to_try: int | None = len(points) - known
        if plan.trials is not None:
            to_try = min(len(points) - known, max(0, plan.trials - known))
        elif plan.seconds is not None and not exhaustive:
            to_try = None
        seconds = None if plan.seconds is None else plan.seconds * item.weight / weights
        strategy = "exhaustive" if exhaustive else "tpe"
        out.append(SpecForecast(item.spec.slug, strategy, len(points), known, to_try, seconds, item.rejected))
    return out


def tune(plan: TunePlan, evaluator: Evaluator, store: RecordStore, reporter: Reporter | None = None) -> TuneSummary:
    """Tune every spec of the plan and record each outcome as it comes.

    The first Ctrl-C ends the run cleanly (`exit_code` 130), the second at once. Raises RecordError when nothing may be
    recorded here, and TuneError when no spec got a winner and at least one failed altogether.
    """
    _check(plan)
    reporter = reporter or NullReporter()
    start = time.monotonic()
    try:
        damaged = [aside for aside in store.load().set_aside if aside.damaged]
        if damaged:
            store.quarantine()
            reporter.message(
                f"{len(damaged)} damaged lines of {store.path.name} were moved to {store.path.name}.damaged."
            )
        for sentence in overrides():
            reporter.message(sentence)
        ledger = Ledger(store, plan.environment, plan.template_hashes, plan.stale)
        claims = Claims(store)
        try:
            with _stop_on_sigint() as stop:
                summaries = _run_specs(plan, Desk(evaluator, ledger, claims, reporter, stop.is_set))
                interrupted = stop.is_set()
        finally:
            claims.close()
            evaluator.cancel()
    finally:
        reporter.close()
    seconds = round(time.monotonic() - start, 3)
    summary = TuneSummary(tuple(summaries), len(plan.specs), interrupted, seconds, store.path.name, len(damaged))
    if summary.errors and not interrupted and all(spec.winner is None for spec in summary.specs):
        raise TuneError(" ".join(f"{s.spec}: {s.error}" for s in summary.specs if s.error), summary)
    return summary


def _check(plan: TunePlan) -> None:
    require_recordable()
    check_storage(plan.storage)
    if plan.environment.device_class == STATIC:
        raise RecordError("A static environment measures nothing: rank candidates with --static instead.")
    for item in plan.specs:
        if item.spec.arch != plan.environment.arch:
            raise RecordError(f"{item.spec.slug} cannot be measured on {plan.environment.arch}: plan it for that arch.")


def _run_specs(plan: TunePlan, desk: Desk) -> list[SpecSummary]:
    end = None if plan.seconds is None else time.monotonic() + plan.seconds
    summaries: list[SpecSummary] = []
    for index, item in enumerate(plan.specs):
        if desk.stopping():
            break
        share: float | None = None
        if end is not None:
            left = end - time.monotonic()
            if left <= 0:
                break
            weights = sum(later.weight for later in plan.specs[index:]) or 1.0
            share = left * item.weight / weights
        summaries.append(SpecRun(plan, item, desk, share).run())
    return summaries


@contextmanager
def _stop_on_sigint() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second raises KeyboardInterrupt. Outside the main thread it is never
    set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_sigint(signum: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()  # nothing is printed here: the handler may interrupt a print

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
