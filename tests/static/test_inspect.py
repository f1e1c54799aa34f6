"""`kgen inspect`: every point of the space is counted once, from checked-in compile results alone (B46)."""

from __future__ import annotations

import time
from pathlib import Path

from kgen.archs import load_arch
from kgen.inspect import inspect, without_free_axes
from kgen.models import load_model, model_specs
from kgen.probe_records import ProbeStore
from kgen.space import load_space
from kgen.static_run import probe_store


def test_counts_sum_to_the_space_and_every_spec_is_served() -> None:
    began = time.monotonic()
    report = inspect("dsv32", "sm120", probe_store("sm120"))
    assert time.monotonic() - began < 60
    specs, space = model_specs(load_model("dsv32"), "sm120"), load_space("portable")
    (family,) = report.families
    assert family.points == space.size * len(specs) == family.counted
    assert family.unknown > 0 and family.probed["ok"] > 0 and family.restricted["swap_arch"] > 0
    assert report.unserved == []
    value = report.to_json()
    assert value["families"][0]["counted"] == value["families"][0]["points"]
    assert any("feasible, never compiled" in line for line in report.lines())


def test_without_compile_results_every_feasible_point_is_unknown(tmp_path: Path) -> None:
    report = inspect("glm5", "sm121", ProbeStore(tmp_path / "none.jsonl"))
    (family,) = report.families
    assert family.counted == family.points and not family.probed and family.unknown > 0
    assert len(report.unserved) == family.specs


def test_axes_that_nothing_reads_are_counted_by_multiplication() -> None:
    space, arch = load_space("portable"), load_arch("sm120")
    spec = model_specs(load_model("dsv4"), "sm120")[0]
    core, times = without_free_axes(space)
    assert times > 1 and core.size * times == space.size
    assert {name: n * times for name, n in core.explain(spec, arch).items()} == space.explain(spec, arch)


def test_counts_of_every_hopper_family_sum_to_its_space(tmp_path: Path) -> None:
    """Also where measured candidates have no text for a spec's layout: slices of 64 dims do not exist for v32."""
    report = inspect("glm5", "sm90", ProbeStore(tmp_path / "compile-sm90.jsonl"))
    named = {family.family for family in report.families}
    fp8 = {"sm90_ws_fp8", "sm90_pair_fp8", "sm90_rs_fp8", "sm90_cluster_fp8"}
    assert named == {"portable", "sm90_ws", "sm90_few"} | fp8
    for family in report.families:
        assert family.counted == family.points > 0
        assert (family.unknown > 0) == (family.family != "sm90_cluster_fp8")  # GLM-5 has 64 heads at most
