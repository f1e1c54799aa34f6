"""Records -> the rows of the dispatch tables: one per spec and device class, static where nothing was measured.

What was measured wins over what was ranked; a token bucket without a measurement inherits the winner of the nearest bucket
that has one (decision 4) and says so. Records of another template are not used: their times belong to another text.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kgen.archs import ArchSpec, DeviceClass
from kgen.environment import STATIC
from kgen.render import module_name
from kgen.runtime.families import attention_constants, family_of
from kgen.runtime.table import Config, Entry, Provenance
from kgen.same_code import timed_by
from kgen.tiers import TIERS, is_gluon
from kgen.ties import champion, faster_at_half
from kgen.types import TOKEN_BUCKETS, Candidate, KernelSpec, TuneRecord

LAST_TOKEN = 2**31 - 1
GROWING_PAGE = 2
"""Extra caches of this page size hold all compressed rows (ratio-128 layers): their width grows with the context."""

HBM_SHARE = 0.9
"""Share of the data sheet's bandwidth that a floor assumes (a copy reaches 0.89 on an H200: 4,270 of 4,800 GB/s)."""


BEATEN = 0.97
"""A bucket gives way to a larger one that took less than this share of its time: what is nearer may be noise."""

FULL_WAVES = 4.0
BEATEN_PER_TOKEN = 0.75
"""With that many programs per SM a call's time grows with its tokens, but for the last wave, which is at most a quarter of it: a
bucket that fills the device so gives way to a larger one that took less than this share of its time per token."""

HALF_AGAIN = 1.5
"""A bucket between two measured ones, of which the smaller has half of its tokens, takes the smaller one's winner where the larger
one took more than this many times as long. Split counts follow the tokens (`kgen.runtime.launch`): with twice the tokens a winner
took 1.2 to 1.4 times as long, with half of them 0.8 to 1.0 times, so that at this ratio both are about even (docs/design.md)."""


def config_of(candidate: Candidate) -> Config:
    """The shipped form of a candidate's constants."""
    values = tuple((name, v) for name, v in candidate.tunables if v is not None and not isinstance(v, float))
    launch = candidate.launch
    return Config(values, launch.num_warps, launch.num_stages, launch.maxnreg)


def module_of(candidate: Candidate, layout: str) -> str:
    return module_name(candidate.family, layout, candidate.chunk)


def bucket_range(bucket: int) -> tuple[int, int]:
    """Token counts that a bucket serves: above the previous one, up to its own; the last has no end."""
    position = TOKEN_BUCKETS.index(bucket)
    first = TOKEN_BUCKETS[position - 1] + 1 if position else 1
    return first, bucket if position + 1 < len(TOKEN_BUCKETS) else LAST_TOKEN


def floor_us(spec: KernelSpec, arch: ArchSpec, device: DeviceClass) -> float:
    """The larger of the arithmetic's and the gather's time at data-sheet rates, µs. Rows that fit the L2 count once."""
    rate = device.bf16_tflops or math.inf
    compute = spec.flop() / rate / 1e6
    reused = not spec.kv.paged  # the bf16 pools of prefill lie in L2: their rows are read from memory once
    rows = 0.0 if reused else spec.gathered_bytes() / (device.dram_gbps * HBM_SHARE) / 1e3
    return max(compute, rows)


def usable(record: TuneRecord, template_hashes: Mapping[str, str]) -> bool:
    """Whether a record may become an entry: made with the current template, timed on inputs that still count, and of a form
    that passes the full matrix.

    Parts of a split in bf16 pass the tuner's exam, but one element in 131,072 of FlashMLA's decode matrix needs 1.3e-3
    where 1.0e-3 is allowed (docs/verification.md), so that such records are kept and not used.
    """
    family, layout = record.candidate.family, record.spec.layout
    current = timed_by(family, template_hashes.get(family, ""), record.template_hash, layout)
    static = record.environment.device_class == STATIC
    return current and not record.outdated and (static or dict(record.candidate.tunables).get("partial") != "bf16")


def with_fp32_parts(candidate: Candidate) -> Candidate:
    """The form of a static pick that is emitted: its estimate hardly depends on the type of the parts (see `usable`)."""
    tunables = tuple((name, "fp32" if name == "partial" else value) for name, value in candidate.tunables)
    return replace(candidate, tunables=tunables)


def _family(spec: KernelSpec) -> KernelSpec:
    """A spec without its bucket: what buckets that inherit from each other share."""
    return replace(spec, tokens=0)


