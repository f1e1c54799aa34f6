"""A call that asks for lse takes the form that sums P in fp32, whatever form its entry was tuned with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from generated import explain, launch, table
from generated.call import AttentionCall
from generated.lookup import choose
from generated.sm90 import table as sm90
from kgen.archs import load_arch
from kgen.check import CaseSpec, make_case
from kgen.cli.verify import table_jobs
from kgen.evaluate import bind
from kgen.runtime.families import FAMILIES, exact_sums
from kgen.space import spaces_of
from kgen.types import Candidate, KernelSpec, LaunchOptions

V32 = table.Shape("v32", 128, 2048, 64, 256, fp16=True)


def test_only_a_call_that_asks_for_lse_leaves_the_lean_form() -> None:
    choice = choose("sm90", "h200", V32)
    assert choice.entry.module.startswith("sm90_rs_fp8") and choice.entry.config["lean"] is True
    lean = launch.make_plan(V32, choice.entry, choice.exact)
    exact = launch.make_plan(replace(V32, lse=True), choice.entry, choice.exact)
    assert lean.constants["LEAN"] is True and exact.constants["LEAN"] is False
    assert {name for name in lean.constants if lean.constants[name] != exact.constants[name]} == {"LEAN"}
    assert (lean.splits, lean.parts) == (exact.splits, exact.parts)


V32_SPEC = KernelSpec("sm90", "v32", 128, 2048, 64, 256)
V4_SPEC = KernelSpec("sm90", "v4", 64, 128, 256, 256, 512, 64)


@pytest.mark.parametrize("spec", [V32_SPEC, V4_SPEC], ids=["v32", "v4"])
def test_the_other_form_is_one_that_the_tuner_measures(spec: KernelSpec) -> None:
    """By the space itself: not by what the function says."""
    arch = load_arch("sm90")
    space = spaces_of("sm90")["sm90_rs_fp8"]
    legal = set(space.feasible(spec, arch, arch.device("h200")))
    lean = [c for c in legal if c["lean"] and c["specialise"]]
    assert lean
    for candidate in lean:
        other = Candidate.make(
            "sm90_rs_fp8", dict(exact_sums(FAMILIES["sm90_rs_fp8"], candidate.tunables)), LaunchOptions(4, 1, None)
        )
        assert other != candidate and other in legal


@pytest.mark.parametrize("spec", [V32_SPEC, V4_SPEC, replace(V4_SPEC, heads=16)], ids=["v32", "v4", "few heads"])
def test_the_lean_form_is_of_64_heads_and_fp16(spec: KernelSpec) -> None:
    """It has the heads on the M side, and P in bf16 would be too coarse. Beside a lean form there is always the other one."""
    arch = load_arch("sm90")
    legal = list(spaces_of("sm90")["sm90_rs_fp8"].feasible(spec, arch, arch.device("h200")))
    forms = {(c["block_h"], c["latent"], c["lean"]) for c in legal}
    assert {form[:2] for form in forms if form[2]} == ({(64, "fp16")} if spec.heads >= 64 else set())
    assert {form[:2] for form in forms if not form[2]} >= {(min(spec.heads, 64), "fp16"), (min(spec.heads, 64), "bf16")}


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


def test_the_tuner_examines_the_form_that_it_times() -> None:
    """Its exams ask for lse, its timings do not."""
    arch = load_arch("sm90")
    spec = KernelSpec("sm90", "v32", 64, 128, 64, 4)
    candidates = spaces_of("sm90")["sm90_rs_fp8"].feasible(spec, arch, arch.device("h200"))
    lean = next(candidate for candidate in candidates if candidate["lean"])
    inputs = make_case(CaseSpec(layout="v32", heads=64, topk=128, tokens=4, q_pad=False, scale_rule="flashmla"))
    forms = [bind(lean, inputs, "sm90", return_lse=lse).plan.constants["LEAN"] for lse in (True, False)]
    assert forms == [True, True]


def test_both_forms_of_every_lean_entry_are_compiled_by_verify() -> None:
    jobs = table_jobs(load_arch("sm90"))
    forms = {(module, dict(job.constants)["LEAN"]) for job, module in jobs.items() if "LEAN" in dict(job.constants)}
    lean = {entry.module for entry in sm90.ENTRIES if entry.config.get("lean", False)}
    assert "sm90_rs_fp8_v32" in lean and forms >= {(module, form) for module in lean for form in (True, False)}


def test_explain_names_the_other_form() -> None:
    lines = str(explain.explain(V32, arch="sm90", device_class="h200")).splitlines()
    assert "lean=True" in lines[1] and lines[2] == "with lse   lean=False"
    lines = str(explain.explain(replace(V32, fp16=False), arch="sm90", device_class="h200")).splitlines()
    assert not any(line.startswith("with lse") for line in lines)


def test_warmup_compiles_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    made, lse_strides = [], []

    def run(call: AttentionCall, arch: str, entry: table.Entry, exact: bool, workspace: object, package: str) -> None:
        made.append(launch.make_plan(launch.call_shape(call), entry, exact).constants.get("LEAN"))
        if call.lse is not None:
            torch.as_strided(call.lse, (call.tokens, call.heads), (call.lse_strides[0], 1))  # inside its memory
        lse_strides.append(call.lse_strides)

    monkeypatch.setattr(launch, "run", run)
    choice = choose("sm90", "h200", V32)
    monkeypatch.setattr(explain, "_up_to", lambda *_: iter([(V32, choice)]))
    assert explain.warmup([V32], device=torch.device("cpu")) == 2 and made == [True, False]
    assert len(set(lse_strides)) == 1  # or asking for lse would be one more kernel of every family
