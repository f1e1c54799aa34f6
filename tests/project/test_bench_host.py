"""The host's benchmark runs: what it reports of compile results is a load of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.host import PROBE_LINES, probe_load_s, validation_us
from bench.host_call import cases, us_of
from kgen import jsonl

RESULT = Path(__file__).resolve().parents[2] / "bench" / "results" / "host.json"


def test_loading_compile_results() -> None:
    assert PROBE_LINES == 40_000
    assert 0 <= probe_load_s(2, lines=50) < 10


def test_a_load_that_loses_lines_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "read_bytes", lambda path: b"")
    with pytest.raises(RuntimeError, match="0 of 50"):
        probe_load_s(1, lines=50)


def test_the_stored_result_has_every_number() -> None:
    stored = json.loads(RESULT.read_text())
    assert stored["probe_records"] == PROBE_LINES
    for name in ("validate_and_look_up_us", "enumerate_candidates_cpu_s", "load_probe_records_cpu_s"):
        assert stored[name] > 0


def test_a_known_form_is_validated_faster_than_a_new_one() -> None:
    """By far, so that a busy machine does not matter: the examination is left out."""
    assert 0 < validation_us(2) < 0.6 * validation_us(2, new_form=True)


def test_cases_are_calls_of_the_hopper_families() -> None:
    from generated.launch import call_shape
    from generated.validate import build_call
    from kgen.runtime.families import FAMILIES

    hopper = {layout for family in FAMILIES.values() if family.gluon for layout in family.layouts}
    for given in cases().values():
        shape = call_shape(build_call(**given))
        assert shape.aligned and shape.layout in hopper and shape.fp16 == (not shape.layout.startswith("bf16"))


def test_packages_are_timed_in_turns() -> None:
    asked: list[str] = []
    found = us_of({"a": lambda: asked.append("a"), "b": lambda: asked.append("b")}, rounds=3, number=2)
    assert asked == ["a", "a", "b", "b"] * 3 and set(found) == {"a", "b"} and min(found.values()) >= 0
