"""Proof that the checks can see: a correct kernel in torch, and the ways in which kernels were wrong (decision 16).

`emulate` does what a good kernel does: K in bf16, fp32 accumulation, P rounded to bf16 before P.V, out in bf16. With
`latents="fp16"` it multiplies them in fp16, which is right for a call that states its scales and wrong for any other. Each
mutation changes one thing and has an input on which `compare` must pass the correct emulation and fail the mutated one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .inputs import CaseSpec, Inputs


@dataclass(frozen=True)
class Quirks:
    """Defects of an emulated kernel; the default is none."""

    drop_key: str = ""  # "first" or "last" valid key of every row
    merge_duplicates: bool = False
    ignore_sink: bool = False
    sink_base2: bool = False  # takes the sink for a base-2 number
    sink_scaled: bool = False  # multiplies the sink by sm_scale
    sink_in_lse: bool = False
    length_delta: int = 0
    ignore_length: bool = False
    ignore_extra: bool = False
    ignore_extra_length: bool = False
    two_softmaxes: bool = False  # averages the caches' results instead of one softmax
    swap_scale_groups: bool = False
    floor_scales: bool = False  # reads the exponent of an fp32 scale only
    naive_ue8m0: bool = False  # byte << 23: byte 0 becomes 0
    ignore_page_stride: bool = False
    lse_base2: bool = False
    no_upper_bound: bool = False
    no_lower_bound: bool = False
    position_bound: bool = False  # B19: compares the column with the number of slots
    multiply_mask: bool = False  # 0 * NaN of a masked slot
    minus_inf_start: bool = False  # B01: NaN when the first block is masked
    empty_is_nan: bool = False
    latents: str = "bf16"  # how scaled latents become operands: a key of `_LATENTS`


@dataclass(frozen=True)
class Emulated:
    """out bf16 [T, h, 512]; lse and max_logits fp32 [T, h]."""

    out: Tensor
    lse: Tensor
    max_logits: Tensor


def emulate(inputs: Inputs, quirks: Quirks | None = None) -> Emulated:
    """Run the emulated kernel on small inputs (everything at once, no chunks)."""
    quirks = quirks or Quirks()
    q = inputs.q.reshape(inputs.tokens, inputs.heads, inputs.d_qk).float()
    main = _Loaded(inputs, inputs.kv, inputs.indices, inputs.topk_length, quirks)
    sides = [main]
    if inputs.extra_kv is not None and inputs.extra_indices is not None and not quirks.ignore_extra:
        lengths = None if quirks.ignore_extra_length else inputs.extra_topk_length
        sides.append(_Loaded(inputs, inputs.extra_kv, inputs.extra_indices, lengths, quirks))
    if quirks.two_softmaxes and len(sides) == 2:
        results = [_softmax(inputs, q, side.keys, side.valid, quirks) for side in sides]
        halves = (results[0].out.float() + results[1].out.float()) / 2
        return Emulated(halves.to(torch.bfloat16), results[0].lse, results[0].max_logits)
    keys = torch.cat([side.keys for side in sides], 1)
    valid = torch.cat([side.valid for side in sides], 1)
    return _softmax(inputs, q, keys, valid, quirks)


def _softmax(inputs: Inputs, q: Tensor, keys: Tensor, valid: Tensor, quirks: Quirks) -> Emulated:
    logits = torch.einsum("rhd,rnd->rhn", q, keys) * inputs.sm_scale
    logits = torch.where(valid[:, None], logits, torch.full_like(logits, float("-inf")))
    values = keys[:, :, :512]
    if not quirks.multiply_mask:
        values = torch.where(valid[:, :, None], values, torch.zeros_like(values))
    top = logits.amax(2)
    shift = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    weight = torch.exp(logits - shift[:, :, None])
    total = weight.sum(2)
    lse = shift + total.log()
    mass = total
    sink = None if quirks.ignore_sink else inputs.attn_sink
    if sink is not None:
        sink = sink * (math.log(2) if quirks.sink_base2 else inputs.sm_scale if quirks.sink_scaled else 1.0)
        mass = total + torch.exp(sink[None] - shift)
        if quirks.sink_in_lse:
            lse = torch.logaddexp(lse, sink[None].expand_as(lse))
    out = torch.einsum("rhn,rnd->rhd", weight.to(torch.bfloat16).float(), values) / mass[:, :, None]
    empty = ~valid.any(1)
    if not (quirks.empty_is_nan or quirks.multiply_mask):
        out = torch.where(empty[:, None, None], torch.zeros_like(out), out)
    if quirks.minus_inf_start:
        out[~valid[:, :16].any(1) & ~empty] = float("nan")
    return Emulated(out.to(torch.bfloat16), lse / math.log(2) if quirks.lse_base2 else lse, top)


class _Loaded:
    """Keys float32 [T, topk, d] and valid bool [T, topk] of one cache, by a kernel with `quirks`."""

    def __init__(self, inputs: Inputs, kv: Tensor, indices: Tensor, lengths: Tensor | None, quirks: Quirks) -> None:
        topk, tokens = indices.shape[-1], inputs.tokens
        index = indices.reshape(tokens, topk).long()
        slots = kv.shape[0] * (kv.shape[1] if inputs.kv_layout != "bf16" else 1)
        column = torch.arange(topk, device=index.device)[None]
        valid = torch.ones_like(index, dtype=torch.bool)
        if not quirks.no_lower_bound:
            valid &= index >= 0
        if not quirks.no_upper_bound:
            valid &= index < slots
        if quirks.position_bound:
            valid &= column < slots
        if lengths is not None and not quirks.ignore_length:
            per_token = lengths if lengths.numel() == tokens else lengths.repeat_interleave(inputs.s_q)
            valid &= column < (per_token.clamp(0, topk)[:, None] + quirks.length_delta)
        if quirks.merge_duplicates:
            same = (index[:, :, None] == index[:, None, :]) & valid[:, None, :]
            valid &= ~same.tril(-1).any(2)
        if quirks.drop_key:
            order = valid.int().cumsum(1) if quirks.drop_key == "first" else valid.int().flip(1).cumsum(1).flip(1)
            valid &= order > 1
        self.valid = valid
        self.keys = _rows(inputs.kv_layout, kv, index.clamp(0, slots - 1), quirks)


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def _truncated(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -65536).view(torch.float32)


_LATENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bf16": lambda code, scale: _bf16(code * scale),
    "fp16": lambda code, scale: (code.half() * scale.half()).float(),
    "truncated": lambda code, scale: _truncated(code * scale),
    "scale_in_bf16": lambda code, scale: _bf16(code * _bf16(scale)),
    "scale_truncated": lambda code, scale: _bf16(code * _truncated(scale)),
    "twice": lambda code, scale: _bf16(
        (code * scale).half().float()
    ),  # to fp16 first: a tie may be made where none was
    "scale_in_fp16": lambda code, scale: code * scale.half().float(),  # and no rounding of K
}


def _rows(layout: str, kv: Tensor, slot: Tensor, quirks: Quirks) -> Tensor:
    """float32 [..., d_qk] of the slots, with torch's own float8 type."""
    if layout == "bf16":
        if quirks.ignore_page_stride:
            kv = kv.as_strided(kv.shape, kv.new_empty(kv.shape).stride(), kv.storage_offset())
        return kv.reshape(kv.shape[0], -1)[slot].float()
    page = kv.shape[1]
    starts = {"v32": (656, 0, 512, 656), "v4": (576, page * 576, 0, 8), "v41_footer": (512, page * 512, 0, 16)}
    record, scales_at, inline_at, scale_step = starts.get(layout, (528, 0, 512, 528))
    stride = page * kv.shape[3] if quirks.ignore_page_stride else kv.stride(0)
    base = slot // page * stride + int(kv.storage_offset())
    data = base + slot % page * record
    scale = base + scales_at + inline_at + slot % page * scale_step
    flat = kv.view(torch.uint8).as_strided((kv.untyped_storage().nbytes(),), (1,), 0)

    def take(start: Tensor, size: int) -> Tensor:
        return flat[start[..., None] + torch.arange(size, device=flat.device)]

    latent, group, scale_bytes = {"v32": (512, 128, 16), "v4": (448, 64, 7)}.get(layout, (512, 32, 16))
    factors = _factors(layout, take(scale, scale_bytes), quirks)
    if quirks.swap_scale_groups:
        factors = factors.flip(-1)
    codes = take(data, latent).view(torch.float8_e4m3fn).float().view(*slot.shape, latent // group, group)
    parts = [_LATENTS[quirks.latents](codes, factors[..., None]).flatten(-2)]
    if layout in ("v32", "v4"):
        parts.append(take(data + (528 if layout == "v32" else 448), 128).view(torch.bfloat16).float())
    return torch.cat(parts, -1)


def _factors(layout: str, raw: Tensor, quirks: Quirks) -> Tensor:
    if layout == "v32":
        scale = raw.contiguous().view(torch.float32)
        if quirks.floor_scales:
            scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        return scale
    power = torch.exp2(raw.double() - 127).float()  # in float64 first: 2^-127 is subnormal in fp32
    power = torch.where(raw == 255, torch.full_like(power, float("nan")), power)
    return torch.where(raw == 0, torch.zeros_like(power), power) if quirks.naive_ue8m0 else power


@dataclass(frozen=True)
class Mutation:
    """A defect, the input that shows it, and on which output it must be seen."""

    name: str
    quirks: Quirks
    spec: CaseSpec
    seen_on: str = "out"

    def __call__(self, inputs: Inputs) -> Emulated:
        return emulate(inputs, self.quirks)


_BASE = CaseSpec(layout="bf16_d576", heads=16, topk=128, slots=300, tokens=4, sink="near")
_FP8 = replace(_BASE, layout="v4", page=61, topk=64)
_DUAL = replace(_FP8, extra_topk=70, extra_page=2, extra_slots=90)
_ANY_SCALE = replace(_BASE, layout="v32", page=61, topk=64, scale_rule="arbitrary")
_LONG = replace(_BASE, topk=2048, slots=4096, tokens=2, index="clean", lengths="none")

MUTATIONS: tuple[Mutation, ...] = (
    Mutation("drop_last_key", Quirks(drop_key="last"), _BASE),
    Mutation("drop_last_key_topk2048", Quirks(drop_key="last"), _LONG),
    Mutation("drop_first_key", Quirks(drop_key="first"), _BASE),
    Mutation("merge_duplicates", Quirks(merge_duplicates=True), replace(_BASE, index="duplicates")),
    Mutation("ignore_sink", Quirks(ignore_sink=True), replace(_BASE, topk=8)),
    Mutation("sink_base2", Quirks(sink_base2=True), replace(_BASE, topk=8)),
    Mutation("sink_scaled", Quirks(sink_scaled=True), replace(_BASE, topk=8)),
    Mutation("sink_in_lse", Quirks(sink_in_lse=True), _BASE, "lse"),
    Mutation("length_plus_1", Quirks(length_delta=1), replace(_BASE, index="clean", poison=False)),
    Mutation("length_minus_1", Quirks(length_delta=-1), replace(_BASE, index="clean")),
    Mutation("ignore_length", Quirks(ignore_length=True), _BASE),
    Mutation("ignore_extra", Quirks(ignore_extra=True), _DUAL),
    Mutation("ignore_extra_length", Quirks(ignore_extra_length=True), _DUAL),
    Mutation("two_softmaxes", Quirks(two_softmaxes=True), _DUAL),
    Mutation("swap_scale_groups_v4", Quirks(swap_scale_groups=True), _FP8),
    Mutation("swap_scale_groups_v32", Quirks(swap_scale_groups=True), replace(_FP8, layout="v32")),
    Mutation("swap_scale_groups_v41", Quirks(swap_scale_groups=True), replace(_FP8, layout="v41_inline")),
    Mutation("floor_scales", Quirks(floor_scales=True), replace(_FP8, layout="v32", scale_rule="odd_fp32")),
    Mutation("naive_ue8m0", Quirks(naive_ue8m0=True), replace(_FP8, scale_rule="ue8m0_extremes")),
    Mutation("ignore_page_stride", Quirks(ignore_page_stride=True), replace(_FP8, page_gap=576, poison=False)),
    Mutation("ignore_row_stride", Quirks(ignore_page_stride=True), replace(_BASE, page_gap=64, poison=False)),
    Mutation("lse_base2", Quirks(lse_base2=True), _BASE, "lse"),
    Mutation("no_upper_bound", Quirks(no_upper_bound=True), replace(_BASE, poison=False)),
    Mutation("no_lower_bound", Quirks(no_lower_bound=True), replace(_BASE, poison=False)),
    Mutation(
        "position_bound", Quirks(position_bound=True), replace(_BASE, index="tail", topk=512, slots=128, lengths="none")
    ),
    Mutation("multiply_mask", Quirks(multiply_mask=True), _BASE),
    Mutation(
        "minus_inf_start", Quirks(minus_inf_start=True), replace(_BASE, index="leading", index_at=16, lengths="none")
    ),
    Mutation("empty_is_nan", Quirks(empty_is_nan=True), replace(_BASE, index="some_empty", sink="none")),
    # K of arbitrary scales. "fp16", "scale_in_fp16" and "twice" are no further from the truth than K rounded to bf16 is
    *(
        Mutation(f"latents_{name}", Quirks(latents=name), _ANY_SCALE, "lse")
        for name in ("fp16", "truncated", "scale_in_bf16", "scale_truncated", "scale_in_fp16", "twice")
    ),
)
