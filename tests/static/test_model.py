"""The cost model against measured truth (decision 19), and what must hold whatever the coefficients."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kgen.archs import load_arch
from kgen.config import config_root
from kgen.cost import StepCycles, assumed_facts, estimate_us
from kgen.honesty import BOUNDS, START, fit, group_of, honesty, judge, load_measured, loss, measured_points
from kgen.models import load_model, model_specs
from kgen.records import load_records
from kgen.types import KernelSpec, ResourceUse


def test_static_picks_are_near_the_measured_best() -> None:
    measured = load_measured()
    found = honesty(judge(measured))
    assert len(found.verdicts) >= 100
    assert found.share(1.3) >= 0.8, found.lines()
    assert all(verdict.ratio >= 1 for verdict in found.verdicts)


def test_second_measurements_are_no_truth_of_their_own() -> None:
    """Times at half of a bucket's tokens stand beside few others."""
    records = [r for r in load_records(config_root() / "records" / "h200.jsonl")[0] if r.spec.tokens == 256]
    arch = load_arch("sm90")
    known = measured_points(records, arch)
    halves = [replace(record, spec=replace(record.spec, tokens=128)) for record in records]
    assert known and measured_points([*records, *halves], arch) == known


def test_the_recorded_figure_leaves_the_layout_out_and_still_holds() -> None:
    figures = json.loads((config_root().parent / "bench" / "results" / "static_honesty.json").read_text())
    assert figures["left_out"]["share_1_30"] >= 0.8
    ratios = [spec["ratio"] for spec in figures["specs_left_out"].values()]
    assert len(ratios) == figures["left_out"]["specs"] >= 100
    assert abs(sum(r <= 1.3 for r in ratios) / len(ratios) - figures["left_out"]["share_1_30"]) < 1e-3


@pytest.mark.parametrize("name", ("sm90", "sm100", "sm120", "sm121"))
def test_more_tokens_take_no_less_time(name: str) -> None:
    arch = load_arch(name)
    records, _ = load_records(config_root() / "records" / f"static-{name}.jsonl")
    for record in records[::7]:
        times = [
            estimate_us(record.spec, record.candidate, record.resources, arch, device, tokens).us
            for device in arch.devices[:1]
            for tokens in (1, 2, 3, 7, 16, 64, 133, 256, 1000, 4096, 16384)
        ]
        assert all(b >= a for a, b in zip(times, times[1:], strict=False)), record.spec.slug


def test_spills_and_missing_pipelines_cost_time() -> None:
    arch = load_arch("sm90")
    record = load_records(config_root() / "records" / "static-sm90.jsonl")[0][0]
    use, device = record.resources, arch.devices[0]
    assert use is not None
    worse = ResourceUse(use.shared, use.registers, use.spills + 400, use.tmem, use.mma, use.cubin_bytes)
    plain = estimate_us(record.spec, record.candidate, use, arch, device)
    assert estimate_us(record.spec, record.candidate, worse, arch, device).us > plain.us > 0
    assert plain["compute"] > 0 and plain["launch"] > 0


def test_an_estimate_needs_no_compile() -> None:
    arch = load_arch("sm120")
    spec = model_specs(load_model("dsv4"), "sm120")[0]
    record = load_records(config_root() / "records" / "static-sm120.jsonl")[0][0]
    assert estimate_us(record.spec, record.candidate, None, arch, arch.devices[0]).us > 0
    assert spec.arch == "sm120"


def test_an_estimate_says_what_it_is_made_of_and_what_it_assumes() -> None:
    arch = load_arch("sm121")
    record = load_records(config_root() / "records" / "static-sm121.jsonl")[0][0]
    found = estimate_us(record.spec, record.candidate, record.resources, arch, arch.devices[0])
    assert {"launch", "compute", "dram", "merge", "resident", "rounds", *StepCycles._fields} <= dict(found.terms).keys()
    assert found["step_cycles"] >= max(found["mma"], found["gather"], found["spill"])
    assert set(found.assumed) == set(arch.devices[0].unknown) != set()
    known = load_arch("sm100")
    assert assumed_facts(known, known.devices[0]) == ()


def test_a_fit_is_the_same_on_a_busy_machine() -> None:
    measured = dict(list(load_measured().items())[:3])
    once = fit(measured, sweeps=3)
    assert once == fit(measured, sweeps=3)
    assert loss(measured, once) < loss(measured, START)
    assert all(low <= getattr(once, name) <= high for name, (low, high) in BOUNDS.items())


def test_twin_layouts_are_left_out_together() -> None:
    twins = [("bf16_d512", "bf16_d576"), ("v41_footer", "v41_inline")]
    for a, b in twins:
        assert group_of(KernelSpec("sm90", a, 16, 512, 64, 1)) == group_of(KernelSpec("sm90", b, 16, 512, 64, 1))
    groups = [group_of(KernelSpec("sm90", name, 16, 512, 64, 1)) for name in ("bf16_d512", "v32", "v4", "v41_footer")]
    assert len(set(groups)) == 4
