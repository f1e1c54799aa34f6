"""The float64 reference against an independent dense-mask softmax, by hand, and by properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kgen.check import CaseSpec, Inputs, attention_reference, make_case, merge_shards, pad_heads, pad_topk, split_row
from kgen.check.reference import decode_slots

QUICK = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
DUAL = CaseSpec(
    layout="v4", heads=3, topk=20, page=5, slots=40, tokens=4, s_q=2, extra_topk=9, extra_page=2, extra_slots=12
)


def _simple(indices: list[list[int]], **changes: object) -> Inputs:
    """Three slots whose first dims are 0, 1 and 2; q picks that dim out and the scale is log 2: weights 1, 2 and 4."""
    kv = torch.zeros(3, 512, dtype=torch.bfloat16)
    kv[:, 1] = torch.tensor([1.0, 2.0, 4.0])
    kv[:, 0] = torch.tensor([0.0, 1.0, 2.0])
    q = torch.zeros(len(indices), 1, 512, dtype=torch.bfloat16)
    q[:, :, 0] = 1.0
    base = Inputs(q, kv, torch.tensor(indices, dtype=torch.int32), math.log(2), "bf16")  # weights 1, 2 and 4
    return base.replace(**changes)


def test_by_hand() -> None:
    ref = attention_reference(_simple([[0, 1, 2], [1, 1, 0], [2, -1, 3], [-1, 7, -5]]))
    # weights 1, 2, 4 and values 1, 2, 4: (1 + 4 + 16) / 7; a duplicate counts twice: (2*2 + 2*2 + 1) / 5
    torch.testing.assert_close(ref.out[:, 0, 1], torch.tensor([3.0, 9 / 5, 4.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(ref.lse[:, 0], torch.tensor([7.0, 5.0, 4.0, 0.0], dtype=torch.float64).log())
    torch.testing.assert_close(ref.max_logits[:2, 0], torch.tensor([4.0, 2.0], dtype=torch.float64).log())
    assert ref.out[3].eq(0).all() and ref.lse[3, 0] == ref.max_logits[3, 0] == float("-inf")


def test_sink_by_hand() -> None:
    rows = [[0, 1, 2], [-1, -1, -1]]
    for sink, expected in ((math.log(7), 1.5), (float("inf"), 0.0), (float("-inf"), 3.0), (1e4, 0.0), (-1e4, 3.0)):
        ref = attention_reference(_simple(rows, attn_sink=torch.tensor([sink])))
        assert ref.out[0, 0, 1].item() == pytest.approx(expected, abs=1e-6)
        assert ref.lse[0, 0].item() == pytest.approx(math.log(7))  # the sink is not in the lse
        assert ref.out[1].eq(0).all() and ref.lse[1, 0] == float("-inf")


def test_lengths_by_hand() -> None:
    rows = [[0, 1, 2]] * 5
    ref = attention_reference(_simple(rows, topk_length=torch.tensor([2, 0, -3, 3, 99], dtype=torch.int32)))
    torch.testing.assert_close(ref.lse[:, 0].exp(), torch.tensor([3.0, 0.0, 0.0, 7.0, 7.0], dtype=torch.float64))


def test_lse_is_natural_log() -> None:
    """B32: FlashMLA's README said log2 where its tests use the natural logarithm."""
    inputs = _simple([[0, 1, 2]])
    logits = torch.tensor([0.0, 1.0, 2.0]).double() * math.log(2)
    torch.testing.assert_close(attention_reference(inputs).lse[0, 0], torch.logsumexp(logits, 0))


def test_nan_of_a_valid_key_propagates_and_of_an_invalid_one_does_not() -> None:
    inputs = _simple([[0, 1, -1], [0, 2, -1]])
    inputs.kv[2, 300] = float("nan")
    ref = attention_reference(inputs)
    assert ref.out[0].isfinite().all() and ref.lse[0].isfinite().all()
    assert ref.out[1].isnan().all() and ref.lse[1].isnan().all() and ref.max_logits[1].isnan().all()
    short = inputs.replace(topk_length=torch.tensor([1, 1], dtype=torch.int32))
    assert attention_reference(short).out.isfinite().all()