def _groups(records: Iterable[TuneRecord]) -> dict[tuple[str, KernelSpec | None], list[TuneRecord]]:
    """Measured records by device class and spec, halves of buckets included."""
    groups: dict[tuple[str, KernelSpec | None], list[TuneRecord]] = defaultdict(list)
    for record in records:
        if record.environment.device_class != STATIC:
            groups[record.environment.device_class, record.spec].append(record)
    return dict(groups)


def measured_winners(records: Iterable[TuneRecord]) -> dict[tuple[str, KernelSpec], TuneRecord]:
    """The champion of every (device class, spec of a bucket) that was measured."""
    groups = _groups(records)
    found = {}
    for (device, spec), group in groups.items():
        if spec is not None and spec.tokens in TOKEN_BUCKETS:
            best = champion(group, groups.get((device, spec.half), ()))
            if best is not None:
                found[device, spec] = best
    return found


def static_winners(records: Iterable[TuneRecord]) -> dict[KernelSpec, dict[int, TuneRecord]]:
    """The last static pick of every spec, by spec without its bucket, then by bucket."""
    found: dict[KernelSpec, dict[int, TuneRecord]] = defaultdict(dict)
    for record in records:
        if record.environment.device_class == STATIC and record.estimate_us is not None:
            found[_family(record.spec)][record.spec.tokens] = record
    return found


def _serving(bucket: int, buckets: Mapping[int, TuneRecord]) -> TuneRecord:
    """The record that serves a bucket: its own, else the one whose tokens are nearest in ratio, the larger one in a tie. Between
    the one of half the tokens and the next larger one `HALF_AGAIN` decides; static picks have no times: it is the larger then."""
    half, larger = bucket // 2, min((other for other in buckets if other > bucket), default=0)
    if bucket not in buckets and half in buckets and larger:
        return buckets[half if _us(buckets[larger]) > HALF_AGAIN * _us(buckets[half]) else larger]
    return buckets[min(buckets, key=lambda other: (abs(math.log2(other / bucket)), -other))]


def select_entries(
    records: Sequence[TuneRecord],
    specs: Iterable[KernelSpec],
    arch: ArchSpec,
    template_hashes: Mapping[str, str],
) -> list[Entry]:
    """The table of one arch, in a fixed order, with equal neighbours merged."""
    current = [r for r in records if r.spec.arch == arch.name and usable(r, template_hashes)]
    static = static_winners(current)
    of_tier = [[record for record in current if allowed(record.candidate)] for allowed in TIERS]
    by_tier = [_from_other_pages(_from_more_heads(_buckets(of))) for of in of_tier]
    by_spec = [_groups(of) for of in of_tier]
    classes = sorted({device for device, _ in by_tier[0]})
    tables: list[list[Entry]] = [[] for _ in TIERS]
    for spec in sorted(set(specs), key=_order):
        found = False
        picks = static.get(_family(spec))
        ranked = _static_entry(spec, _serving(spec.tokens, picks)) if picks else None
        for device in classes:
            before: list[Candidate] = []
            placed: list[Entry] = []
            for tier, families in enumerate(by_tier):
                buckets = families.get((device, _family(spec)))
                record = _serving(spec.tokens, buckets) if buckets else None
                if record is None:
                    continue
                entries = _measured_entries(spec, record, by_spec[tier].get((device, spec.half), ()), arch)
                new = [entry for entry in entries if not any(_covers(other, entry) for other in placed)]
                tables[tier] += [replace(entry, tier=tier) for entry in new]
                placed += new
                before.append(record.candidate)
                found = True
            if before and all(map(is_gluon, before)) and ranked is not None:
                tables[-1].append(replace(ranked, tier=len(TIERS) - 1))
        if not found and ranked is not None:
            tables[0].append(ranked)
    return [entry for table in tables for entry in merge_pages(merge_tokens(widen(table)))]


def _covers(other: Entry, entry: Entry) -> bool:
    """Whether another entry of the same shapes launches the same kernel for all of an entry's token counts."""
    same = (other.module, other.config) == (entry.module, entry.config)
    return same and other.tokens[0] <= entry.tokens[0] and entry.tokens[1] <= other.tokens[1]


def _buckets(records: Iterable[TuneRecord]) -> Families:
    """What serves each bucket by its own times."""
    found: dict[tuple[str, KernelSpec], dict[int, TuneRecord]] = defaultdict(dict)
    for (device, spec), record in measured_winners(records).items():
        found[device, _family(spec)][spec.tokens] = record
    return {key: _without_beaten(buckets) for key, buckets in found.items()}


def _us(record: TuneRecord) -> float:
    return record.measurement.median_us if record.measurement else math.inf


Families = Mapping[tuple[str, KernelSpec], dict[int, TuneRecord]]
"""Champions by (device class, spec without its bucket), then by bucket."""


