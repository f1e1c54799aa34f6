"""The host's benchmark runs: what it reports of compile results is a load of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.host import PROBE_LINES, probe_load_s
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
