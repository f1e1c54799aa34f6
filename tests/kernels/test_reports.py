"""The public bug reports of cases.md on the rendered kernels: sections A to E, as far as a CPU can show them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kgen.check import EDGE_CASES, CaseSpec, make_case, pad_heads
from kgen.runtime.layouts import DUAL_LAYOUTS, LAYOUTS

from .running import candidate, check, forms, run

SAMPLE = {"B01": 5, "B02": 5, "B03": 5, "B04": 8, "B06": 4, "B10": 5, "B19": 3, "B22": 5, "B26": 7, "B30": 4}
MOST_HEADS = 34
"""Every n-th case of a report: all of them are in `kgen verify`. What an interpreted case costs is its programs, above all
those of the merge (one per head, token and 128 dims); 34 heads still cross blocks of 16 and 32."""


@pytest.mark.parametrize("name", SAMPLE)
def test_report(name: str) -> None:
    for number, spec in enumerate(EDGE_CASES[name][:: SAMPLE[name]]):
        heads = min(spec.heads, MOST_HEADS)
        tokens = spec.s_q if heads > 16 or spec.topk > 200 else min(spec.tokens, 2 * spec.s_q)
        check(forms(spec.layout)[number % 3], replace(spec, heads=heads, tokens=tokens))


@pytest.mark.parametrize("block_k", [16, 32, 64])
def test_b01_leading_masked_blocks(block_k: int) -> None:
    for swap_ab, masked in ((False, block_k), (True, 2 * block_k)):
        spec = CaseSpec(heads=4, topk=130, tokens=1, index="leading", index_at=masked, lengths="none")
        check(candidate(spec.layout, block_k=block_k, swap_ab=swap_ab), spec)


@pytest.mark.parametrize("heads", [1, 11, 17, 66])
def test_b06_rows_beside_the_output_stay(heads: int) -> None:
    """The canaries are looked at by every run; here with blocks that are wider than the heads."""
    spec = CaseSpec(layout="v4", heads=heads, topk=20, tokens=3, page=4)
    check(candidate("v4", block_h=64, specialise=heads == 11), spec)
    if heads <= 17:
        check(candidate("v4", block_k=16, splits=2), replace(spec, tokens=2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b10_sink_at_infinity(layout: str) -> None:
    chosen = forms(layout)[LAYOUTS[layout].fp8]
    inputs = make_case(CaseSpec(layout=layout, heads=4, topk=30, tokens=2, sink="none", lengths="none", index="clean"))

    def out(sink: float | None) -> torch.Tensor:
        given = None if sink is None else torch.full((4,), sink)
        return run(chosen, inputs.replace(attn_sink=given)).call.out.clone()

    assert torch.equal(out(None), out(-math.inf))
    assert not out(math.inf).any()
    assert not torch.allclose(out(None), out(5.0), rtol=0.1)


@pytest.mark.parametrize("layout", ["bf16_d576", "v32", "v4", "v41_footer"])
@pytest.mark.parametrize("form", [0, 2])
def test_b22_padded_heads_change_no_bit(layout: str, form: int) -> None:
    inputs = make_case(CaseSpec(layout=layout, heads=11, topk=40, tokens=1, sink="near"))
    chosen = forms(layout)[form]
    native, padded = run(chosen, inputs).call, run(chosen, pad_heads(inputs, MOST_HEADS)).call
    assert torch.equal(native.out, padded.out[:, :11])
    assert native.lse is not None and padded.lse is not None
    assert torch.equal(native.lse, padded.lse[:, :11])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b37_padded_rows_of_a_batch_are_zero(layout: str) -> None:
    inputs = make_case(CaseSpec(layout=layout, heads=4, topk=20, tokens=8, lengths="full", sink="normal"))
    assert inputs.topk_length is not None
    inputs.indices[3:] = -1
    inputs.topk_length[3:] = 0
    for chosen in forms(layout)[:2]:
        call = run(chosen, inputs).call
        assert not call.out[3:].any() and call.out[:3].isfinite().all() and call.out[:3].any()
        assert call.lse is not None and (call.lse[3:] == -math.inf).all()


@pytest.mark.parametrize("layout", DUAL_LAYOUTS)
@pytest.mark.parametrize("length", [0, -1, -2147483648])
def test_b39_empty_and_negative_lengths(layout: str, length: int) -> None:
    spec = CaseSpec(layout=layout, heads=4, topk=20, tokens=2, extra_topk=20, extra_page=2, extra_slots=50)
    inputs = make_case(replace(spec, lengths="full", index="clean"))
    assert inputs.topk_length is not None and inputs.extra_topk_length is not None
    for chosen in forms(layout) if length == 0 else forms(layout)[1:2]:
        both = inputs.replace(
            topk_length=torch.full_like(inputs.topk_length, length),
            extra_topk_length=torch.full_like(inputs.extra_topk_length, length),
        )
        assert not run(chosen, both).call.out.any()
        one = run(chosen, inputs.replace(topk_length=torch.full_like(inputs.topk_length, length))).call.out
        assert one.isfinite().all() and one.any()
