"""Rows of the benchmark: all of the peers' tables, goals by the table of goals, operations and bytes as the peers counted."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench.ceilings
import bench.row_run
import bench.run
from bench.hopper import FA3, HOPPER, SGL, TRITON_DECODE, TRITON_FWD, VLLM
from bench.judge import judge
from bench.ours import module_hash
from bench.rows import PORTABLE, Row
from bench.run import HUNG, NO_GPU, give_up, main, parser, select, timed

BY_NAME = {row.name: row for row in HOPPER}


def test_every_row_of_the_tables() -> None:
    assert Counter(row.section for row in HOPPER) == {"A": 8, "B": 12, "C": 26, "D": 16, "E": 16}
    names = [row.name for row in (*HOPPER, *PORTABLE)]
    assert len(BY_NAME) == len(HOPPER) and len(set(names)) >= len(names) - 3  # three plain B rows are in both suites
    assert {(row.spec.heads, row.pool_rows) for row in HOPPER if row.section == "A"} == {
        (heads, rows) for heads in (128, 64, 32, 16) for rows in (8192, 32768)
    }
    assert {(row.spec.heads, row.spec.topk, row.sink, row.lengths) for row in HOPPER if row.section == "B"} == {
        (heads, topk, features, features)
        for heads in (64, 128)
        for topk in (512, 1024, 2048)
        for features in (False, True)
    }
    batches = {(b, 1) for b in (1, 2, 16, 64, 128, 256)}
    two = {(1, 2), (2, 2), (64, 2), (128, 2)}
    for heads in (128, 64, 16):
        found = {(row.batch, row.s_q) for row in HOPPER if row.section == "C" and row.spec.heads == heads}
        assert found == batches | (two if heads > 16 else set())
    assert Counter(row.spec.heads for row in HOPPER if row.section == "E") == {16: 6, 64: 4, 128: 6}


def test_pages_pools_and_features() -> None:
    for row in HOPPER:
        spec = row.spec
        assert row.tokens == row.batch * row.s_q == spec.tokens
        if row.section in "AB":
            assert (row.tokens, row.requests, spec.page) == (4096, 1, 0)
        elif row.section == "C":
            assert (spec.layout, spec.page, spec.topk, row.pool_rows, row.requests) == ("v32", 64, 2048, 64 * 32768, 64)
        elif row.section == "D":
            assert (spec.layout, spec.page, spec.extra_page, spec.topk) == ("v4", 256, 64, 128)
            assert row.sink and not row.lengths and row.pool_rows == 64 * 16384
        else:
            assert (spec.layout, spec.topk, row.pool_rows, row.s_q) == ("bf16_d576", 2048, 64 * 32768, 1)


GOALS = {
    "A": {128: 0.92, 64: 0.92, 32: 0.80, 16: 0.80},
    "B": {128: 0.90, 64: 0.90},
    "E": {128: 0.95, 64: 0.95, 16: 0.95},
}
DECODE_GOALS = {  # section, heads: goal of each batch (s_q does not matter)
    ("C", 128): {1: 0.75, 2: 0.75, 16: 0.92, 64: 0.92, 128: 0.92, 256: 0.92},
    ("C", 64): {1: 0.75, 2: 0.75, 16: 0.90, 64: 0.75, 128: 0.75, 256: 0.75},
    ("C", 16): {1: 0.50, 2: 0.50, 16: 0.52, 64: 0.52, 128: 0.52, 256: 0.52},
    ("D", 64): {1: 0.75, 2: 0.75, 16: 0.70, 64: 0.70, 128: 0.70, 256: 0.70},
    ("D", 128): {1: 0.75, 2: 0.75, 16: 0.90, 64: 0.90, 128: 0.90, 256: 0.90},
}


@pytest.mark.parametrize("row", HOPPER, ids=lambda row: row.name)
def test_goals(row: Row) -> None:
    heads = row.spec.heads
    goal = GOALS[row.section][heads] if row.section in GOALS else DECODE_GOALS[row.section, heads][row.batch]
    assert row.goal == ("ratio", goal)


@pytest.mark.parametrize(
    ("name", "peer", "us", "tflops", "gbps"),
    [  # the peers' tables: µs, TFLOP/s and GB/s as printed there, each computed by their harness
        ("A bf16 prefill d576 h128 kv8192", SGL, 3943, 593, None),
        ("A bf16 prefill d576 h64 kv32768", SGL, 2175, 537, None),
        ("A bf16 prefill d576 h32 kv32768", FA3, 2038, 287, None),
        ("A bf16 prefill d576 h16 kv32768", TRITON_FWD, 1741, 168, None),
        ("B bf16 prefill d512 h64 topk512", SGL, 573, 480, None),
        ("B bf16 prefill d512 h128 topk2048", SGL, 3936, 559, None),
        ("C v32 decode h128 16x1", SGL, 38.4, 238, 560),
        ("C v32 decode h128 128x2", SGL, 353, 414, 975),
        ("C v32 decode h64 128x1", VLLM, 113, 322, 1518),
        ("C v32 decode h16 256x1", SGL, 222, 82, 1553),
        ("D v4 decode h64 128+512 256x1", VLLM, 87.7, 245, 1091),
        ("D v4 decode h128 128+1024 128x1", SGL, 102, 380, 846),
        ("D v4 decode h64 128+1024 128x1", VLLM, 73.5, 263, 1171),
        ("D v4 decode h64 128+512 64x2", VLLM, 46.1, 233, 1038),
        ("E bf16 decode d576 h16 256x1", TRITON_DECODE, 149, 123, 4059),
        ("E bf16 decode d576 h64 16x1", FA3, 29.6, 154, 1277),
        ("E bf16 decode d576 h128 256x1", SGL, 291, 501, 2074),
    ],
)
def test_operations_and_bytes_are_counted_as_the_peers_were(
    name: str, peer: str, us: float, tflops: int, gbps: int | None
) -> None:
    row = BY_NAME[name]
    assert row.reference is not None and (row.reference.peer, row.reference.us) == (peer, us)
    keys = row.tokens * row.spec.keys_per_token
    assert row.flop(keys) / us / 1e6 == pytest.approx(tflops, rel=0.006)  # µs are printed with three digits
    if gbps is not None:
        assert keys * row.row_bytes / us / 1e3 == pytest.approx(gbps, rel=0.006)


def test_true_lengths_count() -> None:
    """With lengths uniform in [k/2, k] the peers' 518 µs are 398 TFLOP/s."""
    row = BY_NAME["B bf16 prefill d512 h64 topk512 sink+len"]
    keys = round(row.tokens * row.spec.topk * 0.75)
    assert row.flop(keys) / 518 / 1e6 == pytest.approx(398, rel=0.01)
    assert row.flop(keys) == 2 * 64 * keys * 1024