def _dense(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of each slot per token, then a softmax over whole caches: no gather, no index arithmetic in common."""
    tokens, heads = inputs.tokens, inputs.heads
    q = inputs.q.reshape(tokens, heads, -1).double()
    scores, values, counts = [], [], []
    sides = [(inputs.kv, inputs.indices, inputs.topk_length)]
    if inputs.extra_kv is not None and inputs.extra_indices is not None:
        sides.append((inputs.extra_kv, inputs.extra_indices, inputs.extra_topk_length))
    for kv, indices, lengths in sides:
        slots = kv.shape[0] if kv.dtype == torch.bfloat16 else kv.shape[0] * kv.shape[1]
        count = torch.zeros(tokens, slots, dtype=torch.float64)
        for t, row in enumerate(indices.reshape(tokens, -1).tolist()):
            length = len(row) if lengths is None else int(lengths[t // (tokens // len(lengths))])
            for slot in row[: max(length, 0)]:
                if 0 <= slot < slots:
                    count[t, slot] += 1
        rows = decode_slots(kv, inputs.kv_layout, torch.arange(slots)).nan_to_num(0.0, 0.0, 0.0)
        scores.append(torch.einsum("thd,sd->ths", q, rows) * inputs.sm_scale)
        values.append(rows[:, :512])
        counts.append(count)
    count = torch.cat(counts, 1)[:, None]
    logits = torch.cat(scores, 2) + count.log()
    if inputs.attn_sink is not None:
        logits = torch.cat([logits, inputs.attn_sink.double().view(1, heads, 1).expand(tokens, heads, 1)], 2)
    weights = torch.softmax(logits, 2).nan_to_num(0.0)[:, :, : count.shape[2]]
    without_sink = logits[:, :, : count.shape[2]]
    return torch.einsum("ths,sd->thd", weights, torch.cat(values)), torch.logsumexp(without_sink, 2)


SPECS = [
    CaseSpec(layout=name, heads=3, topk=20, slots=40, tokens=4) for name in ("bf16_d576", "bf16_d512", "v32", "v4")
] + [
    CaseSpec(layout="v41_footer", heads=2, topk=33, slots=60, page=7, tokens=6, s_q=3, lengths="negative"),
    CaseSpec(layout="v41_inline", heads=2, topk=33, slots=16, page=2, tokens=3, index="duplicates", sink="minus_inf"),
    CaseSpec(layout="v4", heads=3, topk=64, slots=20, page=3, tokens=3, index="tail", lengths="none", page_gap=576),
    CaseSpec(layout="bf16_d512", heads=2, topk=9, slots=30, tokens=5, index="some_empty", sink="none", page_gap=32),
    CaseSpec(layout="v32", heads=2, topk=9, slots=30, tokens=5, index_3d=True, lengths="over", scale_rule="odd_fp32"),
    DUAL,
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.slug)
def test_against_a_dense_mask(spec: CaseSpec) -> None:
    inputs = make_case(spec)
    ref = attention_reference(inputs)
    out, lse = _dense(inputs)
    torch.testing.assert_close(ref.out.reshape(out.shape), out, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ref.lse.reshape(lse.shape), lse, rtol=1e-12, atol=1e-12)


def test_rows_and_chunks_do_not_change_the_result() -> None:
    inputs = make_case(DUAL)
    whole = attention_reference(inputs)
    assert whole.out.shape == (2, 2, 3, 512) and whole.lse.shape == (2, 2, 3)
    small = attention_reference(inputs, chunk_bytes=1)
    part = attention_reference(inputs, rows=[3, 0])
    torch.testing.assert_close(small.out, whole.out, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(part.out, whole.out.view(4, 3, 512)[[3, 0]], rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(part.lse, whole.lse.view(4, 3)[[3, 0]])
    assert attention_reference(inputs, rows=[]).out.shape == (0, 3, 512)


@given(seed=st.integers(0, 1000), layout=st.sampled_from(["bf16_d576", "v32", "v4", "v41_footer"]))
@QUICK
def test_the_order_of_keys_does_not_matter(seed: int, layout: str) -> None:
    inputs = make_case(CaseSpec(layout=layout, heads=2, topk=24, slots=50, page=5, tokens=3, lengths="none", seed=seed))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
    shuffled = attention_reference(inputs.replace(indices=inputs.indices[..., order]))
    ref = attention_reference(inputs)
    torch.testing.assert_close(shuffled.out, ref.out, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(shuffled.lse, ref.lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("shards", [2, 8])
@given(seed=st.integers(0, 1000))
@QUICK
def test_b31_shards_merge_to_the_whole(shards: int, base: str, seed: int) -> None:
    inputs = make_case(CaseSpec(heads=2, topk=24, slots=50, tokens=3, sink="near", seed=seed))
    ref = attention_reference(inputs)
    unit = 1.0 if base == "e" else math.log(2)
    parts = [attention_reference(part) for part in split_row(inputs, shards)]
    out, lse = merge_shards([p.out for p in parts], [p.lse / unit for p in parts], base, inputs.attn_sink)  # type: ignore[arg-type]
    torch.testing.assert_close(out, ref.out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse * unit, ref.lse, rtol=1e-12, atol=1e-12)


def test_b31_the_wrong_base_shows() -> None:
    inputs = make_case(CaseSpec(heads=2, topk=24, slots=50, tokens=3, lengths="none"))
    parts = [attention_reference(part) for part in split_row(inputs, 2)]
    out, _ = merge_shards([p.out for p in parts], [p.lse for p in parts], "2", inputs.attn_sink)
    assert (out - attention_reference(inputs).out).abs().max() > 1e-2


def test_dual_cache_shards_and_paddings() -> None:
    inputs = make_case(DUAL)
    ref = attention_reference(inputs)
    parts = [attention_reference(part) for part in split_row(inputs, 12)]  # more shards than extra columns
    out, lse = merge_shards([p.out for p in parts], [p.lse for p in parts], "e", inputs.attn_sink)
    torch.testing.assert_close(out, ref.out, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, ref.lse, rtol=1e-12, atol=1e-12)
    padded = attention_reference(pad_heads(pad_topk(inputs, 64, 16), 8))
    assert padded.out.shape == (2, 2, 8, 512)
    torch.testing.assert_close(padded.out[:, :, :3], ref.out, rtol=1e-12, atol=1e-14)
