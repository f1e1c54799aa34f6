"""Entries that ask something of a call: a stated scale range for fp16, 16-byte alignment for the Gluon families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kgen.runtime.select import cannot_serve, select
from kgen.runtime.table import Entry, Provenance, Shape, config
from kgen.runtime.validate import Unsupported, build_call, shape_of

SHAPE = Shape("v32", 64, 2048, 64, 16)


def entry(module: str, tier: int, tokens: tuple[int, int] = (5, 16), **tunables: int | str | bool) -> Entry:
    made = config(4, 1, block_h=64, block_k=64, **tunables)
    provenance = Provenance("measured", "h200", us=10.0 + tier, anchor_tokens=16)
    return Entry("v32", False, 64, (2048, 2048), (0, 0), 64, None, tokens, module, made, provenance, tier)


FP16 = entry("sm90_ws_fp8_v32", 0, latent="fp16")
BF16 = entry("sm90_ws_fp8_v32", 1, latent="bf16")
PORTABLE = entry("portable_v32_c128", 2, tokens=(16, 16))  # narrower: a tie must not be decided by that
TABLE = (PORTABLE, BF16, FP16)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (replace(SHAPE, fp16=True), FP16),
        (SHAPE, BF16),
        (replace(SHAPE, fp16=True, aligned=False), PORTABLE),
        (replace(SHAPE, aligned=False), PORTABLE),
        (replace(SHAPE, fp16=True, heads=24), FP16),
        (replace(SHAPE, heads=24, tokens=999), BF16),
    ],
)
def test_the_lowest_tier_that_the_call_qualifies_for_serves(shape: Shape, wanted: Entry) -> None:
    choice = select(TABLE, shape, "h200")
    assert choice is not None and choice.entry == wanted
    assert all(sentence.endswith(".") for _, sentence in choice.reasons_against)


def test_what_rules_an_entry_out_is_said() -> None:
    assert "scale_range" in (cannot_serve(FP16, SHAPE) or "")
    assert "multiple of 16" in (cannot_serve(BF16, replace(SHAPE, aligned=False)) or "")
    assert cannot_serve(PORTABLE, replace(SHAPE, aligned=False)) is None


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({"tokens": 4_194_303}, True),
        ({"tokens": 4_194_304}, False),
        ({"heads": 128, "tokens": 524_287}, True),  # 8 blocks of 16
        ({"heads": 128, "tokens": 524_288}, False),
        ({"heads": 113, "tokens": 524_288}, False),
        ({"topk": 2**27 - 1}, True),
        ({"topk": 2**26, "extra_topk": 2**26}, False),
    ],
)
def test_a_call_too_large_for_divisions_in_fp32_goes_to_another_family(changes: dict[str, int], served: bool) -> None:
    """The quotient of floats is at most 1 off for numbers up to 2^22 alone, and a wrong token is a wild address."""
    few = entry("sm90_few_v32", 0, latent="bf16")
    few = replace(few, config=replace(few.config, tunables=(("block_h", 16), ("block_k", 64), ("latent", "bf16"))))
    shape = replace(SHAPE, heads=16) if "heads" not in changes else SHAPE
    choice = select((few, PORTABLE), replace(shape, **changes), "h200")  # type: ignore[arg-type]
    assert choice is not None and (choice.entry == few) is served
    if not served:
        assert "divides in fp32" in (cannot_serve(few, replace(shape, **changes)) or "")  # type: ignore[arg-type]


def arguments(d_pad: int = 0, page_gap: int = 0) -> dict[str, object]:
    cache = torch.zeros(2, 64 * 656 + page_gap, dtype=torch.uint8)
    kv = cache.as_strided((2, 64, 1, 656), (cache.stride(0), 656, 656, 1))
    q = torch.zeros(3, 64, 576 + d_pad, dtype=torch.bfloat16)[..., :576]
    return {"q": q, "kv": kv, "indices": torch.zeros(3, 8, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("d_pad", "page_gap", "aligned"), [(0, 0, True), (16, 0, True), (8, 0, False), (0, 16, True), (0, 8, False)]
)
def test_alignment_is_what_triton_can_see(d_pad: int, page_gap: int, aligned: bool) -> None:
    call = build_call(**arguments(d_pad, page_gap), sm_scale=1.0, kv_layout="v32")  # type: ignore[arg-type]
    assert call.aligned is aligned


@pytest.mark.parametrize(("sm_scale", "aligned"), [(0.1, True), (0.0, False), (-0.1, False)])
def test_a_scale_that_is_not_positive_goes_to_the_portable_family(sm_scale: float, aligned: bool) -> None:
    call = build_call(**arguments(), sm_scale=sm_scale, kv_layout="v32")  # type: ignore[arg-type]
    assert call.aligned is aligned


@pytest.mark.parametrize(
    ("scale_range", "fp16"),
    [(None, False), ((6e-5, 146.0), True), ((5.9e-5, 1.0), False), ((1e-3, 146.5), False), ((0.0, 1.0), False)],
)
def test_only_a_range_inside_the_limits_allows_fp16(scale_range: tuple[float, float] | None, fp16: bool) -> None:
    given = arguments()
    call = build_call(**given, sm_scale=1.0, kv_layout="v32", scale_range=scale_range)  # type: ignore[arg-type]
    assert call.fp16 is fp16
    shape = shape_of(given["q"], given["kv"], given["indices"], "v32", scale_range=scale_range)  # type: ignore[arg-type]
    assert shape.fp16 is fp16


def test_bf16_caches_have_no_scales_to_state() -> None:
    q = torch.zeros(3, 64, 512, dtype=torch.bfloat16)
    kv = torch.zeros(9, 512, dtype=torch.bfloat16)
    indices = torch.zeros(3, 8, dtype=torch.int32)
    assert not build_call(q, kv, indices, sm_scale=1.0, kv_layout="bf16", scale_range=(0.1, 1.0)).fp16


@pytest.mark.parametrize(
    "wrong", ["wide", (1.0,), (2.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (0.0, float("inf")), 3]
)
def test_a_range_that_is_none_is_refused_in_words(wrong: object) -> None:
    with pytest.raises(Unsupported, match="scale_range is"):
        build_call(**arguments(), sm_scale=1.0, kv_layout="v32", scale_range=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("pages", "aligned"), [(818_400, True), (818_401, False), (2_000_000, False)])
def test_a_cache_of_32_gib_is_served_by_the_portable_family(pages: int, aligned: bool) -> None:
    """Offsets of the Gluon families count 16 bytes in 31 bits: 2^35 bytes are 818,400.8 pages of 64 rows of 656 bytes."""
    assert (pages * 64 * 656 < 1 << 35) is aligned
    kv = torch.empty(pages, 64, 1, 656, dtype=torch.uint8, device="meta")
    q = torch.empty(1, 64, 576, dtype=torch.bfloat16, device="meta")
    indices = torch.zeros(1, 128, dtype=torch.int32, device="meta")
    assert build_call(q, kv, indices, sm_scale=1.0, kv_layout="v32").aligned is aligned
    assert shape_of(q, kv, indices, "v32").aligned is aligned


@pytest.mark.parametrize(
    ("tokens", "heads", "aligned"),
    [(524_288, 128, True), (524_289, 128, False), (600_000, 112, False), (70_000, 128, True)],
)
def test_an_output_of_64_gib_is_written_by_the_portable_family(tokens: int, heads: int, aligned: bool) -> None:
    """sm90_rs_fp8 counts rows of the output in units of 16 numbers in 31 bits: 2^35 numbers are 524,288 tokens of 128 heads."""
    assert (tokens * heads * 512 <= 1 << 35) is aligned
    q = torch.empty(tokens, heads, 576, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(64, 64, 1, 656, dtype=torch.uint8, device="meta")
    indices = torch.zeros(tokens, 128, dtype=torch.int32, device="meta")
    assert build_call(q, kv, indices, sm_scale=1.0, kv_layout="v32").aligned is aligned
    assert shape_of(q, kv, indices, "v32").aligned is aligned
    wide = torch.empty(8, heads, 512, dtype=torch.bfloat16, device="meta").as_strided(
        (8, heads, 512), (1 << 33, 512, 1)
    )
    for rows, near in ((8, False), (4, True)):
        call = build_call(q[:rows], kv, indices[:rows], sm_scale=1.0, kv_layout="v32", out=wide[:rows])
        assert call.aligned is near
        assert shape_of(q[:rows], kv, indices[:rows], "v32", out=wide[:rows]).aligned is near


@pytest.mark.parametrize(
    ("make", "aligned"),
    [
        (lambda: torch.zeros(3, 64, 576, dtype=torch.bfloat16), True),
        (lambda: torch.zeros(3, 64, 592, dtype=torch.bfloat16)[..., :576], True),
        (lambda: torch.zeros(3, 64, 584, dtype=torch.bfloat16)[..., :576], False),
        (lambda: torch.zeros(3 * 64 * 576 + 8, dtype=torch.bfloat16)[8:].view(3, 64, 576), True),
        (lambda: torch.zeros(3 * 64 * 576 + 4, dtype=torch.bfloat16)[4:].view(3, 64, 576), False),
        (lambda: torch.zeros(1, 64, 576, dtype=torch.bfloat16).expand(3, 64, 576), True),
        (lambda: torch.zeros(3, 1, 64, 576, dtype=torch.bfloat16), True),
        (lambda: torch.zeros(3, 1, 64, 584, dtype=torch.bfloat16)[..., :576], False),
        (lambda: torch.zeros(3, 1, 577, dtype=torch.bfloat16)[..., :576], False),
        (lambda: torch.zeros(3 * 1152, dtype=torch.bfloat16).as_strided((3, 1, 576), (1152, 577, 1)), True),
    ],
)
@pytest.mark.parametrize("with_out", [None, 512, 516])
def test_the_key_of_arguments_is_the_key_of_their_call(make: Any, aligned: bool, with_out: int | None) -> None:
    """What `supports` looks up is what `sparse_mla` then serves."""
    given = arguments() | {"q": make()}
    lead = given["q"].shape[:-1]  # type: ignore[attr-defined]
    out = None if with_out is None else torch.zeros(*lead, with_out, dtype=torch.bfloat16)[..., :512]
    call = build_call(**given, sm_scale=1.0, kv_layout="v32", out=out)  # type: ignore[arg-type]
    shape = shape_of(given["q"], given["kv"], given["indices"], "v32", out=out)  # type: ignore[arg-type]
    assert shape.aligned is call.aligned is (aligned and with_out != 516)
    assert not shape_of(given["q"], given["kv"], given["indices"], "v32", sm_scale=-1.0).aligned  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_a_number_too_large_for_a_float_is_refused_in_words(number: int) -> None:
    with pytest.raises(Unsupported, match="pass a finite number"):
        build_call(**arguments(), sm_scale=number, kv_layout="v32")  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="scale_range is"):
        build_call(**arguments(), sm_scale=1.0, kv_layout="v32", scale_range=(0, number))  # type: ignore[arg-type]


def test_a_workspace_serves_every_form_of_a_shape() -> None:
    from generated.dispatch import workspace_size
    from generated.lookup import serve

    shape = Shape("v4", 64, 128, 64, 1, 1024, 64)
    size = workspace_size(shape, arch="sm90", device_class="h200")
    forms = [replace(shape, fp16=fp16, aligned=aligned) for fp16 in (False, True) for aligned in (False, True)]
    needs = [serve("sm90", "h200", form).scratch for form in forms]
    assert size == max(needs) and len(set(needs)) > 1


def test_the_span_of_flat_caches_keeps_no_family_away() -> None:
    """Rows of bf16 are addressed in 64 bits: `supports` looks up what the call will."""
    q = torch.zeros(3, 64, 512, dtype=torch.bfloat16, device="meta")
    indices = torch.zeros(3, 8, dtype=torch.int32, device="meta")
    for kv in (q.new_empty(1 << 26, 512), q.new_empty(1 << 26, 1, 512)):
        call = build_call(q, kv, indices, sm_scale=0.1, kv_layout="bf16")
        assert call.aligned and shape_of(q, kv, indices, "bf16").aligned
