"""Tuning of one spec: search, record, then the finalists side by side."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kgen.jobs import Evaluator, FinalsJob, Finished, Outcome, TuneJob
from kgen.ledger import Claims, Ledger
from kgen.measure import is_interleaved, mark_interleaved, pool
from kgen.progress import Reporter, SpecSummary
from kgen.records import winner
from kgen.search import make_search
from kgen.tiers import TIERS
from kgen.ties import at_half_tokens, rivals
from kgen.types import INPUTS_RECIPE, Candidate, Failure, KernelSpec, Measurement, TuneRecord

if TYPE_CHECKING:
    from kgen.tune import SpecPlan, TunePlan

_POLL_S = 0.25
_GRACE_S = 2.0
_SCREENING_SHARE = 0.85  # of a spec's time; the rest is for the finals


@dataclass(frozen=True)
class Desk:
    """What all specs of a run share. `stopping` says whether the user asked to stop."""

    evaluator: Evaluator
    ledger: Ledger
    claims: Claims
    reporter: Reporter
    stopping: Callable[[], bool]


class SpecRun:
    """One spec of a plan, with `seconds` of time (None: as long as there are points)."""

    def __init__(self, plan: TunePlan, item: SpecPlan, desk: Desk, seconds: float | None) -> None:
        self._plan, self._item, self._desk = plan, item, desk
        self._start = time.monotonic()
        self._deadline = None if seconds is None else self._start + seconds * _SCREENING_SHARE
        self._points = {
            candidate: desk.ledger.fingerprint(item.spec, candidate)
            for part in item.parts
            for candidate in part.feasible
        }
        before = winner(desk.ledger.of(item.spec))
        self._incumbent = before if before is not None and is_interleaved(_time(before)) else None
        self._running: dict[int, Candidate] = {}
        self._tried = 0
        known = self._known()
        self._known_before = len(known)
        self._done = len(known)
        first = [*([before.candidate] if before else []), *desk.ledger.outdated(item.spec)]
        first += [*item.first, *desk.ledger.neighbours(item.spec)]
        self._search = make_search(
            item.parts,
            known=known,
            first=first,
            exhaustive_limit=plan.exhaustive_limit,
            seed=plan.seed,
            workers=desk.evaluator.workers,
            first_worker=plan.first_worker,
            storage=plan.storage,
            study_name=study_name(plan, item),
            message=desk.reporter.message,
        )

    def run(self) -> SpecSummary:
        """Try points until the budget is used, then the finals; an interrupted run skips those."""
        total = self._total()
        self._desk.reporter.spec_started(self._item.spec.slug, total, self._known_before, self._search.strategy)
        self._screen()
        if not self._desk.stopping():
            self._finals()
        summary = self._summary()
        self._desk.reporter.spec_done(summary)
        return summary

    # ---- screening ----

    def _known(self) -> dict[Candidate, float | None]:
        """Candidates that have a record, with their screening time."""
        out: dict[Candidate, float | None] = {}
        for record in self._desk.ledger.of(self._item.spec):
            if record.candidate in self._points and not _is_final(record):
                out[record.candidate] = record.measurement.median_us if record.measurement else None
        return out

    def _total(self) -> int | None:
        limits = [len(self._points)] if self._plan.seconds is None or self._search.strategy == "exhaustive" else []
        if self._plan.trials is not None:
            limits.append(max(self._plan.trials, self._known_before))
        return min(limits) if limits else None

    def _screen(self) -> None:
        while True:
            waiting = False
            if not self._budget_is_used():
                waiting = self._fill_workers()
            if not self._running and not waiting:
                return
            if self._desk.stopping():
                self._wind_up()
                return
            if not self._running:
                time.sleep(_POLL_S)  # another process has the points that are left
            for finished in self._desk.evaluator.wait(_POLL_S) if self._running else []:
                self._record(finished)

    def _budget_is_used(self) -> bool:
        late = self._deadline is not None and time.monotonic() >= self._deadline
        trials = self._plan.trials
        full = trials is not None and self._done + len(self._running) >= trials
        return late or full or self._desk.stopping()

    def _fill_workers(self) -> bool:
        """Give every idle worker a point; whether other processes hold points that are left."""
        waiting = False
        for worker in range(self._desk.evaluator.workers):
            if worker in self._running or self._budget_is_used():
                continue
            candidate, waiting = self._next(worker)
            if candidate is None:
                break
            self._running[worker] = candidate
            self._desk.evaluator.submit(worker, self._job(candidate))
        return waiting

    def _next(self, worker: int) -> tuple[Candidate | None, bool]:
        """An unknown point that is claimed for us; and whether others hold points that we could not have."""
        held: list[Candidate] = []
        found: Candidate | None = None
        while found is None and len(held) <= 8 * self._desk.evaluator.workers:
            candidate = self._search.ask(worker)
            if candidate is None:
                break
            point = self._points[candidate]
            if not self._desk.claims.take(point):
                held.append(candidate)
                continue
            self._desk.ledger.refresh()  # the one who had the claim before may have measured it
            known = self._desk.ledger.knows(point)
            if known is None:
                found = candidate
            else:
                self._desk.claims.free(point)
                self._search.tell(candidate, known.measurement.median_us if known.measurement else None)
                self._done += 1
        for candidate in held:
            self._search.release(candidate)
        return found, bool(held)

    def _record(self, finished: Finished) -> None:
        candidate = self._running.pop(finished.worker)
        outcome = finished.answer
        assert isinstance(outcome, Outcome)
        self._desk.ledger.add([self._to_record(candidate, outcome)])  # on the disk before anything else knows it
        self._desk.claims.free(self._points[candidate])
        self._tried += 1
        self._done += 1
        self._search.tell(candidate, outcome.measurement.median_us if outcome.measurement else None)
        self._desk.reporter.trial(candidate, outcome)

    def _wind_up(self) -> None:
        """After Ctrl-C: what ends within a moment is kept, the rest is killed and counts as not tried."""
        self._desk.reporter.message("Stopping: what was measured is kept; Ctrl-C again stops at once.")
        until = time.monotonic() + _GRACE_S
        while self._running and time.monotonic() < until:
            for finished in self._desk.evaluator.wait(_POLL_S):
                self._record(finished)
        self._desk.evaluator.cancel()
        for candidate in self._running.values():
            self._desk.claims.free(self._points[candidate])
        self._running.clear()

    def _job(self, candidate: Candidate) -> TuneJob:
        tokens = self._item.tokens or self._item.spec.tokens
        return TuneJob(self._item.spec, candidate, tokens, self._plan.options)

    def _to_record(self, candidate: Candidate, outcome: Outcome) -> TuneRecord:
        return TuneRecord(
            spec=self._item.spec,
            candidate=candidate,
            template_hash=self._plan.template_hashes[candidate.family],
            environment=self._plan.environment,
            resources=outcome.resources,
            measurement=outcome.measurement,
            failure=outcome.failure,
            max_error=outcome.max_error,
            inputs=INPUTS_RECIPE,
        )

    # ---- finals ----

    def _finals(self) -> None:
        self._race(self._item.spec, self._finalists())
        half = self._item.spec.half
        if half is not None and self._item.tokens is None and not self._desk.stopping():
            self._race(half, self._rivals())

    def _race(self, spec: KernelSpec, finalists: list[Candidate]) -> None:
        """Time candidates side by side, unless they all were: those of the spec, or of its half. What failed with half of the
        tokens is not tried again: nothing else of the half would make it a finalist or not."""
        half = spec != self._item.spec
        done = {r.candidate for r in self._desk.ledger.of(spec) if _is_final(r) or (half and r.failure is not None)}
        if len(finalists) < 2 or done.issuperset(finalists):
            return
        claim = f"finals {spec.slug} {sorted(self._plan.template_hashes.items())}"
        if not self._desk.claims.take(claim):
            self._desk.reporter.message(f"{spec.slug}: another process holds the finals.")
            return
        try:
            outcomes = self._side_by_side(spec, finalists)
            if outcomes is not None:
                self._desk.ledger.add(self._final_records(spec, finalists, outcomes))
        finally:
            self._desk.claims.free(claim)

    def _rivals(self) -> list[Candidate]:
        """What may be the faster one with half of the bucket's tokens, as it is there (`kgen.ties`)."""
        near: dict[Candidate, None] = {}
        for serves in TIERS:
            records = [r for r in self._desk.ledger.of(self._item.spec) if serves(r.candidate)]
            best = winner(records)
            if best is not None and _is_final(best):
                some = dict.fromkeys(map(at_half_tokens, rivals(records, best)))
                near.update(some if len(some) > 1 else {})
        return list(near)

    def _finalists(self) -> list[Candidate]:
        """The fastest of the screening, the fastest of those that serve calls which it cannot, and the incumbent."""
        times = {candidate: us for candidate, us in self._known().items() if us is not None}
        ranked = sorted(times, key=lambda candidate: (times[candidate], candidate.slug))
        finalists = ranked[: self._plan.finalists]
        for serves in TIERS[1:]:
            best = next((candidate for candidate in ranked if serves(candidate)), None)
            if best is not None and best not in finalists:
                finalists.append(best)
        if self._incumbent is not None and self._incumbent.candidate not in finalists and finalists:
            finalists.append(self._incumbent.candidate)
        return finalists

    def _side_by_side(self, spec: KernelSpec, finalists: list[Candidate]) -> list[Outcome] | None:
        """One outcome each, or None when the run was interrupted."""
        tokens = self._item.tokens or spec.tokens
        jobs = [TuneJob(spec, candidate, tokens, self._plan.options) for candidate in finalists]
        if self._desk.evaluator.has_finals:
            answer = self._answer(FinalsJob(tuple(jobs), self._plan.rounds))
            if answer is None or isinstance(answer, tuple):
                return None if answer is None else list(answer)
            assert isinstance(answer, Outcome) and answer.failure is not None
            why = answer.failure.message
            self._desk.reporter.message(f"{spec.slug}: the finals failed, so finalists take turns. {why}")
        return self._in_turns(jobs)

    def _in_turns(self, jobs: list[TuneJob]) -> list[Outcome] | None:
        outcomes: list[list[Outcome]] = [[] for _ in jobs]
        for turn in range(self._plan.rounds):
            order = [*range(turn % len(jobs), len(jobs)), *range(turn % len(jobs))]
            for index in order:
                if any(outcome.failure is not None for outcome in outcomes[index]):
                    continue
                answer = self._answer(jobs[index])
                if answer is None:
                    return None
                assert isinstance(answer, Outcome)
                outcomes[index].append(answer)
        return [_pooled(each) for each in outcomes]

    def _answer(self, job: TuneJob | FinalsJob) -> Outcome | tuple[Outcome, ...] | None:
        """Run a job on the first worker, so that all finalists see one card; None when the user asked to stop."""
        self._desk.evaluator.submit(0, job)
        while True:
            for finished in self._desk.evaluator.wait(_POLL_S):
                return finished.answer
            if self._desk.stopping():
                self._desk.evaluator.cancel()
                return None

    def _final_records(self, spec: KernelSpec, finalists: list[Candidate], outcomes: list[Outcome]) -> list[TuneRecord]:
        """The incumbent first, then by time: `records.winner` compares them in this order."""
        resources = {r.candidate: r.resources for r in self._desk.ledger.of(spec) if r.resources}
        pairs = []
        for candidate, outcome in zip(finalists, outcomes, strict=True):
            if outcome.measurement is not None:
                outcome = replace(outcome, measurement=mark_interleaved(outcome.measurement))
            pairs.append((candidate, replace(outcome, resources=outcome.resources or resources.get(candidate))))
        incumbent = self._incumbent.candidate if self._incumbent else None
        pairs.sort(
            key=lambda pair: (pair[0] != incumbent, pair[1].measurement.median_us if pair[1].measurement else 0.0)
        )
        return [replace(self._to_record(candidate, outcome), spec=spec) for candidate, outcome in pairs]

    # ---- the end ----

    def _summary(self) -> SpecSummary:
        records = self._desk.ledger.of(self._item.spec)
        best = winner(records)
        failures = [r.failure for r in records if r.failure is not None and r.candidate in self._points]
        old = self._incumbent
        nothing = best is None and (failures or not self._points) and not self._desk.stopping()
        return SpecSummary(
            spec=self._item.spec.slug,
            strategy=self._search.strategy,
            feasible=len(self._points),
            known=self._known_before,
            tried=self._tried,
            failures=tuple(sorted(Counter(failure.kind for failure in failures).items())),
            rejected=self._item.rejected,
            hits=self._search.hits,
            winner=best.candidate.slug if best else None,
            winner_us=_time(best).median_us if best else None,
            incumbent=old.candidate.slug if old else None,
            incumbent_us=_time(old).median_us if old else None,
            kept_incumbent=bool(old and best and self._tried and best.candidate == old.candidate),
            error=all_failed(failures, self._item.rejected) if nothing else None,
            seconds=round(time.monotonic() - self._start, 3),
        )


