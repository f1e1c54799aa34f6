"""When a goal of the benchmark is met, and by what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.ceilings import Pool, ceiling_us, data_sheet_us, in_l2, pool_of, pools_of, split_of
from bench.hopper import FA3, HOPPER, SGL
from bench.judge import judge, judge_alone
from bench.rows import PORTABLE, Reference, Row
from bench.run import line, summary
from kgen.archs import load_arch
from kgen.types import KernelSpec

ROW = Row("C toy", KernelSpec("sm90", "v32", 64, 2048, 64, 16), 16, ("ratio", 0.75), pool_rows=1 << 21)
H200_L2 = 62914560


def test_against_the_fastest_peer_of_this_run() -> None:
    found = judge(ROW, 75.0, {"one": 120.0, "two": 100.0}, None)
    assert (found["best_peer"], found["best_peer_us"], found["ratio"]) == ("two", 100.0, 0.75)
    assert found["judged_against"] == "two, side by side"
    assert (found["goal_met"], found["met_by"]) == (True, "ratio")
    assert found["goal"] == "<= 0.75 of the best peer"
    missed = judge(ROW, 75.1, {"one": 120.0, "two": 100.0}, None)
    assert (missed["goal_met"], missed["met_by"]) == (False, None)


@pytest.mark.parametrize(
    ("reference_us", "peers", "against", "ratio"),
    [
        (50.0, {SGL: 100.0}, f"{FA3}, another run", 1.0),  # the smaller of both
        (150.0, {SGL: 100.0}, f"{SGL}, side by side", 0.5),
        (50.0, {FA3: 100.0}, f"{FA3}, side by side", 0.5),  # it was timed here, so that its old number does not count
        (50.0, {}, f"{FA3}, another run", 1.0),
    ],
)
def test_reference_peer(reference_us: float, peers: dict[str, float], against: str, ratio: float) -> None:
    found = judge(replace(ROW, reference=Reference(FA3, reference_us)), 50.0, peers, None)
    assert (found["judged_against"], found["ratio"]) == (against, ratio)
    assert (found["reference_peer"], found["reference_us"]) == (FA3, reference_us)
    assert found["ratio_side_by_side"] == (50.0 / min(peers.values()) if peers else None)
    assert found["goal_met"] is (ratio <= 0.75)


def test_a_warm_reference_says_so() -> None:
    found = judge(replace(ROW, reference=Reference(FA3, 8.0, l2_warm=True)), 5.0, {SGL: 18.0}, None)
    assert found["judged_against"] == f"{FA3}, another run, L2-warm there"


@pytest.mark.parametrize(
    ("ours", "ceiling", "met", "by"),
    [
        (100.0, 100.0, True, "ceiling"),
        (108.0, 100.0, True, "ceiling"),
        (108.1, 100.0, False, None),
        (70.0, 69.0, True, "ratio"),
    ],
)
def test_ceiling_rule(ours: float, ceiling: float, met: bool, by: str | None) -> None:
    found = judge(ROW, ours, {SGL: 100.0}, ceiling)
    assert (found["goal_met"], found["met_by"]) == (met, by)
    assert found["of_ceiling"] == round(ours / ceiling, 3)


def test_nothing_to_judge_against() -> None:
    assert judge(ROW, 1.0, {}, None)["goal_met"] is None
    assert judge(ROW, 1.0, {}, 1.0)["met_by"] == "ceiling"
    assert judge(ROW, 2.0, {}, 1.0)["goal_met"] is None


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 5e-3])
def test_a_wrong_output_meets_nothing(error: float) -> None:
    assert judge(ROW, 1.0, {SGL: 100.0}, 10.0, error)["goal_met"] is False


def test_goals_of_the_portable_suite_are_judged_on_the_time_alone() -> None:
    row = PORTABLE[0]
    assert judge_alone(row, 9000.0, 255.0)["goal_met"] is True and judge_alone(row, 9000.0, 254.9)["goal_met"] is False
    decode = next(row for row in PORTABLE if row.goal and row.goal[0] == "us")
    assert judge_alone(decode, 19.0, 0.0) == {"goal": "<= 19.0 us", "goal_met": True}
    assert judge_alone(ROW, 1.0, 1.0) == {} and "goal" not in judge(row, 1.0, {}, None)


def test_ceilings_of_the_suite() -> None:
    """A and B gather from pools that fit the L2, the others from memory; the two caches of D are one pool."""
    assert pools_of(HOPPER) == sorted(
        [
            Pool(584, 1 << 21),
            Pool(656, 1 << 21),
            Pool(1024, 32768),
            Pool(1152, 8192),
            Pool(1152, 32768),
            Pool(1152, 1 << 21),
        ]
    )
    assert [pool for pool in pools_of(HOPPER) if in_l2(pool, H200_L2)] == [
        Pool(1024, 32768), Pool(1152, 8192), Pool(1152, 32768),
    ]  # fmt: skip
    assert pools_of(PORTABLE) == []


def test_ceiling_is_the_larger_of_arithmetic_and_gather() -> None:
    rates = {"matmul_sustained_tflops": 700.0, "gather": [{"row_bytes": 656, "pool_rows": 1 << 21, "gbps": 4000}]}
    keys = 16 * 2048
    few, many = replace(ROW, spec=replace(ROW.spec, heads=8)), replace(ROW, spec=replace(ROW.spec, heads=128))
    assert ceiling_us(few, keys, rates) == pytest.approx(keys * 656 / 4000 / 1e3)
    assert ceiling_us(many, keys, rates) == pytest.approx(2 * 128 * keys * 1088 / 700e6)
    assert ceiling_us(replace(ROW, pool_rows=64), keys, rates) is None
    assert pool_of(ROW) == (656, 1 << 21)


def test_data_sheet_floor() -> None:
    device = load_arch("sm90").device("h200")
    assert device is not None
    decode = next(row for row in HOPPER if row.name == "C v32 decode h16 256x1")
    assert data_sheet_us(decode, 256 * 2048, device, H200_L2) == pytest.approx(256 * 2048 * 656 / (4800 * 0.9) / 1e3)
    prefill = next(row for row in HOPPER if row.name == "A bf16 prefill d576 h16 kv32768")
    keys = 4096 * 2048
    assert data_sheet_us(prefill, keys, device, H200_L2) == pytest.approx(2 * 16 * keys * 1088 / 989e6)


@pytest.mark.parametrize(
    ("words", "parts"), [(256, (256, 0)), (288, (256, 32)), (164, (128, 64)), (146, (128, 32)), (1, (1, 0))]
)
def test_rows_of_the_gather_kernel(words: int, parts: tuple[int, int]) -> None:
    assert split_of(words) == parts


def test_lines() -> None:
    numbers = {"ours_us": 75.0, "tflops": 1.0, "gbps": 2, "ours_solo_us": 3.0, "ours_burst_us": 4.0, "ours_error": 2e-3}
    row = {"row": ROW.name} | numbers | judge(ROW, 75.0, {SGL: 100.0}, None)
    assert line(row).endswith("peer    100.0 ratio 0.75  goal <= 0.75 of the best peer: met by ratio")
    failed, late = {"row": "x", "failed": "Error: no"}, {"row": "y", "not_run": "the budget of 1 s was spent"}
    assert "FAILED" in line(failed) and "not run" in line(late)
    assert (
        summary({"rows": [row, failed, late], "elapsed_s": 9.0})
        == "3 rows in 9 s, goals met 1, missed 0, failed 1, not_run 1"
    )
