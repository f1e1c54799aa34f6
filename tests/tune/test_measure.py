"""Timing on a fake device whose true times are known (B64, B48)."""

from __future__ import annotations

import statistics

import pytest

from kgen.measure import (
    Budget,
    FakeTimer,
    Finalist,
    beats,
    interleaved,
    is_interleaved,
    mark_interleaved,
    measure,
    pool,
    unstable,
)  # fmt: skip
from kgen.timers import Run

from .samples import make_measurement


def spender(timer: FakeTimer, us: float) -> Run:
    return lambda index: timer.spend(us)


def test_warms_up_until_stable() -> None:
    # 30 % slow when cold, and warm only after a good deal of work
    timer = FakeTimer(cold=0.3, tau_s=0.04)
    result = measure(spender(timer, 20.0), 3, clock=timer, budget=Budget(seconds=1.0))
    assert result.median_us == pytest.approx(20.0, rel=0.005)
    assert result.p90_us < 20.2 and timer.seconds <= 1.2  # no sample is from the warm-up
    cold = FakeTimer(cold=0.3, tau_s=0.02)
    first = cold.prepare(spender(cold, 20.0), 3, 9)()
    assert first > 25.0  # what a measurement without warm-up would have seen


def test_order_does_not_matter() -> None:
    def both(order: list[float]) -> dict[float, float]:
        timer = FakeTimer(cold=0.3, tau_s=0.02, noise=0.01)
        return {us: measure(spender(timer, us), 3, clock=timer).median_us for us in order}

    there, back = both([20.0, 21.0]), both([21.0, 20.0])
    for us in (20.0, 21.0):
        assert there[us] == pytest.approx(us, rel=0.01)
        assert there[us] == pytest.approx(back[us], rel=0.01)


@pytest.mark.parametrize("us", [2.0, 50.0, 700.0])
@pytest.mark.parametrize("flush_us", [0.0, 400.0])
@pytest.mark.parametrize("overhead_us", [5.0, 2000.0])
@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_budget_is_kept_whatever_is_not_in_the_samples(
    us: float, flush_us: float, overhead_us: float, seconds: float
) -> None:
    timer = FakeTimer(flush_us=flush_us, overhead_us=overhead_us, prepare_us=5000, noise=0.01)
    result = measure(spender(timer, us), 4, clock=timer, budget=Budget(seconds=seconds, max_samples=10**6))
    assert timer.seconds <= 1.2 * seconds
    assert timer.seconds >= 0.5 * seconds
    assert result.median_us == pytest.approx(us, rel=0.02)


def test_small_budget_still_gives_min_samples() -> None:
    timer = FakeTimer()
    result = measure(spender(timer, 50_000.0), 1, clock=timer, budget=Budget(seconds=0.1, min_samples=5))
    assert result.samples == 5


@pytest.mark.parametrize("sets", [1, 3, 8, 90])
def test_every_set_is_visited_equally_often_in_a_sample(sets: int) -> None:
    timer = FakeTimer()
    result = measure(spender(timer, 10.0), sets, clock=timer)
    assert result.calls_per_sample >= 8 and result.calls_per_sample % sets == 0
    assert result.calls_per_sample * 10.0 >= 300.0  # grown from a timed sample, so that starting it does not count
    assert {timer.visits.count(index) for index in range(sets)} == {len(timer.visits) // sets}
    assert result.input_sets == sets


def test_event_timing_takes_single_calls_in_turn() -> None:
    timer = FakeTimer(min_calls=1, whole_rounds=False, flush_us=100.0)
    result = measure(spender(timer, 3000.0), 3, clock=timer)
    assert result.calls_per_sample == 1 and timer.visits[:6] == [0, 1, 2, 0, 1, 2]


def test_quantiles_hold_the_median() -> None:
    timer = FakeTimer(noise=0.05, seed=3)
    result = measure(spender(timer, 50.0), 1, clock=timer, budget=Budget(seconds=3.0))
    assert result.p10_us < result.median_us < result.p90_us
    assert result.spread == pytest.approx(2 * 1.2816 * 0.05, rel=0.35)  # p90 - p10 of a normal distribution


def test_no_sets_is_an_error_and_errors_of_a_run_come_through() -> None:
    with pytest.raises(ValueError, match="at least one input set"):
        measure(lambda index: None, 0, clock=FakeTimer())

    def fail(index: int) -> None:
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        measure(fail, 1, clock=FakeTimer())


def test_interleaved_cancels_drift() -> None:
    # the device slows down by about a tenth in the run: measured one after another, the faster one would lose
    timer = FakeTimer(heat=0.2)
    finalists = {name: Finalist(spender(timer, us), 2) for name, us in (("slow", 50.5), ("fast", 50.0))}
    results = interleaved(finalists, 21, clock=timer, budget=Budget(seconds=0.4))
    ratio = results["slow"].median_us / results["fast"].median_us
    assert ratio == pytest.approx(1.01, abs=0.004)
    assert all(result.samples == 21 and is_interleaved(result) for result in results.values())
    alone = FakeTimer(heat=0.2)
    fast_last = [measure(spender(alone, us), 2, clock=alone).median_us for us in (50.5, 50.0)]
    assert fast_last[0] < fast_last[1]
    assert interleaved({}, 5, clock=timer) == {}


def test_beats_needs_more_than_the_noise() -> None:
    incumbent = make_measurement(100.0, 0.02)
    assert not beats(make_measurement(98.5, 0.01), incumbent)
    assert beats(make_measurement(97.5, 0.01), incumbent)
    assert not beats(make_measurement(97.5, 0.04), incumbent)  # a noisy challenger
    assert not beats(make_measurement(99.7, 0.0), make_measurement(100.0, 0.0))  # half a percent at least
    assert not beats(incumbent, incumbent)


def test_pool_and_marks() -> None:
    pooled = pool([make_measurement(us, samples=10) for us in (50.0, 53.0, 51.0)])
    assert pooled.median_us == 51.0 and pooled.samples == 30
    with pytest.raises(ValueError, match="no measurement"):
        pool([])  # B48: an empty set has no best
    once = mark_interleaved(make_measurement())
    assert is_interleaved(once) and mark_interleaved(once) == once and not is_interleaved(make_measurement())
    assert unstable(make_measurement(50, 0.1)) is None
    failure = unstable(make_measurement(50, 0.8))
    assert failure is not None and failure.kind == "unstable" and "80%" in failure.message


def test_median_is_of_all_samples() -> None:
    values = iter([30.0] * 40 + [10.0, 20.0, 60.0])
    timer = FakeTimer(min_calls=1, whole_rounds=False)
    budget = Budget(seconds=1.0, warmup_s=0.0, max_samples=33)
    result = measure(lambda index: timer.spend(next(values)), 1, clock=timer, budget=budget)
    assert result.samples == 33
    assert result.median_us == pytest.approx(statistics.median([30.0] * 30 + [10.0, 20.0, 60.0]))