def all_failed(failures: list[Failure], rejected: tuple[tuple[str, int], ...]) -> str:
    """The error of a spec without a single valid candidate: the count of each kind and its first message."""
    if not failures:
        why = ", ".join(f"{count} by {name}" for name, count in rejected) or "the space is empty"
        return f"No candidate is feasible ({why}): widen the space or correct its restrictions."
    counts = Counter(failure.kind for failure in failures)
    firsts = {failure.kind: failure.message for failure in reversed(failures)}
    kinds = " ".join(f"[{kind}: {count}] {firsts[kind]}" for kind, count in counts.most_common())
    return f"All {len(failures)} candidates failed. {kinds}"


def study_name(plan: TunePlan, item: SpecPlan) -> str:
    """One study for a spec, a device class and the templates of its families."""
    families = sorted({part.feasible[0].family for part in item.parts if part.feasible})
    hashes = " ".join(f"{family}={plan.template_hashes[family][:12]}" for family in families)
    return f"{item.spec.slug} {plan.environment.device_class} {hashes}"


def _pooled(outcomes: list[Outcome]) -> Outcome:
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if failed or not outcomes:
        return failed[0]
    times = [outcome.measurement for outcome in outcomes if outcome.measurement is not None]
    medians = [time.median_us for time in times]
    # between rounds the card drifts: that is noise, too
    low, high = min(medians), max(medians)
    pooled = pool(times)
    spread = replace(pooled, p10_us=min(pooled.p10_us, low), p90_us=max(pooled.p90_us, high))
    errors = [outcome.max_error for outcome in outcomes if outcome.max_error is not None]
    return replace(outcomes[-1], measurement=spread, max_error=max(errors) if errors else None)


def _is_final(record: TuneRecord) -> bool:
    return record.measurement is not None and is_interleaved(record.measurement)


def _time(record: TuneRecord) -> Measurement:
    assert record.measurement is not None
    return record.measurement