def _from_more_heads(found: Families) -> Families:
    """Where the key with twice as many heads takes less time, the fewer heads take its kernel: as masked columns they cost
    nothing more. It happens where fewer heads were tuned with one family only. 16 heads are one tile of every family."""

    out = {}
    for (device, spec), buckets in found.items():
        more = found.get((device, replace(spec, heads=2 * spec.heads)), {}) if spec.heads < 16 else {}
        out[device, spec] = _with_faster(buckets, more)
    return out


def _from_other_pages(found: Families) -> Families:
    """A key that is served by the portable family takes the kernel of a key that differs by its page sizes alone where that is
    of a Hopper family and faster: page sizes are run-time arguments there, or constants that follow the entry. It happens
    where a page size was tuned with one family only."""
    pages: dict[tuple[str, KernelSpec], dict[int, TuneRecord]] = defaultdict(dict)
    for (device, spec), buckets in found.items():
        fastest = pages[device, _any_page(spec)]
        for tokens, record in buckets.items():
            if is_gluon(record.candidate) and (tokens not in fastest or _us(record) < _us(fastest[tokens])):
                fastest[tokens] = record
    out = {}
    for (device, spec), buckets in found.items():
        theirs = {
            tokens: record
            for tokens, record in pages[device, _any_page(spec)].items()
            if not is_gluon(_serving(tokens, buckets).candidate)
        }
        out[device, spec] = _without_beaten(_with_faster(buckets, theirs))
    return out


def _any_page(spec: KernelSpec) -> KernelSpec:
    return replace(spec, page=0, extra_page=0)


def _with_faster(own: dict[int, TuneRecord], theirs: Mapping[int, TuneRecord]) -> dict[int, TuneRecord]:
    """A key's champions by bucket, and those of another key where they take less time than what serves the bucket otherwise."""
    faster = {t: record for t, record in theirs.items() if _us(record) < BEATEN * _us(_serving(t, own))}
    return own | faster


