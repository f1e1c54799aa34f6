"""`kgen tune --static`: compile what is missing, rank, and write one static record per spec. Needs no GPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kgen.archs import ArchSpec
from kgen.build import ProbeJob, attention_job, compile_all
from kgen.config import config_root
from kgen.environment import STATIC, current_environment
from kgen.probe_records import ProbeRecord, ProbeStore
from kgen.records import RecordStore, winner
from kgen.render import template_hash
from kgen.space import spaces_of
from kgen.static import Pick, Result, candidates_of, choose, combine_jobs, diverse, options_of, ranked, refusal, vote
from kgen.types import TOKEN_BUCKETS, Candidate, Environment, KernelSpec, TuneRecord

BUDGET = 60
"""Attention kernels compiled for all specs of an arch in the first round (about 2 s each and core)."""

ROUNDS = 4
"""Further rounds, of a few kernels each, for specs that nothing compiled so far serves."""

Say = Callable[[str], None]


@dataclass
class StaticSummary:
    """What a run did. `unserved`: slugs of specs for which no compiled kernel fits; `rejected`: kernels by reason."""

    arch: str
    specs: int = 0
    current: int = 0
    written: int = 0
    compiled: int = 0
    looked_up: int = 0
    kernels: int = 0
    seconds: float = 0.0
    rejected: dict[str, int] = field(default_factory=dict)
    unserved: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        out = [
            f"{self.arch}: {self.specs} specs, {self.current} current already, {self.written} picks written",
            f"kernels: {self.compiled} compiled in {self.seconds:.0f} s, {self.looked_up} looked up, {self.kernels} picked",
        ]
        if self.rejected:
            out.append("rejected: " + ", ".join(f"{count} {word}" for word, count in sorted(self.rejected.items())))
        return out + [f"no kernel fits: {slug}" for slug in self.unserved]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def probe_store(arch_name: str) -> ProbeStore:
    """The checked-in compile results of an arch."""
    return ProbeStore(config_root() / "records" / f"compile-{arch_name}.jsonl")


class Prober:
    """Compile results by job: from the store (or from `known`, by key) where they are, else compiled (once) and appended to
    the store as they come."""

    def __init__(
        self, store: ProbeStore, workers: int | None, say: Say, known: Mapping[str, Result] | None = None
    ) -> None:
        self.store, self.workers, self.say = store, workers, say
        self.known = {**(known or {}), **store.load().results}
        self.results: dict[ProbeJob, Result] = {}
        self.compiled = 0

    def look_up(self, jobs: Iterable[ProbeJob]) -> None:
        """Take what the store has."""
        for job in jobs:
            if job not in self.results and job.key in self.known:
                self.results[job] = self.known[job.key]

    def compile(self, jobs: Sequence[ProbeJob]) -> None:
        """Make sure that every job has a result."""
        self.look_up(jobs)
        missing = [job for job in dict.fromkeys(jobs) if job not in self.results]
        if not missing:
            return
        self.say(f"compiling {len(missing)} kernels for {missing[0].arch}")
        done = 0

        def keep(job: ProbeJob, result: Result) -> None:
            nonlocal done
            done += 1
            self.compiled += 1
            self.known[job.key] = result
            self.store.append([ProbeRecord(job.key, result)])
            if done % 10 == 0 or done == len(missing):
                self.say(f"  {done}/{len(missing)}")

        self.results.update(compile_all(missing, self.workers, keep))


def run_static(
    arch: ArchSpec,
    specs: Sequence[KernelSpec],
    store: RecordStore,
    workers: int | None,
    say: Say,
    *,
    probes: ProbeStore | None = None,
    known: Mapping[str, Result] | None = None,
    redo: bool = False,
    budget: int = BUDGET,
) -> StaticSummary:
    """Rank compiled candidates for every spec without a current static record, and write the picks.

    Candidates and results of earlier runs are looked up, so that a second run compiles nothing. `redo` ranks the specs
    with a current record, too; `budget` bounds the kernels of the first round. `probes` takes the place of the checked-in
    compile results; `known` are further ones, which are read only.
    """
    began = time.monotonic()
    summary = StaticSummary(arch.name, specs=len(specs))
    prober = Prober(probes or probe_store(arch.name), workers, say, known)
    current = {} if redo else current_picks(arch, store)
    todo = [spec for spec in specs if spec not in current]
    summary.current = len(specs) - len(todo)
    if todo:
        spaces = list(spaces_of(arch.name, gluon=False).values())
        wanted = {spec: [c for space in spaces for c in candidates_of(spec, space, arch)] for spec in todo}
        used = {attention_job(r.spec, r.candidate, arch.cc) for r in current.values()}
        _compile_wanted(wanted, arch, prober, budget, say)
        picks = choose(wanted, arch, prober.results, used)
        environment = current_environment(arch.name, STATIC)
        store.append_all(_record(pick, environment) for pick in picks)
        summary.written = len(picks)
        served = {pick.spec for pick in picks}
        summary.unserved = [spec.slug for spec in todo if spec not in served]
        summary.kernels = len({attention_job(p.spec, p.candidate, arch.cc) for p in picks} | used)
    prober.compile([*combine_jobs(arch), *measured_jobs(arch, specs)])
    words = (refusal(result, arch, job.num_warps) for job, result in prober.results.items())
    summary.rejected = dict(Counter(word for word in words if word is not None))
    summary.compiled = prober.compiled
    summary.looked_up = len(prober.results) - prober.compiled
    summary.seconds = time.monotonic() - began
    return summary


def _compile_wanted(
    wanted: Mapping[KernelSpec, Sequence[Candidate]], arch: ArchSpec, prober: Prober, budget: int, say: Say
) -> None:
    """Compile by vote; then, for specs that nothing serves, their next choices."""
    say(f"ranking {sum(map(len, wanted.values()))} candidates of {len(wanted)} specs for {arch.name}")
    for spec, candidates in wanted.items():
        prober.look_up({attention_job(spec, c, arch.cc) for c in candidates})
    # what earlier runs compiled for these layouts counts against the budget
    chosen = vote(_wishes(wanted, arch, prober), prober.results, max(0, budget - len(prober.results)))
    prober.compile(chosen)
    for _ in range(ROUNDS):
        hungry = {s: c for s, c in wanted.items() if not options_of(s, c, arch, prober.results)[0]}
        if not hungry:
            return
        chosen = vote(_wishes(hungry, arch, prober), prober.results, max(4, min(12, len(hungry))))
        if not chosen:
            return
        prober.compile(chosen)


def _wishes(
    wanted: Mapping[KernelSpec, Sequence[Candidate]], arch: ArchSpec, prober: Prober
) -> dict[KernelSpec, list[ProbeJob]]:
    """Per spec, the kernels of its best candidates; specs that differ in page size alone vote once."""
    first: dict[KernelSpec, KernelSpec] = {}
    for spec in wanted:
        first.setdefault(replace(spec, page=0, extra_page=0), spec)
    wishes = {}
    for spec in first.values():
        jobs = diverse(ranked(spec, wanted[spec], arch, prober.results), spec, arch)
        base = attention_job(spec, wanted[spec][0], arch.cc)  # the base point of a search is always worth a look
        wishes[spec] = list(dict.fromkeys([*jobs[:1], base, *jobs[1:]]))
    return wishes


def current_picks(arch: ArchSpec, store: RecordStore) -> dict[KernelSpec, TuneRecord]:
    """The static records that hold for the templates of now, by spec."""
    return {
        r.spec: r
        for r in store.load().records
        if r.status == "static" and r.spec.arch == arch.name and r.template_hash == template_hash(r.candidate.family)
    }


def measured_jobs(arch: ArchSpec, specs: Iterable[KernelSpec]) -> list[ProbeJob]:
    """The kernels that measured winners of these specs point at; for widths that grow the generic form is what ships."""
    jobs: dict[ProbeJob, None] = {}
    wanted = set(specs)
    for record in measured_winners(arch):
        if record.spec not in wanted:
            continue
        for candidate in (record.candidate, generic(record.candidate)):
            jobs[attention_job(record.spec, candidate, arch.cc)] = None
    return list(jobs)


def measured_candidates(arch: ArchSpec) -> list[Candidate]:
    """The candidates that won anywhere on this arch, in their exact and in their generic form."""
    found = (r.candidate for r in measured_winners(arch))
    return list(dict.fromkeys(form for candidate in found for form in (candidate, generic(candidate))))


def measured_winners(arch: ArchSpec) -> list[TuneRecord]:
    """The record that counts of every spec that was measured on a device class of this arch."""
    winners = []
    for device in arch.devices:
        groups: dict[KernelSpec, list[TuneRecord]] = {}
        for record in RecordStore(config_root() / "records" / f"{device.name}.jsonl").load().records:
            if record.spec.tokens in TOKEN_BUCKETS:
                groups.setdefault(record.spec, []).append(record)
        winners += [best for best in map(winner, groups.values()) if best is not None]
    return winners


def generic(candidate: Candidate) -> Candidate:
    """The candidate with the shape as run-time arguments."""
    return Candidate.make(candidate.family, {**dict(candidate.tunables), "specialise": False}, candidate.launch)


def _record(pick: Pick, environment: Environment) -> TuneRecord:
    return TuneRecord(
        spec=pick.spec, candidate=pick.candidate, template_hash=template_hash(pick.candidate.family),
        environment=environment, resources=pick.use, estimate_us=round(pick.us, 2),
        considered=pick.considered, rejected=pick.rejected,
    )  # fmt: skip
