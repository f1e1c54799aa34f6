"""When the merge of parts starts: early behind few programs of a Gluon kernel, and never before the parts are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from kgen.check import CaseSpec, make_case
from kgen.render import render_module
from kgen.runtime.families import FAMILIES
from kgen.runtime.launch import Plan, combine_constants
from kgen.runtime.table import Config

from .running import ARCH, aligned, bound_call

PTX = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kgen.build import combine_job, signature_of
from kgen.render import load_module
kernel = load_module("combine", None, "sm90").combine_kernel
job = combine_job("sm90", 90, 8, 256, 2)
signature, attrs = signature_of(job, kernel.arg_names, kernel.do_not_specialize)
constants = {"lse_stride_h": 1, "max_stride_h": 1} | dict(job.constants)
source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
options = {"num_warps": 2, "num_stages": 2, "launch_pdl": True}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def constants(family: str, tokens: int, heads: int, splits: int) -> dict[str, int]:
    layout = "bf16_d576"
    call, _ = bound_call(aligned(make_case(CaseSpec(layout=layout, heads=heads, topk=64, tokens=tokens, q_pad=False))))
    plan = Plan(
        config=Config(tunables=(("block_h", 16),), num_warps=4, num_stages=1), family=FAMILIES[family], heads=0, topk=0,
        extra_topk=0, page=0, extra_page=0, dual=False, splits=splits,
    )  # fmt: skip
    return combine_constants(plan, call)


@pytest.mark.parametrize(
    ("family", "tokens", "heads", "splits", "early"),
    [
        ("sm90_ws_fp8", 1, 16, 32, True),
        ("sm90_ws_fp8", 2, 16, 32, True),  # 64 programs: half of the SMs
        ("sm90_ws_fp8", 2, 17, 32, False),  # two head blocks
        ("sm90_ws_fp8", 4, 16, 32, False),
        ("sm90_ws_fp8", 16, 16, 8, False),
        ("sm90_few", 2, 16, 32, True),
        ("sm90_few", 2, 17, 32, True),  # it lets the merge go when it is nearly done
        ("sm90_few", 64, 16, 8, True),
        ("portable", 1, 16, 32, False),  # it has no trigger
    ],
)
def test_the_merge_starts_early_where_the_attention_leaves_sms_idle(
    family: str, tokens: int, heads: int, splits: int, early: bool
) -> None:
    assert constants(family, tokens, heads, splits).get("launch_pdl", False) is early


def test_the_merge_waits_before_it_reads_what_the_attention_writes() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ptx = subprocess.run(
        [sys.executable, "-c", PTX], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert ptx.count("griddepcontrol.wait") == 1
    before, after = ptx.split("griddepcontrol.wait")
    assert len(re.findall(r"ld\.global", before)) == 1  # the sink, which no kernel of the call writes
    assert len(re.findall(r"ld\.global", after)) > 2
    assert "st.global" not in before


@pytest.mark.parametrize("family", [f.name for f in FAMILIES.values() if f.gluon])
def test_only_a_kernel_that_writes_parts_releases_its_dependents(family: str) -> None:
    """Behind any other comes a kernel of somebody else, which may take its start for the end of this one."""
    for layout in FAMILIES[family].layouts:
        text = render_module(family, layout, ARCH)
        calls = [line for line in text.splitlines() if line.strip() == "release_dependents()"]
        assert len(calls) <= 1
        assert len(calls) == text.count("    if SPLIT:\n        release_dependents()\n")
        assert ("griddepcontrol.launch_dependents" in text) == bool(calls)