def test_l2_warm_rows_are_those_marked_in_the_tables() -> None:
    warm = {row.name for row in HOPPER if row.reference is not None and row.reference.l2_warm}
    assert warm == {
        *(f"C v32 decode h{heads} {batch}x1" for heads in (128, 64, 16) for batch in (1, 2)),
        *(f"C v32 decode h{heads} {batch}x2" for heads in (128, 64) for batch in (1, 2)),
        *(f"D v4 decode h64 128+512 {batch}x1" for batch in (1, 2, 16)),
        *(f"D v4 decode h128 128+1024 {batch}x1" for batch in (1, 2)),
        *(f"E bf16 decode d576 h{heads} {batch}x1" for heads, batch in ((16, 1), (16, 2), (64, 1), (128, 1), (128, 2))),
    }


def test_selection() -> None:
    assert select(HOPPER, []) == list(HOPPER)
    assert len(select(HOPPER, ["C v32"])) == 26
    assert [row.batch for row in select(HOPPER, ["C * h16 *x1"])] == [1, 2, 16, 64, 128, 256]
    assert len(select(HOPPER, ["A bf16", "sink+len"])) == 8 + 6
    assert select(HOPPER, ["nothing"]) == []


def test_dry_run_names_every_row_and_what_serves_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--suite", "hopper", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(HOPPER) + 1 and lines[-1] == "78 rows"
    for row, line in zip(HOPPER, lines, strict=False):
        assert line.startswith(row.name) and f"{row.goal[1]:g} ratio" in line and "warps=" in line  # type: ignore[index]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--suite", "hopper"]) == 3
    assert capsys.readouterr().err.strip() == NO_GPU


def test_a_row_that_hangs_ends_the_run_and_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    found = {"rows": [{"row": HOPPER[0].name, "failed": "x"}], "elapsed_s": 1.0}
    out = tmp_path / "deep" / "hopper.json"
    give_up(found, HOPPER[1:4], 90.0, out)
    rows = json.loads(out.read_text())["rows"]
    assert codes == [HUNG] and [row["row"] for row in rows] == [row.name for row in HOPPER[:4]]
    assert rows[1]["failed"] == "no result within 90 s" and rows[2]["not_run"] == f"{HOPPER[1].name} had hung"
    assert [path.name for path in out.parent.iterdir()] == ["hopper.json"]


def test_a_run_writes_after_every_row_and_stops_at_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the GPU: one row with a result, one that fails, one that is not started."""
    out = tmp_path / "hopper.json"
    numbers = {"ours_us": 75.0, "tflops": 1.0, "gbps": 2, "ours_solo_us": 3.0, "ours_burst_us": 4.0, "ours_error": 2e-3}
    seen: list[int] = []

    class Runner:
        def __init__(self, *args: object) -> None:
            pass

        def run(self, row: Row) -> dict[str, object]:
            seen.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
            if len(seen) == 2:
                monkeypatch.setattr(bench.run.time, "perf_counter", lambda: 1e9)
                raise ValueError("no /such thing")
            return {"row": row.name, "module": "combine"} | numbers | judge(row, 75.0, {SGL: 100.0}, None)

    monkeypatch.setattr(bench.ceilings, "measure_ceilings", lambda rows, l2_bytes: {"gather": []})
    monkeypatch.setattr(bench.row_run, "RowRun", Runner)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=62914560))
    args = parser().parse_args(
        ["--suite", "hopper", "--out", str(out), "--budget", "1000", "--flash-mla", str(tmp_path)]
    )
    assert timed(HOPPER[:3], args, time.perf_counter()) == 0
    found = json.loads(out.read_text())
    assert seen == [0, 1]
    assert [set(row) & {"goal_met", "failed", "not_run"} for row in found["rows"]] == [
        {"goal_met"},
        {"failed"},
        {"not_run"},
    ]
    environment = found["environment"]
    assert environment["modules"] == {"combine": module_hash("sm90", "combine")}
    assert len(environment["subject"]) == 16 and environment["verified"] in (True, False)
    assert found["suite"] == "hopper" and len(found["absent"]) == 1
