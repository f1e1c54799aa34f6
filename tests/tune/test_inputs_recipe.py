"""Times say on inputs of which recipe they were made, and those that a newer recipe overtook do not count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kgen.check.tuning import BF16_ROWS, REQUESTS, flat_pool, tuning_inputs
from kgen.config import config_root
from kgen.ledger import Ledger
from kgen.records import RecordStore, from_json, merge, record_status, settle, to_json, winner
from kgen.select import select_entries, usable
from kgen.tune import SearchPart, SpecPlan, forecast, tune
from kgen.types import INPUTS_RECIPE, Failure, KernelSpec, TuneRecord

from .samples import make_candidate, make_environment, make_measurement, make_record, make_spec
from .test_search import AXES
from .test_search import grid as big_grid
from .test_tune import Counting, few, plan

FLAT = {"layout": "bf16_d576", "page": 0}
DECODE = make_spec(**FLAT, tokens=256)


def timed(us: float, block: int, inputs: int | None, interleaved: bool = False, **changes: object) -> TuneRecord:
    measurement = make_measurement(us, method="cuda-graph interleaved" if interleaved else "cuda-graph")
    values = {"spec": DECODE, "candidate": make_candidate(block_k=block), "measurement": measurement, "inputs": inputs}
    return make_record(**{**values, **changes})


# ---- which specs ----------------------------------------------------------------------------------------------------


def test_the_second_recipe_concerns_decode_over_bf16_rows_alone() -> None:
    assert INPUTS_RECIPE == 2
    for tokens, layout, since in [
        (1, "bf16_d576", 2), (256, "bf16_d512", 2), (512, "bf16_d576", 2), (1024, "bf16_d576", 1), (4096, "bf16_d512", 1),
        (1, "v32", 1), (4096, "v32", 1), (16, "v4", 1), (16, "v41_footer", 1), (16, "v41_inline", 1),
    ]:  # fmt: skip
        assert make_spec(layout=layout, tokens=tokens).inputs_since == since, (tokens, layout)


def test_pools_of_the_recipe_on_a_gpu() -> None:
    """What recipe 2 says: who changes this raises `INPUTS_RECIPE`."""
    assert (REQUESTS, BF16_ROWS) == (64, 32768)
    assert flat_pool(DECODE, 2048) == (64, 32768)
    assert flat_pool(make_spec(**FLAT, tokens=4096), 2048) == (1, 32768)
    requests, rows = flat_pool(DECODE, 2048)
    assert requests * rows * DECODE.kv.token_bytes > 10 * (60 << 20)  # no L2 holds it: an H200's has 60 MB


@pytest.mark.parametrize("tokens", [3, 1024])
def test_flat_rows_are_drawn_from_the_query_s_own_request(tokens: int) -> None:
    """Decode: tokens of different requests share no row. Prefill: all queries share one pool, in a random order."""
    spec = KernelSpec("sm90", "bf16_d512", heads=1, topk=40, page=0, tokens=tokens)
    sets = tuning_inputs(spec, min(tokens, 3), "cpu", 2, pool_bytes=64 * 64 * 1024)
    rows = [set(row.tolist()) for one in sets for row in one.indices]
    assert all(len(row) == 40 for row in rows)
    shared = [len(a & b) for at, a in enumerate(rows) for b in rows[:at]]
    if spec.phase == "decode":
        assert sets[0].kv.shape[0] == 64 * 64 and max(shared) == 0
        assert max(max(row) - min(row) for row in rows) > 64 * 8  # a request's rows lie anywhere in the pool
    else:
        assert sets[0].kv.shape[0] == BF16_ROWS
    assert torch.equal(sets[0].kv, sets[1].kv)


# ---- lines ----------------------------------------------------------------------------------------------------------


def test_lines_without_a_recipe_are_read_as_the_first_and_written_as_they_were() -> None:
    old = timed(50, 64, None)
    line = to_json(old)
    assert "inputs" not in json.loads(line) and json.loads(line)["v"] == 1
    assert from_json(line) == old and old.outdated
    assert not replace(old, spec=make_spec()).outdated  # fp8 decode was timed as it is now
    new = to_json(timed(50, 64, 2))
    assert json.loads(new)["inputs"] == 2 and json.loads(new)["v"] == 2  # a kgen that knows schema 1 lets it lie
    assert not from_json(new).outdated


def test_checked_in_lines_stay_byte_for_byte() -> None:
    lines = (config_root() / "records" / "h200.jsonl").read_text().splitlines()
    assert all(to_json(from_json(line)) == line for line in [*lines[:40], *lines[3100:3140], *lines[-40:]])


# ---- which of them count --------------------------------------------------------------------------------------------


def test_status() -> None:
    status = record_status(timed(50, 64, 1), make_environment(), "t0")
    assert status.kind == "stale-inputs" and not status.usable and status.sentence.endswith(".")
    assert record_status(timed(50, 64, 2), make_environment(), "t0").kind == "fresh"
    assert record_status(timed(50, 64, 1), make_environment(), "t1").kind == "stale-template"
    assert record_status(make_record(), make_environment(), "t0").kind == "fresh"


def test_an_outdated_time_wins_nothing() -> None:
    old, new = timed(40, 1, None, interleaved=True), timed(60, 2, 2)
    assert winner([old]) is None
    assert winner([old, new]) is new and winner([new, old]) is new
    assert winner([replace(old, spec=make_spec()), replace(new, spec=make_spec())]).candidate == old.candidate  # type: ignore[union-attr]
    again = timed(70, 1, 2)
    assert settle([old, again]) == [again] == settle([again, old])  # one point: though the old one was interleaved


def test_an_unstable_time_on_outdated_inputs_is_tried_again_but_a_wrong_result_is_not() -> None:
    def failed(kind: str, inputs: int | None) -> TuneRecord:
        return make_record(
            None, spec=DECODE, candidate=make_candidate(block_k=1), failure=Failure(kind, "x"), inputs=inputs
        )  # type: ignore[arg-type]

    new = timed(50, 1, 2)
    assert winner([failed("unstable", None), new]) is new
    assert winner([failed("unstable", 2), new]) is None
    assert winner([failed("wrong", None), new]) is None
    assert record_status(failed("unstable", None), make_environment(), "t0").kind == "stale-inputs"
    assert record_status(failed("resource", None), make_environment(), "t0").kind == "fresh"


def test_selection_falls_to_the_next_honest_source() -> None:
    from kgen.archs import load_arch

    prefill = make_spec(**FLAT, tokens=4096)
    tunables = dict(block_h=16, block_k=64, splits=1)
    unmeasured = make_environment(device_class="static")
    tile = make_candidate(**tunables)
    static = make_record(None, estimate_us=9.0, spec=DECODE, candidate=tile, environment=unmeasured)
    old = timed(40, 0, None, candidate=make_candidate(stages=3, **tunables))
    hashes = {"portable": "t0"}
    assert not usable(old, hashes) and usable(static, hashes)

    def sources(*records: TuneRecord) -> list[tuple[str, int]]:
        entries = select_entries(records, [DECODE], load_arch("sm90"), hashes)
        return [(entry.provenance.source, entry.provenance.anchor_tokens) for entry in entries]

    assert sources(old, static) == [("static", 256)]
    neighbour = replace(old, spec=prefill)
    assert sources(old, static, neighbour) == [("inherited", 4096)]
    assert sources(old, static, neighbour, replace(old, inputs=2)) == [("measured", 256)]


def test_merge_takes_the_newer_inputs(tmp_path: Path) -> None:
    own, foreign = RecordStore(tmp_path / "own.jsonl"), RecordStore(tmp_path / "foreign.jsonl")
    own.append_all([timed(40, 1, None, interleaved=True), timed(41, 2, 2)])
    foreign.append_all([timed(60, 1, 2), timed(30, 2, 1, interleaved=True)])
    merge([foreign.path], own.path)
    assert {r.candidate["block_k"]: r.inputs for r in own.load().records} == {1: 2, 2: 2}


# ---- the tuner ------------------------------------------------------------------------------------------------------


def test_a_run_times_again_exactly_what_is_outdated(tmp_path: Path) -> None:
    """Resumed after the recipe changed: bf16 decode is timed again, fp8 decode and prefill are not; then all is known."""
    store = RecordStore(tmp_path / "h200.jsonl")
    specs = (DECODE, make_spec(), make_spec(**FLAT, tokens=4096))
    job = plan(*(SpecPlan(spec, few()) for spec in specs))
    tune(job, Counting().inline(), store)
    lines = store.load().records
    assert lines and all(record.inputs == INPUTS_RECIPE for record in lines)
    store.path.unlink()
    store.append_all(replace(record, inputs=None) for record in lines)  # as if recipe 1 had made them

    to_try = {item.spec: item.to_try for item in forecast(job, store)}
    assert to_try == {DECODE.slug: 12, specs[1].slug: 0, specs[2].slug: 0}
    assert [f.to_try for f in forecast(replace(job, stale=True), store)] == [12, 0, 0]
    ledger = Ledger(store, job.environment, job.template_hashes, fresh_only=False)
    assert winner(ledger.of(DECODE)) is None and winner(ledger.of(specs[1])) is not None

    again = Counting()
    tune(job, again.inline(), store)
    assert len(again.seen) == 12 and set(again.seen.values()) == {1}
    assert again.finals == 2  # at the bucket's tokens and at half of them
    assert all(DECODE.slug in slug for slug in again.seen)
    assert {f.to_try for f in forecast(job, store)} == {0}
    assert winner(Ledger(store, job.environment, job.template_hashes, False).of(DECODE)) is not None


def test_a_search_begins_with_what_was_timed_before(tmp_path: Path) -> None:
    """In a space that is too large to be tried whole, the points of the old recipe come first, the fastest before others."""
    store = RecordStore(tmp_path / "h200.jsonl")
    grid = big_grid()
    old = [grid[place] for place in (40, 7, 133)]
    store.append_all(timed(us, 0, None, candidate=candidate) for us, candidate in zip((30, 10, 20), old, strict=True))
    store.append(timed(5, 0, None, candidate=grid[9], template_hash="of another text"))
    again = Counting()
    job = plan(SpecPlan(DECODE, (SearchPart(AXES, grid),)), trials=3)
    assert len(grid) > job.exhaustive_limit
    tune(job, again.inline(), store)
    new = [r.candidate for r in store.load().records if r.inputs == INPUTS_RECIPE and r.measurement]
    assert new[:3] == [old[1], old[2], old[0]]
