"""Generated cases: what they promise about bytes, masks and strides; edge lists; timing inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kgen.check import (
    EDGE_CASES,
    CaseSpec,
    attention_reference,
    compare_any,
    core_edges,
    make_case,
    references,
    roundings,
    tolerance_for,
    tuning_inputs,
)
from kgen.check.cases import WILD_INDICES
from kgen.check.mutations import emulate
from kgen.check.reference import decode_slots
from kgen.runtime.layouts import LAYOUTS
from kgen.types import KernelSpec


@pytest.mark.parametrize("name", EDGE_CASES)
def test_a_correct_kernel_passes_every_edge_case(name: str) -> None:
    for spec in EDGE_CASES[name]:
        inputs = make_case(spec)
        got, bound = emulate(inputs), tolerance_for(spec)
        known = references(inputs, roundings(bound, inputs))
        report = compare_any(known, bound, got.out, got.lse, got.max_logits)
        assert report.ok, f"{spec.slug}: {report.sentence}"


def test_edge_cases_fit_the_interpreter_and_are_distinct() -> None:
    cases = core_edges()
    assert all(spec.keys <= 3000 for spec in cases)
    assert len({spec.slug for spec in cases}) == len(cases) <= 400
    assert {spec.layout for spec in cases} == set(LAYOUTS)


def _valid(inputs: object, spec: CaseSpec) -> torch.Tensor:
    kv, indices, lengths = inputs.kv, inputs.indices.reshape(spec.tokens, -1), inputs.topk_length  # type: ignore[attr-defined]
    slots = kv.shape[0] * (kv.shape[1] if spec.paged else 1)
    valid = (indices >= 0) & (indices < slots)
    if lengths is not None:
        valid &= torch.arange(indices.shape[1]) < lengths.repeat_interleave(spec.tokens // len(lengths))[:, None]
    return valid


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_unused_slots_and_guards_are_poison(layout: str) -> None:
    spec = CaseSpec(layout=layout, heads=2, topk=40, slots=200, page=61, tokens=3)
    inputs = make_case(spec)
    slots = inputs.kv.shape[0] * (inputs.kv.shape[1] if spec.paged else 1)
    rows = decode_slots(inputs.kv, spec.kv_layout, torch.arange(slots))
    used = torch.zeros(slots, dtype=torch.bool)
    used[inputs.indices.long()[_valid(inputs, spec)]] = True
    assert rows[used].isfinite().all() and used.any()
    assert not rows[~used].isfinite().any() and (~used).any()
    assert inputs.kv.storage_offset() > 0
    flat = inputs.kv.as_strided((inputs.kv.storage_offset(),), (1,), 0)
    assert flat.eq(255).all() if spec.paged else not flat.isfinite().any()


def test_a_negative_gap_takes_the_padding_away() -> None:
    inputs = make_case(CaseSpec(layout="v4", page=61, page_gap=35624 - 35712, heads=1))
    assert inputs.kv.stride(0) == 61 * 584 and inputs.kv.stride(0) % 16 == 8


def test_views_are_not_contiguous() -> None:
    inputs = make_case(CaseSpec(layout="v4", heads=5, topk=40, tokens=6, s_q=3, page=61, page_gap=576))
    assert inputs.q.shape == (2, 3, 5, 512) and inputs.q.stride(-1) == 1 and not inputs.q.is_contiguous()
    assert inputs.indices.shape == (2, 3, 40) and not inputs.indices.is_contiguous() and inputs.indices.stride(-1) == 1
    assert inputs.topk_length is not None and inputs.topk_length.shape == (2,)
    assert inputs.kv.stride(0) > 61 * 584 and inputs.kv.stride(1) == 584
    assert set(inputs.kwargs()) == {
        *("q", "kv", "indices", "sm_scale", "kv_layout", "topk_length", "attn_sink"),
        *("extra_kv", "extra_indices", "extra_topk_length"),
    }


def test_the_same_spec_gives_the_same_case() -> None:
    spec = CaseSpec(layout="v32", heads=2, topk=20)
    one, two, other = make_case(spec), make_case(spec), make_case(replace(spec, seed=1))
    assert torch.equal(one.q, two.q) and torch.equal(one.kv, two.kv) and torch.equal(one.indices, two.indices)
    assert not torch.equal(one.indices, other.indices)


@pytest.mark.parametrize(
    ("kind", "at", "columns"),
    [("single", 0, [0]), ("single", 39, [39]), ("leading", 38, [38, 39]), ("trailing", 39, [0]), ("all_invalid", 0, [])]
    + [("alternating", 32, list(range(32, 40))), ("tail", 0, list(range(20, 40)))],
)
def test_masks(kind: str, at: int, columns: list[int]) -> None:
    spec = CaseSpec(heads=1, topk=40, slots=200, tokens=3, index=kind, index_at=at, lengths="none")
    valid = _valid(make_case(spec), spec)
    expected = torch.zeros(40, dtype=torch.bool)
    expected[columns] = True
    assert torch.equal(valid, expected.expand(3, 40))


def test_wild_values_appear() -> None:
    spec = CaseSpec(heads=1, topk=500, slots=77, tokens=4, index="all_invalid", lengths="none")
    seen = set(make_case(spec).indices.flatten().tolist())
    assert seen == {77 if value is None else value for value in WILD_INDICES}


def test_beyond_a_length_lies_garbage_in_and_out_of_range() -> None:
    spec = CaseSpec(heads=1, topk=200, slots=300, tokens=8, index="clean", lengths="half")
    inputs = make_case(spec)
    beyond = inputs.indices[~_valid(inputs, spec)]
    assert (beyond < 0).any() and (beyond >= 300).any() and ((beyond >= 0) & (beyond < 300)).any()
    assert inputs.topk_length is not None
    row, length = inputs.indices[0], int(inputs.topk_length[0])
    assert row[length] == row[0]  # one position too many repeats a dominant key


def test_a_few_keys_dominate_at_the_ends_of_a_row() -> None:
    spec = CaseSpec(heads=8, topk=512, slots=1000, tokens=2, index="clean", lengths="none", sink="none")
    inputs = make_case(spec)
    keys = decode_slots(inputs.kv, "bf16", inputs.indices.long().flatten()).view(2, 512, 576)
    weights = torch.softmax(torch.einsum("thd,tkd->thk", inputs.q.double(), keys) * inputs.sm_scale, 2)
    assert weights[:, :, 0].min() > 0.05 and weights[:, :, -1].min() > 0.05  # of 512: the mean is 0.002
    assert weights.amax() < 0.6


def test_unknown_kinds_are_sentences() -> None:
    with pytest.raises(ValueError, match="CaseSpec.sink is 'big'; it must be one of none"):
        CaseSpec(sink="big")
    with pytest.raises(ValueError, match="not a multiple of s_q"):
        CaseSpec(tokens=3, s_q=2)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_timing_inputs(layout: str) -> None:
    dual = layout.startswith("v4")
    shape = (64, 2) if dual else (0, 0)
    spec = KernelSpec(
        "sm90", layout, 4, 128, 64 if LAYOUTS[layout].paged else 0, 16, extra_topk=shape[0], extra_page=shape[1]
    )
    sets = tuning_inputs(spec, 3, "cpu", 2, pool_bytes=64 * 40000 * 3, lengths=layout == "v32")
    assert len(sets) == 2 and sets[0].kv.data_ptr() == sets[1].kv.data_ptr()
    assert not torch.equal(sets[0].indices, sets[1].indices)
    first = sets[0]
    assert first.indices.dtype == torch.int32 and first.indices.shape == (3, 128) and first.q.shape == (3, 4, spec.d_qk)
    slots = first.kv.shape[0] * (first.kv.shape[1] if LAYOUTS[layout].paged else 1)
    for row in first.indices.tolist():
        keys = [slot for slot in row if slot != -1]
        assert len(set(keys)) == len(keys) >= 64 and 0 <= min(keys) and max(keys) < slots
    assert (first.extra_indices is not None) == (first.attn_sink is not None) == dual
    got = emulate(first)
    ref = attention_reference(first)
    assert ref.out.isfinite().all() and (got.out.double() - ref.out).abs().max() < 2e-2
