"""Ranking without a GPU: which kernels to compile for a set of specs, and which of the compiled ones each spec takes.

Compiling is what costs (about 2 s a kernel and core), so kernels are chosen for all specs together: every spec votes for
the candidates that the cost model ranks first with guessed resources, and the kernels with the most votes are compiled.
Only the generic form is used (shape constants off), so that one kernel serves every head count, width and page size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.archs import ArchSpec, DeviceClass
from kgen.build import ProbeJob, attention_job, combine_job, limits_exceeded
from kgen.cost import estimate_us, guess_resources
from kgen.runtime.families import FAMILIES, MAX_SPLITS, combine_tile
from kgen.space import SearchSpace
from kgen.starts import starting_points
from kgen.types import Candidate, Failure, KernelSpec, ResourceUse, Scalar

MAX_SPILLS = 1024
"""Bytes of local memory per thread above which a kernel is dropped (winners measured on an H200 have up to 530)."""

SHARED_PICK = 1.05
"""A kernel that other specs use already is taken when its estimate is within this factor of the best."""

TOP = 10
"""Candidates of a spec that may be compiled in one round."""

Result = ResourceUse | Failure


@dataclass(frozen=True)
class Pick:
    """What a spec takes: a candidate with its resources, its estimate in µs, and what became of the others."""

    spec: KernelSpec
    candidate: Candidate
    use: ResourceUse
    us: float
    considered: int
    rejected: tuple[tuple[str, int], ...]


def ranking_device(arch: ArchSpec) -> DeviceClass:
    """The class that static picks are ranked for: the first of the arch's file."""
    return arch.devices[0]


def reduced(space: SearchSpace) -> SearchSpace:
    """The part of a space that static ranking walks: axes on which the model has no opinion keep their usual value."""
    fixed: dict[str, tuple[Scalar, ...]] = {
        "specialise": (False,), "prefetch": (True,), "scale_site": ("operand",), "partial": ("fp32",),
        "maxnreg": (None,), "num_stages": (1, 2, 3),
    }  # fmt: skip
    axes = tuple(replace(axis, values=fixed.get(axis.name, axis.values)) for axis in space.axes)
    return replace(space, axes=axes)


def candidates_of(spec: KernelSpec, space: SearchSpace, arch: ArchSpec) -> list[Candidate]:
    """Starting points of the search in their generic form, and every feasible point of the reduced space. Of a Hopper
    family, which the cost model does not rank, the starting points."""
    if FAMILIES[space.family].gluon:
        return starting_points(spec, space, arch)
    starts = [c for c in starting_points(spec, space, arch) if not c["specialise"]]
    return list(dict.fromkeys([*starts, *reduced(space).feasible(spec, arch)]))


def ranked(
    spec: KernelSpec, candidates: Iterable[Candidate], arch: ArchSpec, results: Mapping[ProbeJob, Result]
) -> list[tuple[float, Candidate]]:
    """(estimate in µs, candidate), fastest first. Compiled candidates count with their resources, refused ones not."""
    device, found = ranking_device(arch), []
    for candidate in candidates:
        result = results.get(attention_job(spec, candidate, arch.cc)) if results else None
        if result is not None and refusal(result, arch, candidate.launch.num_warps) is not None:
            continue
        use = result if isinstance(result, ResourceUse) else guess_resources(spec, candidate, arch)
        doubt = max(1.0, use.shared / arch.smem_limit)  # above the limit only where it is a guess
        found.append((estimate_us(spec, candidate, use, arch, device).us * doubt, candidate))
    return sorted(found, key=lambda pair: pair[0])


def refusal(result: Result, arch: ArchSpec, num_warps: int) -> str | None:
    """Why a compiled kernel is out, as a word to count: over limits, compile failed, spills. None: it is fine."""
    if isinstance(result, Failure):
        return {"compile": "compile failed", "crash": "compiler crashed"}.get(result.kind, result.kind)
    if limits_exceeded(result, arch, num_warps) is not None:
        return "over limits"
    return "spills" if result.spills > MAX_SPILLS else None


def diverse(
    order: Sequence[tuple[float, Candidate]], spec: KernelSpec, arch: ArchSpec, top: int = TOP
) -> list[ProbeJob]:
    """The kernels of the fastest candidates, at most two per tile (block_h, block_k), fastest first."""
    jobs: dict[ProbeJob, None] = {}
    tiles: Counter[tuple[object, ...]] = Counter()
    for _, candidate in order:
        job = attention_job(spec, candidate, arch.cc)
        if job in jobs:
            continue
        tile = (candidate["block_h"], candidate["block_k"], int(candidate["splits"] or 1) > 1)
        if tiles[tile] < 2:
            tiles[tile] += 1
            jobs[job] = None
        if len(jobs) == top:
            break
    return list(jobs)


