"""Which kernel serves the tokens of a bucket, which is measured at its top and serves fewer tokens too.

Kernels that are near each other at the top may be far apart there (bf16 rows, 16 heads: at 256 tokens one is 3 % ahead of the
other, and at 128 takes 13 % longer): so the tuner times them once more with half of the tokens. Such a time is a record of the
spec with that many tokens, which are no bucket (`KernelSpec.half`), and of the candidate with the parts that the launcher makes
there: it says what it is, and nothing that goes by buckets takes it for a bucket's time. It decides between kernels that are even
at the top, and where another one is faster with half of the tokens, that one serves the lower half of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kgen.measure import beats, is_interleaved
from kgen.records import settle, winner
from kgen.runtime.families import FAMILIES, splits_for
from kgen.tiers import is_gluon
from kgen.types import Candidate, Measurement, TuneRecord

EVEN = 0.97
"""Kernels are even where their difference is within the noise and the faster one takes more than this share of the other's time:
in a noisy run, what is far apart may be within the noise."""

RIVAL = 0.8
"""A kernel that takes up to 1 / this of the champion's time at the top may be the faster one with half of the tokens."""

AT_HALF = 4
"""Kernels that are timed there, the fastest at the top first."""


def champion(group: Sequence[TuneRecord], at_half: Sequence[TuneRecord] = ()) -> TuneRecord | None:
    """The record that serves a bucket, from all of its spec and all of its spec's half.

    What is even at the top goes by the times at half of the tokens, where it has any. What is even there as well, or has no such
    time, goes to a family that was made for the device: the portable one fell behind with fewer tokens where that was measured
    (bf16 rows, 16 heads: even at 256 tokens, 1.6 x the time at 128).
    """
    best = winner(group)
    if best is None or best.spec.half is None or not is_interleaved(_time(best)):
        return best
    even = near_ties(group, best)
    times = {r.candidate: _time(r) for r in settle(at_half) if r.measurement and is_interleaved(r.measurement)}
    timed = {r.candidate: times[half] for r in even if (half := at_half_tokens(r)) in times}
    if len(timed) > 1 and best.candidate in timed:
        first = min(timed.values(), key=lambda time: time.median_us)
        even = [r for r in even if r.candidate in timed and not beats(first, timed[r.candidate])]
    even = [r for r in even if is_gluon(r.candidate)] or even
    return best if best in even else min(even, key=lambda record: _time(record).median_us)


def near_ties(group: Iterable[TuneRecord], best: TuneRecord) -> list[TuneRecord]:
    """The champion of a spec, and what is even with it by times that were sampled side by side."""
    finals = [r for r in settle(group) if r.measurement is not None and is_interleaved(r.measurement)]
    near = [r for r in finals if r.candidate != best.candidate and not beats(_time(best), _time(r))]
    return [best, *(r for r in near if EVEN * _time(r).median_us < _time(best).median_us)]


def rivals(group: Iterable[TuneRecord], best: TuneRecord) -> list[TuneRecord]:
    """The champion of a spec and what is near it by times that were sampled side by side: what to time at half of the tokens."""
    finals = [r for r in settle(group) if r.measurement is not None and is_interleaved(r.measurement)]
    near = [r for r in finals if r.candidate != best.candidate and RIVAL * _time(r).median_us <= _time(best).median_us]
    return [best, *sorted(near, key=lambda record: _time(record).median_us)][:AT_HALF]


def faster_at_half(record: TuneRecord, at_half: Sequence[TuneRecord]) -> TuneRecord | None:
    """What serves the lower half of a bucket in the place of the bucket's own record: the fastest with half of the tokens, if it
    beats what that record's kernel is there."""
    finals = [r for r in settle(at_half) if r.measurement is not None and is_interleaved(r.measurement)]
    own = next((r for r in finals if r.candidate == at_half_tokens(record)), None)
    if own is None:
        return None
    best = min(finals, key=lambda other: _time(other).median_us)
    return best if beats(_time(best), _time(own)) else None


def at_half_tokens(record: TuneRecord) -> Candidate:
    """What a record's candidate is in a call of half of the tokens: with the split count that the launcher gives it there."""
    spec, tunables, launch = record.spec, dict(record.candidate.tunables), record.candidate.launch
    if "splits" not in tunables:
        return record.candidate
    block_h, block_k = int(tunables["block_h"] or 0), int(tunables["block_k"] or 0)
    blocks = -(-spec.topk // block_k) + -(-spec.extra_topk // block_k)
    per_sm = max(1, FAMILIES[record.candidate.family].programs_per_sm(launch.maxnreg))
    tokens, heads = spec.tokens // 2, -(-spec.heads // block_h)
    splits = splits_for(int(tunables["splits"] or 1), spec.tokens, tokens, heads, blocks, per_sm)
    return Candidate.make(record.candidate.family, tunables | {"splits": splits}, launch)


def _time(record: TuneRecord) -> Measurement:
    assert record.measurement is not None
    return record.measurement
