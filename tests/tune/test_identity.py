"""What names a point, which records still hold, and which of several counts (B51, B54, B57)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kgen.records import RecordStore, fingerprint, merge, record_id, record_status, settle, winner
from kgen.types import Candidate, Environment, Failure, KernelSpec, LaunchOptions, TuneRecord

from .samples import make_candidate, make_environment, make_measurement, make_record, make_spec

# ---- identity (B51, B54) --------------------------------------------------------------------------------------------


def _other(value: object) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if value is None:
        return 7
    if isinstance(value, str):
        return value + "x"
    raise AssertionError(type(value))


def test_fingerprint_differs_when_any_field_differs() -> None:
    spec, candidate = make_spec(), make_candidate(block_k=64, fused=True, mode=None)
    seen = {fingerprint(spec, candidate, "t", 120)}
    for field in dataclasses.fields(KernelSpec):
        other = dataclasses.replace(spec, **{field.name: _other(getattr(spec, field.name))})
        seen.add(fingerprint(other, candidate, "t", 120))
    for field in dataclasses.fields(LaunchOptions):
        launch = dataclasses.replace(candidate.launch, **{field.name: _other(getattr(candidate.launch, field.name))})
        seen.add(fingerprint(spec, dataclasses.replace(candidate, launch=launch), "t", 120))
    for name, value in candidate.tunables:
        tunables = {**dict(candidate.tunables), name: _other(value)}
        seen.add(fingerprint(spec, Candidate.make("portable", tunables, candidate.launch), "t", 120))
    seen.add(fingerprint(spec, dataclasses.replace(candidate, family="sm120"), "t", 120))
    seen.add(
        fingerprint(
            spec, Candidate.make("portable", {"block_k": 64, "fused": 1, "mode": None}, candidate.launch), "t", 120
        )
    )
    seen.add(fingerprint(spec, candidate, "u", 120))
    seen.add(fingerprint(spec, candidate, "t", 121))
    fields = len(dataclasses.fields(KernelSpec)) + len(dataclasses.fields(LaunchOptions))
    assert len(seen) == 1 + fields + 3 + 4


def test_record_id_separates_cards_versions_and_kinds() -> None:
    base = make_record()
    ids = {record_id(base), record_id(make_record(None)), record_id(make_record(None, estimate_us=1.0))}
    for name in ("arch", "device_class", "gpu", "cc", "driver", "triton", "torch", "kgen"):
        env = make_environment(**{name: 121 if name == "cc" else "other"})
        ids.add(record_id(dataclasses.replace(base, environment=env)))
    assert len(ids) == 11
    assert record_id(make_record(99.0)) == record_id(base)


def _status(template: str = "t0", **changes: object) -> str:
    status = record_status(make_record(), make_environment(**changes), template)
    assert status.sentence.endswith(".")
    return status.kind


def test_status() -> None:
    assert _status() == "fresh"
    assert _status(triton="3.9.0") == "stale-triton"
    assert _status("t1", triton="3.9.0") == "stale-template"
    assert _status(driver="600") == _status(torch="3") == _status(kgen="2") == "stale-environment"
    assert _status(cc=121) == _status(arch="sm120") == _status(device_class="h100") == "foreign"  # B51
    assert _status("t1", cc=121) == "foreign"
    assert set(Environment.HARD) == {"arch", "cc"}


# ---- which record counts --------------------------------------------------------------------------------------------


def _timed(us: float, block: int, interleaved: bool = False, spread: float = 0.01) -> TuneRecord:
    method = "cuda-graph interleaved" if interleaved else "cuda-graph"
    return make_record(measurement=make_measurement(us, spread, method), candidate=make_candidate(block_k=block))


def test_settle_prefers_interleaved_then_later() -> None:
    a1, a2, a3, a4 = _timed(100, 1), _timed(90, 1), _timed(95, 1, True), _timed(80, 1)
    assert settle([a1, a2]) == [a2]
    assert settle([a1, a3, a4]) == [a3]


def test_a_wrong_result_removes_the_time() -> None:
    wrong = make_record(None, failure=Failure("wrong", "x"))
    timeout = make_record(None, failure=Failure("timeout", "x"))
    assert settle([make_record(), wrong]) == [wrong] == settle([wrong, make_record()])
    assert len(settle([make_record(), timeout])) == 2


def test_winner_is_only_replaced_by_more_than_noise() -> None:
    assert winner([]) is None and winner([make_record(None)]) is None
    single = [_timed(100, 1), _timed(98, 2)]
    assert winner(single) == single[1]
    first = [_timed(104, 2, True), _timed(105, 1, True)]
    assert winner(single + first) == first[0]  # not the single 98
    barely = [_timed(100, 2, True), _timed(99.5, 3, True)]
    assert winner(single + first + barely) == barely[0]
    clearly = [_timed(100, 2, True), _timed(90, 4, True)]
    assert winner(single + first + barely + clearly) == clearly[1]
    again = [_timed(104.8, 2, True), _timed(104.9, 5, True)]  # the one that lost the first finals is not there
    assert winner(single + first + again) == again[0]


def test_merge(tmp_path: Path) -> None:
    own, foreign = RecordStore(tmp_path / "own.jsonl"), RecordStore(tmp_path / "foreign.jsonl")
    own.append_all([_timed(100, 1), _timed(50, 2), _timed(70, 3)])
    foreign.append_all([_timed(90, 1), _timed(55, 2, True), _timed(20, 4), _timed(20, 4)])
    foreign.append(make_record(None, failure=Failure("wrong", "x"), candidate=make_candidate(block_k=3)))
    with open(foreign.path, "ab") as file:
        file.write(b"junk\n")
    result = merge([foreign.path], own.path)
    times = {r.candidate["block_k"]: r.measurement.median_us for r in own.load().records if r.measurement}
    assert times == {1: 100, 2: 55, 4: 20}
    assert (result.added, result.known) == (3, 1) and len(result.conflicts) == 3
    assert len(result.set_aside[str(foreign.path)]) == 1 and b"junk" in foreign.path.read_bytes()
    before = own.path.read_bytes()
    merge([foreign.path], own.path)
    assert own.path.read_bytes() == before
