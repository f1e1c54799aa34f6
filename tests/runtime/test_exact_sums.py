"""A call that asks for lse takes the form that sums P in fp32, whatever form its entry was tuned with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from generated import explain, launch, table
from generated.lookup import choose
from kgen.archs import load_arch
from kgen.runtime.families import FAMILIES, exact_sums
from kgen.space import spaces_of
from kgen.types import Candidate, KernelSpec, LaunchOptions

V32 = table.Shape("v32", 128, 2048, 64, 256, fp16=True)
V4 = table.Shape("v4", 128, 128, 256, 256, 1024, 64, fp16=True)


@pytest.mark.parametrize("shape", [V32, V4], ids=["v32", "v4"])
def test_only_a_call_that_asks_for_lse_leaves_the_lean_form(shape: table.Shape) -> None:
    choice = choose("sm90", "h200", shape)
    assert choice.entry.module.startswith("sm90_rs_fp8") and choice.entry.config["lean"] is True
    lean = launch.make_plan(shape, choice.entry, choice.exact)
    exact = launch.make_plan(replace(shape, lse=True), choice.entry, choice.exact)
    assert lean.constants["LEAN"] is True and exact.constants["LEAN"] is False
    assert {name for name in lean.constants if lean.constants[name] != exact.constants[name]} <= {"LEAN", "R_PRODUCER"}
    assert (lean.splits, lean.parts) == (exact.splits, exact.parts)


@pytest.mark.parametrize(("spec", "r_producer"), [
    (KernelSpec("sm90", "v32", 128, 2048, 64, 256), 40), (KernelSpec("sm90", "v4", 64, 128, 256, 256, 512, 64), 32),
])  # fmt: skip
def test_the_other_form_is_one_that_the_tuner_measures(spec: KernelSpec, r_producer: int) -> None:
    """By the space itself: not by what the function says."""
    arch = load_arch("sm90")
    space = spaces_of("sm90")["sm90_rs_fp8"]
    legal = set(space.feasible(spec, arch, arch.device("h200")))
    lean = [c for c in legal if c["lean"] and c["specialise"]]
    assert lean and {c["r_producer"] for c in lean} == {r_producer}
    for candidate in lean:
        other = Candidate.make(
            "sm90_rs_fp8", dict(exact_sums(FAMILIES["sm90_rs_fp8"], candidate.tunables)), LaunchOptions(4, 1, None)
        )
        assert other != candidate and other in legal


def test_no_other_form_changes() -> None:
    for name, space in spaces_of("sm90").items():
        for layout in FAMILIES[name].layouts:
            extra = (512, 64) if layout == "v4" else (0, 0)
            page = 0 if layout.startswith("bf16") else 64
            spec = KernelSpec("sm90", layout, 128, 512, page, 16, *extra)
            arch = load_arch("sm90")
            for candidate in list(space.feasible(spec, arch, arch.device("h200")))[:40]:
                if not dict(candidate.tunables).get("lean"):
                    assert exact_sums(FAMILIES[name], candidate.tunables) == candidate.tunables


def test_warmup_compiles_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def run(call: object, arch: str, entry: table.Entry, exact: bool, workspace: object, package: str) -> None:
        made.append(launch.make_plan(launch.call_shape(call), entry, exact).constants.get("LEAN"))  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "run", run)
    choice = choose("sm90", "h200", V32)
    monkeypatch.setattr(explain, "_up_to", lambda *_: iter([(V32, choice)]))
    assert explain.warmup([V32], device=torch.device("cpu")) == 2 and made == [True, False]
