"""The driver: nothing is measured twice, nothing is lost, whatever ends the run (decision 23; B47, B50, B57, B71)."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kgen.environment import without_paths
from kgen.errors import ConfigError, RecordError
from kgen.jobs import FinalsJob, Outcome, TuneJob
from kgen.measure import is_interleaved
from kgen.progress import PlainReporter, make_reporter
from kgen.records import RecordStore, fingerprint
from kgen.tune import SearchPart, SpecPlan, TuneError, TunePlan, forecast, tune
from kgen.types import Candidate, Failure, LaunchOptions, TuneRecord
from kgen.worker import InlineEvaluator, WorkerPool

from . import fakes
from .samples import make_candidate, make_environment, make_measurement, make_record, make_spec
from .test_search import AXES, FakeAxis
from .test_search import grid as big_grid

BLOCK_AXES = (FakeAxis("block_k", (16, 32, 64, 128)), FakeAxis("num_warps", (2, 4, 8)))


def few(mode: str | None = None) -> tuple[SearchPart, ...]:
    extra = {} if mode is None else {"mode": mode}
    feasible = [
        Candidate.make("portable", {"block_k": block, **extra}, LaunchOptions(warps, 2))
        for block in (16, 32, 64, 128)
        for warps in (2, 4, 8)
    ]
    return (SearchPart(BLOCK_AXES, feasible),)


def plan(*specs: SpecPlan, **changes: Any) -> TunePlan:
    specs = specs or (SpecPlan(make_spec(), few()),)
    values: dict[str, Any] = dict(environment=make_environment(), template_hashes={"portable": "t0"}, rounds=3)
    return TunePlan(specs, **{**values, **changes})


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "h200.jsonl")


class Counting:
    """An evaluator that counts how often it sees a candidate, outside and inside the finals."""

    def __init__(self, time_of: Any = fakes.time_of) -> None:
        self.seen: Counter[str] = Counter()
        self.finals = 0
        self._time_of = time_of

    def evaluate(self, job: TuneJob) -> Outcome:
        self.seen[job.slug] += 1
        return Outcome(make_measurement(self._time_of(job)))

    def in_finals(self, jobs: Any, rounds: int) -> list[Outcome]:
        self.finals += 1
        return [Outcome(make_measurement(self._time_of(job), samples=rounds)) for job in jobs]

    def inline(self) -> InlineEvaluator:
        return InlineEvaluator(self.evaluate, self.in_finals)


def screening(store: RecordStore) -> list[TuneRecord]:
    return [r for r in store.load().records if r.measurement is None or not is_interleaved(r.measurement)]


def names(records: list[TuneRecord]) -> list[str]:
    return [fingerprint(r.spec, r.candidate, r.template_hash, r.environment.cc) for r in records]


# ---- a whole run ----------------------------------------------------------------------------------------------------


def finals_at(store: RecordStore, tokens: int) -> list[TuneRecord]:
    """Times side by side with that many tokens: those of a bucket, or of its half."""
    records = [r for r in store.load().records if r.spec.tokens == tokens]
    return [r for r in records if r.measurement and is_interleaved(r.measurement)]


def test_exhaustive_run_records_everything_and_finds_the_best(store: RecordStore) -> None:
    counting = Counting()
    summary = tune(plan(), counting.inline(), store)
    (spec,) = summary.specs
    assert len(screening(store)) == 12 and set(counting.seen.values()) == {1}
    assert spec.winner == "portable block_k=64 warps=4 stages=2" and spec.winner_us == 10.0
    assert (spec.strategy, spec.tried, spec.known, spec.feasible) == ("exhaustive", 12, 0, 12)
    finals = finals_at(store, 16)
    assert len(finals) == 4 and finals[0].candidate.slug == spec.winner
    assert len(finals_at(store, 8)) == 3  # what is near the winner, with half of the tokens
    assert json.loads(summary.to_json())["specs"][0]["winner_us"] == 10.0 and summary.exit_code == 0


def test_second_run_measures_nothing(store: RecordStore) -> None:
    tune(plan(), Counting().inline(), store)
    before = store.path.read_bytes()
    counting = Counting()
    summary = tune(plan(), counting.inline(), store)
    assert not counting.seen and not counting.finals and store.path.read_bytes() == before
    assert summary.specs[0].known == 12 and summary.specs[0].winner_us == 10.0


def test_trials_count_points_of_all_runs(store: RecordStore) -> None:
    specs = [SpecPlan(make_spec(), (SearchPart(AXES, big_grid()),))]
    options: dict[str, Any] = dict(trials=20, finalists=2)

    def run() -> tuple[int, Counting]:
        counting = Counting(lambda job: 10.0 + int(job.candidate["splits"]))
        return tune(plan(*specs, **options), counting.inline(), store).tried, counting

    assert run()[0] == 20
    assert run()[0] == 0
    options["trials"] = 30
    tried, counting = run()
    assert tried == 10 and max(counting.seen.values()) == 1
    assert len(set(names(screening(store)))) == 30 == len(screening(store))


def test_time_is_shared_by_weight_and_kept(store: RecordStore) -> None:
    parts = (SearchPart(AXES, big_grid()),)
    specs = [SpecPlan(make_spec(tokens=tokens), parts, weight=weight) for tokens, weight in ((1, 1.0), (16, 3.0))]

    def slow(job: TuneJob) -> float:
        time.sleep(0.02)
        return 10.0

    start = time.monotonic()
    summary = tune(plan(*specs, seconds=2.0, finalists=0), Counting(slow).inline(), store)
    assert time.monotonic() - start < 3.5
    first, second = (spec.tried for spec in summary.specs)
    assert first >= 3 and second > 1.5 * first


def test_several_workers(store: RecordStore) -> None:
    with WorkerPool(["cpu"] * 3, f"{fakes.__name__}:evaluate", timeout_s=20) as pool:
        summary = tune(plan(), pool, store)
    assert len(screening(store)) == 12 == len(set(names(screening(store))))
    assert summary.specs[0].winner_us == 10.0  # finals in turns: the pool has no finals function


# ---- failures -------------------------------------------------------------------------------------------------------


def test_bad_candidates_do_not_stop_the_sweep(store: RecordStore) -> None:
    modes = ("ok", "compilation", "resources", "ptxas", "passes", "assert", "abort", "illegal", "wrong", "hang")
    feasible = [make_candidate(block_k=64, mode=mode) for mode in modes]
    parts = (SearchPart((FakeAxis("mode", modes, False),), feasible),)
    with WorkerPool(["cpu"], f"{fakes.__name__}:evaluate", timeout_s=1.0) as pool:
        summary = tune(plan(SpecPlan(make_spec(), parts)), pool, store)
    expected = (("compile", 3), ("crash", 3), ("resource", 1), ("timeout", 1), ("wrong", 1))
    assert summary.specs[0].failures == expected
    assert summary.specs[0].winner is not None and "mode=ok" in summary.specs[0].winner


def test_all_failed_lists_kinds_and_first_messages(store: RecordStore) -> None:
    kinds = {16: "compile", 32: "compile", 64: "resource", 128: "wrong"}

    def fail(job: TuneJob) -> Outcome:
        block = int(job.candidate["block_k"] or 0)
        return Outcome(failure=Failure(kinds[block], f"Block {block} is bad."))  # type: ignore[arg-type]

    with pytest.raises(TuneError) as caught:
        tune(plan(), InlineEvaluator(fail), store)
    text = str(caught.value)
    assert "All 12 candidates failed." in text and "[compile: 6] Block 16 is bad." in text
    assert "[resource: 3] Block 64 is bad." in text and "[wrong: 3] Block 128 is bad." in text
    assert caught.value.summary.exit_code == 1
    with pytest.raises(TuneError, match="9 by smem"):
        tune(plan(SpecPlan(make_spec(), (), rejected=(("smem", 9),))), InlineEvaluator(fail), store)


def test_one_failed_spec_is_reported_and_the_others_are_tuned(store: RecordStore) -> None:
    specs = (SpecPlan(make_spec(), few("wrong")), SpecPlan(make_spec(heads=32), few()))
    summary = tune(plan(*specs), InlineEvaluator(fakes.evaluate), store)
    assert summary.exit_code == 1 and len(summary.errors) == 1 and summary.specs[1].winner_us == 10.0
    assert any("All 12 candidates failed" in line for line in summary.lines())


def test_wrong_in_the_finals_removes_the_time(store: RecordStore) -> None:
    def finals(jobs: Any, rounds: int) -> list[Outcome]:
        bad = Outcome(failure=Failure("wrong", "Another result than before."))
        return [bad if job.candidate["block_k"] == 64 else Outcome(make_measurement(20.0)) for job in jobs]

    summary = tune(plan(), InlineEvaluator(fakes.evaluate, finals), store)
    assert summary.specs[0].winner is not None and "block_k=64" not in summary.specs[0].winner


def test_finals_that_die_are_replaced_by_turns(store: RecordStore) -> None:
    feasible = [make_candidate(block_k=block, mode="dies-in-finals") for block in (32, 64)]
    parts = (SearchPart((FakeAxis("block_k", (32, 64)),), feasible),)
    module = fakes.__name__
    with WorkerPool(["cpu"], f"{module}:evaluate", timeout_s=20, finals=f"{module}:finals") as pool:
        summary = tune(plan(SpecPlan(make_spec(), parts)), pool, store)
    assert summary.specs[0].winner_us == 10.0
    assert len(finals_at(store, 16)) == len(finals_at(store, 8)) == 2


# ---- incumbents and stale records -----------------------------------------------------------------------------------


def test_incumbent_stays_unless_beaten_by_more_than_noise(store: RecordStore) -> None:
    old = few()[0].feasible[:3]
    tune(plan(SpecPlan(make_spec(), (SearchPart(BLOCK_AXES, old),))), Counting().inline(), store)
    near = Counting(lambda job: 11.995 if job.candidate["block_k"] == 64 else fakes.time_of(job) - 1)
    summary = tune(plan(), near.inline(), store)
    assert summary.specs[0].incumbent == "portable block_k=16 warps=4 stages=2"
    assert summary.specs[0].kept_incumbent is False  # 12 -> 9 by block 32 is more than noise
    noise = RecordStore(store.path.with_name("other.jsonl"))
    tune(plan(SpecPlan(make_spec(), (SearchPart(BLOCK_AXES, old),))), Counting().inline(), noise)
    flat = Counting(lambda job: 13.0 if job.candidate in old else 12.97)
    summary = tune(plan(), flat.inline(), noise)
    assert summary.specs[0].kept_incumbent and summary.specs[0].winner == "portable block_k=16 warps=4 stages=2"


def test_records_of_another_template_or_card_are_not_used(store: RecordStore) -> None:
    best = few()[0].feasible[7]
    store.append(make_record(0.5, candidate=best, template_hash="old"))  # B57
    store.append(make_record(0.5, candidate=best, environment=make_environment(device_class="h100")))
    store.append(make_record(0.5, candidate=best, environment=make_environment(cc=121, arch="sm121")))
    counting = Counting()
    summary = tune(plan(), counting.inline(), store)
    assert summary.specs[0].known == 0 and len(counting.seen) == 12 and summary.specs[0].winner_us == 10.0


def test_stale_measures_again_what_another_triton_measured(store: RecordStore) -> None:
    tune(plan(environment=make_environment(triton="3.5.0")), Counting().inline(), store)
    kept = tune(plan(), Counting().inline(), store)
    assert kept.specs[0].known == 12 and kept.tried == 0
    again = Counting()
    assert tune(plan(stale=True), again.inline(), store).tried == 12 and len(again.seen) == 12
    assert tune(plan(stale=True), again.inline(), store).tried == 0


def test_neighbours_winners_are_tried_first(store: RecordStore) -> None:
    tune(plan(SpecPlan(make_spec(tokens=4), few())), Counting().inline(), store)
    counting = Counting()
    tune(plan(trials=1), counting.inline(), store)
    assert list(counting.seen) == [f"{make_spec().slug} portable block_k=64 warps=4 stages=2"]


def test_second_measurements_are_no_neighbours(store: RecordStore) -> None:
    """Their parts are those of another token count."""
    other = few()[0].feasible[0]
    store.append(make_record(1.0, spec=make_spec(tokens=8), candidate=other))
    tune(plan(SpecPlan(make_spec(tokens=4), few())), Counting().inline(), store)
    counting = Counting()
    tune(plan(trials=1), counting.inline(), store)
    assert list(counting.seen) == [f"{make_spec().slug} portable block_k=64 warps=4 stages=2"]


def test_damaged_lines_are_moved_and_their_points_measured_again(store: RecordStore) -> None:
    tune(plan(finalists=0), Counting().inline(), store)
    data = bytearray(store.path.read_bytes())
    data[100] ^= 1
    store.path.write_bytes(bytes(data))
    counting = Counting()
    summary = tune(plan(finalists=0), counting.inline(), store)
    assert summary.set_aside == 1 and len(counting.seen) == 1
    assert store.path.with_name("h200.jsonl.damaged").exists() and store.load().set_aside == []


# ---- a second measurement -------------------------------------------------------------------------------------------


def rivals(**latents: str) -> tuple[SearchPart, ...]:
    """One candidate of each family, two parts of 64 keys each."""
    common = {"block_h": 16, "block_k": 64, "splits": 2}
    return tuple(
        SearchPart((), [Candidate.make(family, common | ({"latent": latent} if latent else {}), LaunchOptions(4, 2))])
        for family, latent in latents.items()
    )


def half_times(store: RecordStore) -> dict[str, tuple[int, float]]:
    """Family -> parts and time of the records at half of 256 tokens, all side by side."""
    records = [r for r in store.load().records if r.spec.tokens == 128]
    assert all(r.measurement is not None and is_interleaved(r.measurement) for r in records)
    return {
        r.candidate.family: (int(r.candidate["splits"] or 0), r.measurement.median_us) for r in records if r.measurement
    }


@pytest.mark.parametrize(
    ("tokens", "few_us", "expected"),
    [
        (256, 100.3, {"portable": (4, 60.0), "sm90_few": (4, 40.0)}),  # even: both again, with as many programs
        (256, 124.0, {"portable": (4, 60.0), "sm90_few": (4, 40.0)}),  # a quarter behind: it may be ahead there
        (256, 126.0, {}),
        (4, 100.3, {}),  # half of 4 is a bucket of its own
    ],
)
def test_what_is_near_is_timed_at_half_of_the_tokens(
    store: RecordStore, tokens: int, few_us: float, expected: dict[str, tuple[int, float]]
) -> None:
    def time_of(job: TuneJob) -> float:
        few = job.candidate.family == "sm90_few"
        assert job.tokens == job.spec.tokens
        return (40.0 if few else 60.0) if job.spec.tokens == 128 else (few_us if few else 100.0)

    def run(counting: Counting) -> Any:
        spec = SpecPlan(make_spec(tokens=tokens), rivals(portable="", sm90_few="bf16"))
        return tune(plan(spec, template_hashes={"portable": "t0", "sm90_few": "t1"}), counting.inline(), store)

    counting = Counting(time_of)
    summary = run(counting)
    assert half_times(store) == expected and counting.finals == (2 if expected else 1)
    assert {r.template_hash for r in store.load().records if r.candidate.family == "sm90_few"} == {"t1"}
    assert summary.specs[0].winner_us == 100.0 and summary.specs[0].tried == 2
    before = store.path.read_bytes()
    again = Counting(time_of)
    run(again)
    assert not again.seen and not again.finals and store.path.read_bytes() == before


def test_what_fails_with_half_of_the_tokens_is_not_tried_again(store: RecordStore) -> None:
    """One of two is unstable there: the failure is kept, and neither a second nor a third run tries the half once more."""

    class Shaky(Counting):
        def in_finals(self, jobs: Any, rounds: int) -> list[Outcome]:
            outcomes = super().in_finals(jobs, rounds)
            bad = [job.spec.tokens == 128 and job.candidate.family == "sm90_few" for job in jobs]
            failed = Outcome(failure=Failure("unstable", "Times spread too far: measure again on an idle card."))
            return [failed if is_bad else outcome for is_bad, outcome in zip(bad, outcomes, strict=True)]

    spec = SpecPlan(make_spec(tokens=256), rivals(portable="", sm90_few="bf16"))
    work = plan(spec, template_hashes={"portable": "t0", "sm90_few": "t1"})
    finals, lines = [], []
    for _ in range(3):
        shaky = Shaky(lambda job: 100.0)
        tune(work, shaky.inline(), store)
        finals.append(shaky.finals)
        lines.append(store.path.read_bytes())
    assert finals == [2, 0, 0] and lines[0] == lines[1] == lines[2]
    failures = [r.failure.kind for r in store.load().records if r.failure is not None and r.spec.tokens == 128]
    assert failures == ["unstable"]


def test_at_most_four_are_timed_at_half_of_the_tokens(store: RecordStore) -> None:
    """The fastest at the top, of one family as of several; alone none is."""
    blocks = (16, 32, 64, 128, 256)
    feasible = [
        Candidate.make("portable", {"block_h": 16, "block_k": block, "splits": 1}, LaunchOptions(4, 2))
        for block in blocks
    ]

    def timed(number: int, folder: str) -> list[int]:
        own = RecordStore(store.path.with_name(folder))
        spec = SpecPlan(make_spec(tokens=256), (SearchPart((), feasible[:number]),))
        tune(
            plan(spec, finalists=5),
            Counting(lambda job: 100.0 + int(job.candidate["block_k"] or 0) / 100).inline(),
            own,
        )
        return sorted(int(r.candidate["block_k"] or 0) for r in own.load().records if r.spec.tokens == 128)

    assert timed(5, "five") == [16, 32, 64, 128] and timed(1, "one") == []


def test_an_interrupted_second_measurement_is_made_up_for(store: RecordStore) -> None:
    """A record file that has the finals of the bucket and none at its half, as all files from before."""
    parts = rivals(portable="", sm90_few="bf16")
    tune(
        plan(SpecPlan(make_spec(tokens=256), parts), template_hashes={"portable": "t0", "sm90_few": "t1"}),
        Counting(lambda job: 100.0).inline(),
        store,
    )
    lines = store.path.read_bytes().splitlines(keepends=True)
    store.path.write_bytes(b"".join(line for line in lines if b'"tokens":128' not in line))
    assert half_times(store) == {}
    counting = Counting(lambda job: 50.0)
    tune(
        plan(SpecPlan(make_spec(tokens=256), parts), template_hashes={"portable": "t0", "sm90_few": "t1"}),
        counting.inline(),
        store,
    )
    assert half_times(store) == {"portable": (4, 50.0), "sm90_few": (4, 50.0)} and not counting.seen


# ---- refusals, dry run ----------------------------------------------------------------------------------------------


def test_refusals(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = InlineEvaluator(fakes.evaluate)
    with pytest.raises(RecordError, match="--static"):
        tune(plan(environment=make_environment(device_class="static")), evaluator, store)
    with pytest.raises(RecordError, match="plan it for that arch"):
        tune(plan(SpecPlan(make_spec(arch="sm120"), few())), evaluator, store)
    with pytest.raises(ConfigError, match="PostgreSQL"):
        tune(plan(storage="grpc+journal:x"), evaluator, store)
    with pytest.raises(RecordError, match="no template hash"):
        tune(plan(template_hashes={}), evaluator, store)
    for name, value in (("TRITON_OVERRIDE_ARCH", "sm90"), ("TRITON_INTERPRET", "1"), ("RANK", "3")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(RecordError, match=name if name != "RANK" else "rank 3"):
                tune(plan(), evaluator, store)  # B50
    assert not store.path.exists()


def test_forecast_measures_and_writes_nothing(store: RecordStore) -> None:
    (now,) = forecast(plan(), store)
    assert (now.strategy, now.feasible, now.known, now.to_try) == ("exhaustive", 12, 0, 12)
    assert not store.path.exists() and not list(store.path.parent.iterdir())
    tune(plan(trials=5), Counting().inline(), store)
    (now,) = forecast(plan(trials=8), store)
    assert (now.known, now.to_try) == (5, 3) and "3 points to try, 5 known" in now.line()
    (timed,) = forecast(plan(seconds=60.0, exhaustive_limit=0), store)
    assert timed.to_try is None and "points for 60 s" in timed.line()


# ---- what people see ------------------------------------------------------------------------------------------------


def test_plain_lines(store: RecordStore, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = make_reporter()
    assert isinstance(reporter, PlainReporter)
    tune(plan(), Counting().inline(), store, reporter)
    out, err = capsys.readouterr()
    assert out == "" and "exhaustive, 12 points, 0 known" in err
    assert "best 10.00 µs portable block_k=64 warps=4 stages=2" in err and "trials/s" in err


def test_live_display_on_a_terminal(store: RecordStore) -> None:
    pytest.importorskip("rich")
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as terminal:
        tune(plan(), InlineEvaluator(fakes.evaluate), store, make_reporter(terminal))
        terminal.flush()
        shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "10.00" in shown


def test_jobs_name_themselves_and_paths_are_cut() -> None:
    job = TuneJob(make_spec(), make_candidate(), 16)
    assert job.slug == "sm90-decode-v32-d576-h16-k2048-p64-t16 portable block_k=64 warps=4 stages=2"
    assert FinalsJob((job,), 3).slug.startswith("finals of sm90") and FinalsJob((), 3).slug == "finals"
    assert without_paths("at /a/b/c.py:3 of ~/x/y, see https://h/i/j") == "at c.py:3 of y, see https://h/i/j"
    assert replace(job, tokens=1) != job


def test_finals_hold_the_best_of_every_tier(store: RecordStore) -> None:
    """The table needs what serves a call without a stated scale range, and what serves every call: timed side by side."""
    options = LaunchOptions(4, 1)
    fp16 = [Candidate.make("sm90_ws_fp8", {"block_k": 64, "latent": "fp16", "n": n}, options) for n in range(5)]
    bf16 = [Candidate.make("sm90_ws_fp8", {"block_k": 80, "latent": "bf16", "n": n}, options) for n in range(2)]
    plain = [Candidate.make("portable", {"block_k": 16 + 240 * n}, options) for n in range(2)]
    parts = (SearchPart((), [*fp16, *bf16]), SearchPart((), plain))
    hashes = {"portable": "t0", "sm90_ws_fp8": "t1"}
    tune(plan(SpecPlan(make_spec(), parts), template_hashes=hashes, finalists=2), Counting().inline(), store)
    finals = [r.candidate for r in finals_at(store, 16)]
    assert finals == [fp16[0], fp16[1], bf16[0], plain[0]]
