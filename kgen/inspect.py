"""What a model's search spaces hold on an arch: points that fit, points that a restriction refuses, points nobody compiled.

Counts are sums over the model's specs, and every point is counted once: refused by a restriction (the first in the order
of decision has it), or feasible and then compiled (fine, over the limits, failed, spilling) or unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kgen.archs import ArchSpec, load_arch
from kgen.build import ProbeJob, attention_job
from kgen.models import load_model, model_specs
from kgen.probe_records import ProbeStore
from kgen.render import chunk_choices
from kgen.runtime.families import FAMILIES
from kgen.space import FEASIBLE, SearchSpace, environment, spaces_of
from kgen.static import Result, candidates_of, refusal
from kgen.static_run import measured_candidates
from kgen.types import Candidate, KernelSpec

OK = "ok"
UNKNOWN = "unknown"


@dataclass
class FamilyReport:
    """The space of one kernel family, summed over the specs. `points` is size x specs and the sum of all counts."""

    family: str
    size: int
    specs: int
    restricted: dict[str, int] = field(default_factory=dict)
    sentences: dict[str, str] = field(default_factory=dict)
    probed: dict[str, int] = field(default_factory=dict)  # ok, over limits, compile failed, spills, …
    unknown: int = 0

    @property
    def points(self) -> int:
        return self.size * self.specs

    @property
    def counted(self) -> int:
        return sum(self.restricted.values()) + sum(self.probed.values()) + self.unknown

    def lines(self) -> list[str]:
        out = [f"{self.family}: {self.size:,} points x {self.specs} specs = {self.points:,}"]
        for name, count in sorted(self.restricted.items(), key=lambda item: -item[1]):
            out.append(f"  {count:>13,}  {name}: {self.sentences[name]}")
        for word, count in sorted(self.probed.items(), key=lambda item: (item[0] != OK, item[0])):
            out.append(f"  {count:>13,}  compiled, {word}")
        return [*out, f"  {self.unknown:>13,}  feasible, never compiled", f"  {self.counted:>13,}  in all"]


@dataclass
class InspectReport:
    """The spaces of a model on an arch, and the specs for which no compiled kernel fits."""

    model: str
    arch: str
    families: list[FamilyReport]
    kernels: dict[str, int]  # compile results of kernels that these specs can use, by outcome
    unserved: list[str]

    def lines(self) -> list[str]:
        out = [f"{self.model} on {self.arch}"]
        for family in self.families:
            out += family.lines()
        kernels = ", ".join(f"{count} {word}" for word, count in sorted(self.kernels.items())) or "none"
        out.append(f"compiled kernels: {kernels}")
        if self.unserved:
            out.append(f"{len(self.unserved)} specs without a compiled kernel that fits, such as {self.unserved[0]}")
        return out

    def to_json(self) -> dict[str, Any]:
        extra = [{"points": family.points, "counted": family.counted} for family in self.families]
        value = asdict(self)
        for family, more in zip(value["families"], extra, strict=True):
            family.update(more)
        return value


def inspect(model_name: str, arch_name: str, probe_store: ProbeStore) -> InspectReport:
    """Count the points of every space for every spec of the model, with the results that `probe_store` holds."""
    arch = load_arch(arch_name)
    specs = model_specs(load_model(model_name), arch_name)
    results = probe_store.load().results
    families, kernels = [], {}
    served: set[KernelSpec] = set()
    for space in spaces_of(arch_name).values():
        compiled = compiled_kernels(specs, space, arch, results)
        kernels.update({job: word_of(result, arch, job) for job, (_, result) in compiled.items()})
        family, found = _family(space, specs, arch, compiled)
        families.append(family)
        served |= found
    unserved = [spec.slug for spec in specs if spec not in served]
    return InspectReport(model_name, arch_name, families, dict(Counter(kernels.values())), unserved)


def word_of(result: Result, arch: ArchSpec, job: ProbeJob) -> str:
    return refusal(result, arch, job.num_warps) or OK


def compiled_kernels(
    specs: Iterable[KernelSpec], space: SearchSpace, arch: ArchSpec, results: Mapping[str, Result]
) -> dict[ProbeJob, tuple[Candidate, Result]]:
    """The kernels of these specs that have a result, each with a candidate that means it.

    Looked for is what static ranking and the measured winners can have compiled; a result is named by a digest, so that
    the job cannot be read from it.
    """
    found: dict[ProbeJob, tuple[Candidate, Result]] = {}
    seen: set[ProbeJob] = set()
    measured = [c for c in measured_candidates(arch) if c.family == space.family]
    for spec in _one_per_module(specs):
        for candidate in [*candidates_of(spec, space, arch), *measured]:
            if not _has_text(candidate, spec):
                continue
            job = attention_job(spec, candidate, arch.cc)
            if job not in seen:
                seen.add(job)
                if job.key in results:
                    found[job] = candidate, results[job.key]
    for spec in specs:  # shape constants make a kernel of their own
        for candidate in measured:
            if not _has_text(candidate, spec):
                continue
            job = attention_job(spec, candidate, arch.cc)
            if candidate["specialise"] and job not in seen:
                seen.add(job)
                if job.key in results:
                    found[job] = candidate, results[job.key]
    return found


def _has_text(candidate: Candidate, spec: KernelSpec) -> bool:
    """Whether the candidate's family has a module for the spec's layout: one measured on another layout may not."""
    if spec.layout not in FAMILIES[candidate.family].layouts:
        return False
    return candidate.chunk == 0 or candidate.chunk in chunk_choices(spec.kv)


def _one_per_module(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Specs whose generic kernels differ: by layout, second cache and what decides the tiles and splits in question."""
    first: dict[tuple[object, ...], KernelSpec] = {}
    for spec in specs:
        first.setdefault((spec.layout, spec.dual, spec.heads, spec.tokens), spec)
    return list(first.values())