def _without_beaten(buckets: Mapping[int, TuneRecord]) -> dict[int, TuneRecord]:
    """The buckets that no larger one beats: what does more tokens in less time serves the fewer, too, and where both fill the
    device several times, so does what takes clearly less time per token. It happens where a bucket was tuned with one family
    only."""

    def beats(more: TuneRecord, record: TuneRecord) -> bool:
        if _us(more) < BEATEN * _us(record):
            return True
        spec = record.spec
        waves = spec.tokens * -(-spec.heads // 64) / max(record.environment.sms or 1, 1)
        return waves >= FULL_WAVES and _us(more) * spec.tokens / more.spec.tokens < BEATEN_PER_TOKEN * _us(record)

    return {
        tokens: record
        for tokens, record in buckets.items()
        if not any(other > tokens and beats(more, record) for other, more in buckets.items())
    }


def _order(spec: KernelSpec) -> tuple[object, ...]:
    return (spec.layout, spec.dual, spec.heads, spec.topk, spec.extra_topk, spec.page, spec.extra_page, spec.tokens)


def _entry(spec: KernelSpec, candidate: Candidate, provenance: Provenance) -> Entry:
    return Entry(
        layout=spec.layout, dual=spec.dual, heads=spec.heads, topk=(spec.topk, spec.topk),
        extra_topk=(spec.extra_topk, spec.extra_topk), page=spec.page if spec.kv.paged else None,
        extra_page=spec.extra_page if spec.dual else None, tokens=bucket_range(spec.tokens),
        module=module_of(candidate, spec.layout), config=config_of(candidate), provenance=provenance,
    )  # fmt: skip


def _measured_entries(
    spec: KernelSpec, record: TuneRecord, at_half: Sequence[TuneRecord], arch: ArchSpec
) -> list[Entry]:
    """The entry of a bucket, or one for each half of it."""
    entry = _measured_entry(spec, record, arch)
    lower = faster_at_half(record, at_half) if record.spec == spec else None
    if lower is None:
        return [entry]
    (first, last), half = entry.tokens, lower.spec.tokens
    return [replace(_measured_entry(spec, lower, arch), tokens=(first, half)), replace(entry, tokens=(half + 1, last))]


def _measured_entry(spec: KernelSpec, record: TuneRecord, arch: ArchSpec) -> Entry:
    environment, time = record.environment, record.measurement
    assert time is not None
    device = arch.device(environment.device_class)
    roofline = None if device is None else round(floor_us(record.spec, arch, device) / time.median_us, 3)
    source = "measured" if record.spec in (spec, spec.half) else "inherited"
    provenance = Provenance(
        source=source, device_class=environment.device_class, gpu=environment.gpu, us=round(time.median_us, 2),
        roofline=roofline, triton=environment.triton,
        anchor_tokens=record.spec.tokens,
    )  # fmt: skip
    return _entry(spec, record.candidate, provenance)


def _static_entry(spec: KernelSpec, record: TuneRecord) -> Entry:
    assert record.estimate_us is not None
    rejected = ", ".join(f"{count} {kind}" for kind, count in record.rejected)
    provenance = Provenance(
        source="static", device_class=STATIC, estimate_us=round(record.estimate_us, 1), triton=record.environment.triton,
        anchor_tokens=record.spec.tokens, considered=record.considered or 0, rejected=rejected,
    )  # fmt: skip
    return _entry(spec, with_fp32_parts(record.candidate), provenance)


def widen(entries: Sequence[Entry]) -> list[Entry]:
    """Widths that grow with the context serve everything between them, in their kernels' generic form."""
    widths: dict[tuple[object, ...], set[int]] = defaultdict(set)

    def group(entry: Entry) -> tuple[object, ...]:
        return entry.layout, entry.heads, entry.topk, entry.page, entry.extra_page

    for entry in entries:
        if entry.extra_page == GROWING_PAGE:
            widths[group(entry)].add(entry.extra_topk[0])
    out = []
    for entry in entries:
        if entry.extra_page == GROWING_PAGE:
            known = sorted(widths[group(entry)])
            at = known.index(entry.extra_topk[0])
            low = known[at - 1] + 1 if at else 1
            high = known[at] if at + 1 < len(known) else LAST_TOKEN
            entry = replace(entry, extra_topk=(low, high), config=_generic(entry.config))
        out.append(entry)
    return out


def _generic(config: Config) -> Config:
    tunables = tuple((name, False if name == "specialise" else value) for name, value in config.tunables)
    return replace(config, tunables=tunables)


def merge_tokens(entries: Sequence[Entry]) -> list[Entry]:
    """Join neighbouring buckets that one record serves: the anchor's own entry absorbs those that inherit from it."""
    out: list[Entry] = []
    for entry in entries:
        last = out[-1] if out else None
        if last is not None and last.tokens[1] + 1 == entry.tokens[0]:
            same = replace(last, tokens=entry.tokens, provenance=replace(last.provenance, source=""))
            if same == replace(entry, provenance=replace(entry.provenance, source="")):
                sources = last.provenance.source, entry.provenance.source
                source = "measured" if "measured" in sources else sources[0]
                tokens = (last.tokens[0], entry.tokens[1])
                out[-1] = replace(last, tokens=tokens, provenance=replace(last.provenance, source=source))
                continue
        out.append(entry)
    return out


def merge_pages(entries: Sequence[Entry]) -> list[Entry]:
    """Static entries of one config for several page sizes become one entry for any page."""
    groups: dict[Entry, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.provenance.source == "static" and not entry.config.get("specialise", False):
            provenance = replace(entry.provenance, estimate_us=None, considered=0, rejected="")
            groups[replace(entry, page=None, extra_page=None, provenance=provenance)].append(entry)
    merged: dict[Entry, Entry] = {}
    dropped: set[Entry] = set()
    for group in groups.values():
        if len(group) > 1:
            merged[group[0]] = replace(group[0], page=None, extra_page=None)
            dropped.update(group[1:])
    return [merged.get(entry, entry) for entry in entries if entry not in dropped]


def summary(entries: Sequence[Entry]) -> dict[str, int]:
    """Entries by source, and how many distinct kernels they point at."""
    counts = dict(Counter(entry.provenance.source for entry in entries))
    kernels = {(e.module, _kernel_constants(e)) for e in entries}
    return counts | {"entries": len(entries), "kernels": len(kernels)}


def _kernel_constants(entry: Entry) -> tuple[object, ...]:
    """What makes a compiled kernel beside its module's text: the constants of its family (split counts are run-time values,
    shape constants only where specialised) and the options of its launch."""
    config, family = entry.config, family_of(entry.module, entry.layout)
    special = bool(config.get("specialise", False))
    shape = {
        "heads": entry.heads, "topk": entry.topk[1], "extra_topk": entry.extra_topk[1],
        "page": entry.page or 0, "extra_page": entry.extra_page or 0,
    }  # fmt: skip
    exact = shape if special else dict.fromkeys(shape, 0)
    split = int(config.get("splits", 1)) > 1
    constants = attention_constants(family, dict(config.tunables), exact, entry.dual, split, upcast=False)
    partial = config.get("partial", "fp32") if split else ""
    stages = 0 if family.gluon else config.num_stages
    return (*sorted(constants.items()), partial, config.num_warps, stages, config.maxnreg)
