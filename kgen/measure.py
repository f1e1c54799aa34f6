"""Timing: warm until stable, sample until the budget is used, and say how much of a difference is noise.

Everything that takes time is timed: the number of samples follows from the clock (flushes, capture and synchronisation
included), never from an estimate (triton#2306, PR 2801). The device is behind the `Timer` protocol, so that the logic
is tested with a fake one.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from kgen.timers import CudaEventTimer, CudaGraphTimer, FakeTimer, Run, Sampler
from kgen.types import Failure, Measurement

__all__ = [
    "Budget", "CudaEventTimer", "CudaGraphTimer", "FakeTimer", "Finalist", "Run", "Timer", "beats", "interleaved",
    "is_interleaved", "mark_interleaved", "measure", "pool", "unstable",
]  # fmt: skip

K = TypeVar("K", bound=Hashable)
_WINDOW = 5
_MAX_CALLS = 512
_SAMPLE_SHARE = 0.02  # of the budget, for one sample
_INTERLEAVED = "interleaved"


class Timer(Protocol):
    """A device that can time calls."""

    method: str
    """Stored with every measurement: "cuda-graph", "cuda-event" …"""
    min_calls: int
    """Calls in a sample, at least; a longer sample hides the cost of starting it."""
    whole_rounds: bool
    """Whether a sample must visit every input set equally often (nothing else keeps the caches cold)."""

    def now(self) -> float:
        """Seconds of a steady host clock."""
        ...

    def prepare(self, run: Run, sets: int, calls: int) -> Sampler:
        """A function that runs `calls` calls over the sets in turn and gives the mean device time of a call, in µs."""
        ...

    def state(self) -> tuple[int | None, int | None]:
        """SM clock in MHz and temperature in °C, None where unknown."""
        ...


@dataclass(frozen=True)
class Budget:
    """How long a measurement may take on the host clock, everything included.

    `seconds` is kept within 20 % unless `min_samples` samples alone take longer; warm-up takes at least `warmup_s` and
    at most half of `seconds`. A sample lasts `sample_us` or more where the timer may grow it.
    """

    seconds: float = 0.5
    warmup_s: float = 0.05
    min_samples: int = 5
    max_samples: int = 200
    sample_us: float = 300.0
    stable: float = 0.005  # relative change of the median between two windows that counts as settled


def measure(run: Run, sets: int, *, clock: Timer, budget: Budget | None = None) -> Measurement:
    """Time `run(i)`, which launches one call on input set `i` of `sets`, without synchronising.

    Raises ValueError for no sets; what `run` raises comes through.
    """
    budget = budget or Budget()
    start = clock.now()
    sampler, calls = _prepared(run, sets, clock, budget)
    costs = _warm_up(sampler, clock, budget, start)
    samples: list[float] = []
    while len(samples) < budget.max_samples:
        # the next sample is expected to cost what recent ones cost on the host clock, flushes included
        expected = statistics.median(costs[-_WINDOW:])
        if len(samples) >= budget.min_samples and clock.now() - start + expected > budget.seconds:
            break
        before = clock.now()
        samples.append(sampler())
        costs.append(clock.now() - before)
    return _summary(samples, calls, clock, sets)


@dataclass(frozen=True)
class Finalist:
    """A candidate ready to run: `run(i)` launches one call on input set `i` of `sets`."""

    run: Run
    sets: int


def interleaved(
    finalists: Mapping[K, Finalist], rounds: int, *, clock: Timer, budget: Budget | None = None
) -> dict[K, Measurement]:
    """Measure candidates side by side: `rounds` samples of each, in an order that turns every round.

    Power and heat move all of them alike (about 10 % on one card), so their differences can be believed.
    """
    budget = budget or Budget()
    prepared: dict[K, tuple[Sampler, int]] = {}
    for key, finalist in finalists.items():
        prepared[key] = _prepared(finalist.run, finalist.sets, clock, budget)
        _warm_up(prepared[key][0], clock, budget, clock.now())
    keys = list(prepared)
    samples: dict[K, list[float]] = {key: [] for key in keys}
    for turn in range(rounds if keys else 0):
        order = keys[turn % len(keys) :] + keys[: turn % len(keys)]
        for key in order if turn % 2 == 0 else reversed(order):
            samples[key].append(prepared[key][0]())
    return {key: mark_interleaved(_summary(samples[key], prepared[key][1], clock, finalists[key].sets)) for key in keys}


def _prepared(run: Run, sets: int, clock: Timer, budget: Budget) -> tuple[Sampler, int]:
    """A sampler and its calls: grown from a sample that was timed, until a sample lasts long enough."""
    if sets < 1:
        raise ValueError("measuring needs at least one input set")
    calls = _whole(clock.min_calls, sets, clock)
    sampler = clock.prepare(run, sets, calls)
    if not clock.whole_rounds:
        return sampler, calls
    sampler()  # first launches load modules
    before = clock.now()
    call_us = max(sampler(), 1e-3)
    host_s = clock.now() - before  # a sample may cost the host far more than its calls take
    wanted = min(_MAX_CALLS, budget.sample_us / call_us, calls * budget.seconds * _SAMPLE_SHARE / max(host_s, 1e-9))
    if wanted > calls:
        calls = _whole(int(wanted), sets, clock)
        sampler = clock.prepare(run, sets, calls)
    return sampler, calls


def _whole(calls: int, sets: int, clock: Timer) -> int:
    return -(-calls // sets) * sets if clock.whole_rounds else calls


def _warm_up(sampler: Sampler, clock: Timer, budget: Budget, start: float) -> list[float]:
    """Sample until two windows agree (clocks have settled) or half of the budget is used; host seconds of each sample.

    A window is `warmup_s / 2` long: a few short samples in a row look alike on a device that is still warming up.
    """
    times: list[float] = []
    ends: list[float] = []
    costs: list[float] = []
    while True:
        before = clock.now()
        times.append(sampler())
        ends.append(clock.now())
        costs.append(ends[-1] - before)
        if ends[-1] - start + costs[-1] > budget.seconds / 2:
            return costs
        window = max(_WINDOW, len(ends) - bisect.bisect_left(ends, ends[-1] - budget.warmup_s / 2))
        if ends[-1] - ends[0] >= budget.warmup_s and len(times) >= 2 * window:
            late, early = statistics.median(times[-window:]), statistics.median(times[-2 * window : -window])
            if abs(late - early) <= budget.stable * late:
                return costs


def _summary(samples: Sequence[float], calls: int, clock: Timer, sets: int) -> Measurement:
    mhz, celsius = clock.state()
    return Measurement(
        median_us=statistics.median(samples),
        p10_us=_quantile(samples, 0.1),
        p90_us=_quantile(samples, 0.9),
        samples=len(samples),
        calls_per_sample=calls,
        method=clock.method,
        input_sets=sets,
        sm_clock_mhz=mhz,
        temperature_c=celsius,
    )


def _quantile(samples: Sequence[float], q: float) -> float:
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


# ---- what measurements say ------------------------------------------------------------------------------------------


def beats(new: Measurement, incumbent: Measurement) -> bool:
    """Whether `new` is faster by more than the noise: the larger spread of the two, and at least 0.5 %."""
    noise = max(new.median_us * new.spread, incumbent.median_us * incumbent.spread, 0.005 * incumbent.median_us)
    return incumbent.median_us - new.median_us > noise


def unstable(measurement: Measurement, limit: float = 0.5) -> Failure | None:
    """A Failure when the spread is so large that the median says nothing, else None."""
    if measurement.spread <= limit:
        return None
    text = (
        f"Times spread over {measurement.spread:.0%} of the median {measurement.median_us:.1f} µs "
        f"(at most {limit:.0%}): measure again on an idle card."
    )
    return Failure("unstable", text)


def is_interleaved(measurement: Measurement) -> bool:
    """Whether it was measured side by side with its rivals."""
    return measurement.method.endswith(_INTERLEAVED)


def mark_interleaved(measurement: Measurement) -> Measurement:
    """The same measurement, with its method saying that rivals were measured in turn with it."""
    if is_interleaved(measurement):
        return measurement
    return replace(measurement, method=f"{measurement.method} {_INTERLEAVED}")


def pool(measurements: Sequence[Measurement]) -> Measurement:
    """One measurement from several of the same candidate: medians of the medians and of the quantiles.

    ValueError when there is none: no time is not a fast time.
    """
    if not measurements:
        raise ValueError("there is no measurement to pool")
    last = measurements[-1]
    return replace(
        last,
        median_us=statistics.median([m.median_us for m in measurements]),
        p10_us=statistics.median([m.p10_us for m in measurements]),
        p90_us=statistics.median([m.p90_us for m in measurements]),
        samples=sum(m.samples for m in measurements),
    )