def _family(
    space: SearchSpace,
    specs: Sequence[KernelSpec],
    arch: ArchSpec,
    compiled: Mapping[ProbeJob, tuple[Candidate, Result]],
) -> tuple[FamilyReport, set[KernelSpec]]:
    """The report of a space, and the specs that a compiled kernel of it serves."""
    report = FamilyReport(space.family, space.size, len(specs))
    restricted: Counter[str] = Counter()
    probed: Counter[str] = Counter()
    served: set[KernelSpec] = set()
    reads = names_read(space)
    core, times = without_free_axes(space)
    known: dict[tuple[object, ...], dict[str, int]] = {}
    by_module: dict[tuple[object, ...], list[tuple[ProbeJob, Candidate, Result]]] = {}
    for job, (candidate, result) in compiled.items():
        by_module.setdefault((job.layout, dict(job.constants)["DUAL"]), []).append((job, candidate, result))
    for spec in specs:
        env = environment(spec, arch)
        key = tuple(env[name] for name in reads)
        if key not in known:
            known[key] = {name: count * times for name, count in core.explain(spec, arch).items()}
        counts = dict(known[key])
        feasible = counts.pop(FEASIBLE)
        restricted.update(counts)
        hits = _hits(spec, space, arch, by_module.get((spec.layout, spec.dual), []))
        probed.update(hits)
        report.unknown += feasible - sum(hits.values())
        if hits[OK]:
            served.add(spec)
    report.restricted = {name: count for name, count in restricted.items() if count}
    report.sentences = {r.name: r.sentence for r in space.restrictions if r.name in report.restricted}
    report.probed = dict(probed)
    return report, served


def _hits(
    spec: KernelSpec, space: SearchSpace, arch: ArchSpec, kernels: Iterable[tuple[ProbeJob, Candidate, Result]]
) -> Counter[str]:
    """Feasible points of the spec that mean one of the compiled kernels, by outcome; split counts share a kernel."""
    hits: Counter[str] = Counter()
    splits = space.axis("splits").values
    for job, candidate, result in kernels:
        word = word_of(result, arch, job)
        for count in splits:
            point = Candidate.make(candidate.family, {**dict(candidate.tunables), "splits": count}, candidate.launch)
            if attention_job(spec, point, arch.cc) == job and not space.refusals(point, spec, arch):
                hits[word] += 1
    return hits


def without_free_axes(space: SearchSpace) -> tuple[SearchSpace, int]:
    """The space without the axes that nothing reads, and how many points each of its points then stands for."""
    expressions = [e for _, e in space.definitions] + [r.expression for r in space.restrictions]
    read: set[str] = set().union(*(e.names for e in expressions))
    core = replace(space, axes=tuple(axis for axis in space.axes if axis.name in read))
    return core, space.size // core.size


def names_read(space: SearchSpace) -> tuple[str, ...]:
    """The facts of spec and arch that decide the counts of a space: specs that agree in them have equal counts."""
    axes = {axis.name for axis in space.axes} | {name for name, _ in space.definitions}
    expressions = [e for _, e in space.definitions] + [r.expression for r in space.restrictions]
    return tuple(sorted(set().union(*(e.names for e in expressions)) - axes))