def vote(wishes: Mapping[KernelSpec, Sequence[ProbeJob]], known: Iterable[ProbeJob], budget: int) -> list[ProbeJob]:
    """At most `budget` kernels that are not known yet: those that most specs rank high, in turn over the groups.

    A group is a layout with or without second cache: no group waits for another's long tail.
    """
    groups: dict[tuple[object, ...], Counter[ProbeJob]] = defaultdict(Counter)
    done = set(known)
    for spec, jobs in wishes.items():
        for rank, job in enumerate(jobs):
            if job not in done:
                groups[spec.layout, spec.dual][job] += 60 // (rank + 1)
    queues = [[job for job, _ in votes.most_common()] for votes in groups.values()]
    chosen: list[ProbeJob] = []
    while len(chosen) < budget and any(queues):
        for queue in queues:
            if queue and len(chosen) < budget:
                chosen.append(queue.pop(0))
    return chosen


def combine_jobs(arch: ArchSpec) -> list[ProbeJob]:
    """Every merge kernel that a launch may pick: 2 to `MAX_SPLITS` parts, few rows or many, of fp16 where a Gluon family is."""
    gluon = any(family.gluon and arch.name in (family.archs or ()) for family in FAMILIES.values())
    tiles = [
        (*combine_tile(rows, splits, part), part)
        for part in ("fp32", *(["fp16"] if gluon else []))
        for splits in range(2, MAX_SPLITS + 1)
        for rows in (1, 1 << 20)
    ]
    return [combine_job(arch.name, arch.cc, *tile) for tile in dict.fromkeys(tiles)]


def options_of(
    spec: KernelSpec, candidates: Iterable[Candidate], arch: ArchSpec, results: Mapping[ProbeJob, Result]
) -> tuple[list[tuple[float, Candidate]], int, tuple[tuple[str, int], ...]]:
    """Compiled candidates that fit, fastest first; how many kernels were compiled for the spec; why others fell."""
    compiled: dict[ProbeJob, Result] = {}
    usable = []
    for candidate in candidates:
        job = attention_job(spec, candidate, arch.cc)
        if job in results:
            compiled[job] = results[job]
            usable.append(candidate)
    reasons = Counter(refusal(result, arch, job.num_warps) for job, result in compiled.items())
    rejected = tuple(sorted((word, count) for word, count in reasons.items() if word is not None))
    return ranked(spec, usable, arch, results), len(compiled), rejected


def choose(
    wanted: Mapping[KernelSpec, Sequence[Candidate]],
    arch: ArchSpec,
    results: Mapping[ProbeJob, Result],
    used: Iterable[ProbeJob] = (),
    limit: int = 60,
) -> list[Pick]:
    """One pick per spec that has any: few kernels that are all within a few per cent of each spec's best.

    The slack is 5 % and grows until at most `limit` distinct kernels are picked (`used` are in use by other specs).
    """
    options = {spec: options_of(spec, candidates, arch, results) for spec, candidates in wanted.items()}
    served = {spec: order for spec, (order, _, _) in options.items() if order}
    slack = SHARED_PICK
    while True:
        picked = _cover(served, arch, set(used), slack)
        jobs = {attention_job(spec, candidate, arch.cc) for spec, (_, candidate) in picked.items()}
        if len(jobs | set(used)) <= limit or slack > 2:
            break
        slack *= 1.05
    picks = []
    for spec, (us, candidate) in picked.items():
        use = results[attention_job(spec, candidate, arch.cc)]
        assert isinstance(use, ResourceUse)
        picks.append(Pick(spec, candidate, use, us, options[spec][1], options[spec][2]))
    return picks


def _cover(
    served: Mapping[KernelSpec, Sequence[tuple[float, Candidate]]], arch: ArchSpec, used: set[ProbeJob], slack: float
) -> dict[KernelSpec, tuple[float, Candidate]]:
    """Greedy cover: the kernel that is good enough for most specs first, `used` kernels before all."""
    good: dict[ProbeJob, dict[KernelSpec, tuple[float, Candidate]]] = defaultdict(dict)
    for spec, order in served.items():
        for us, candidate in order:
            if us > order[0][0] * slack:
                break
            good[attention_job(spec, candidate, arch.cc)].setdefault(spec, (us, candidate))
    picked: dict[KernelSpec, tuple[float, Candidate]] = {}
    while len(picked) < len(served):
        open_specs = {job: [s for s in specs if s not in picked] for job, specs in good.items()}
        best = max(open_specs, key=lambda job: (job in used and bool(open_specs[job]), len(open_specs[job])))
        picked.update({spec: good[best][spec] for spec in open_specs[best]})
    return {spec: picked[spec] for spec in served}
