"""The truth: attention in float64 over the bytes that are stored, by the plain formulas of spec.md sections 0 to 3.

    P_j = sm_scale * <q, k_j>;  lse = log(sum_j exp(P_j));  out = sum_j exp(P_j) v_j / (sum_j exp(P_j) + exp(sink))

Byte offsets are written out from spec section 1; nothing here comes from the runtime, the templates or the packers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Inputs

D_V = 512

Latents = Callable[[Tensor, Tensor], Tensor]
"""How latents become numbers: (values of the e4m3 codes, their scales) as float64 of one shape -> float64."""


def exactly(values: Tensor, scales: Tensor) -> Tensor:
    """As they are stored: what is true."""
    return values * scales


def rounded_to_bf16(values: Tensor, scales: Tensor) -> Tensor:
    """As a kernel takes them that multiplies in fp32 and gives its MMA bf16."""
    return (values * scales).float().to(torch.bfloat16).double()


def rounded_to_fp16(values: Tensor, scales: Tensor) -> Tensor:
    """As a kernel takes them that multiplies in fp16, by a scale in fp16."""
    return (values * scales.half().double()).half().double()


@dataclass(frozen=True)
class Reference:
    """out [..., h, 512], lse and max_logits [..., h], float64; leading dims are q's, or [len(rows)] for a subset.

    Natural log, sink not in lse. A row without a valid key has out 0, lse -inf, max_logits -inf; a valid key that holds
    NaN makes its row NaN in all three.
    """

    out: Tensor
    lse: Tensor
    max_logits: Tensor


def attention_reference(
    inputs: Inputs,
    rows: Sequence[int] | Tensor | None = None,
    chunk_bytes: int = 1 << 28,
    latents: Latents = exactly,
) -> Reference:
    """Reference of `inputs`, for all tokens or for the flat token numbers in `rows`, on the device of q.

    Works on about `chunk_bytes` of temporaries at a time (but at least one token). Other `latents` than the exact ones give
    what is true of rounded latents: how far rounding alone moves a result.
    """
    device = inputs.q.device
    tokens, heads, d = inputs.tokens, inputs.heads, inputs.d_qk
    pick = torch.arange(tokens, device=device) if rows is None else torch.as_tensor(rows, device=device).long()
    caches = [_Cache(inputs, inputs.kv, inputs.indices, inputs.topk_length, latents)]
    if inputs.extra_kv is not None:
        assert inputs.extra_indices is not None, "extra_kv comes with extra_indices"
        caches.append(_Cache(inputs, inputs.extra_kv, inputs.extra_indices, inputs.extra_topk_length, latents))
    width = sum(cache.topk for cache in caches)
    step = max(1, chunk_bytes // (width * (d * 8 * 4 + heads * 8 * 4) + 1))
    out = torch.empty(len(pick), heads, D_V, dtype=torch.float64, device=device)
    lse = torch.empty(len(pick), heads, dtype=torch.float64, device=device)
    max_logits = torch.empty_like(lse)
    for start in range(0, len(pick), step):
        part = pick[start : start + step]
        gathered = [cache.keys(part) for cache in caches]
        keys = torch.cat([k for k, _ in gathered], dim=1)
        valid = torch.cat([v for _, v in gathered], dim=1)
        q = inputs.q[part] if inputs.q.dim() == 3 else inputs.q[part // inputs.s_q, part % inputs.s_q]
        result = attend(q.double(), keys, valid, inputs.sm_scale, inputs.attn_sink)
        out[start : start + step], lse[start : start + step], max_logits[start : start + step] = result
    if rows is None:
        lead = inputs.q.shape[:-2]
        return Reference(out.view(*lead, heads, D_V), lse.view(*lead, heads), max_logits.view(*lead, heads))
    return Reference(out, lse, max_logits)


def attend(
    q: Tensor, keys: Tensor, valid: Tensor, sm_scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of q [r, h, d] over keys [r, n, d] where valid [r, n]; float64. Masked keys are finite."""
    keep = valid[:, None, :]
    logits = (torch.einsum("rhd,rnd->rhn", q, keys) * sm_scale).masked_fill(~keep, float("-inf"))
    top = logits.amax(dim=2)
    shift = torch.where(top == float("-inf"), torch.zeros_like(top), top)  # an empty row: exp(-inf - 0) = 0
    weight = torch.exp(logits - shift[:, :, None])
    total = weight.sum(dim=2)
    lse = shift + torch.log(total)
    mean = torch.einsum("rhn,rnd->rhd", weight, keys[:, :, :D_V]) / total[:, :, None]
    if sink is not None:
        # exp(lse) / (exp(lse) + exp(sink)), written so that both infinities come out right
        mean = mean / (1 + torch.exp(sink.double()[None, :] - lse))[:, :, None]
    empty = ~valid.any(dim=1)
    return mean.masked_fill(empty[:, None, None], 0.0), lse, top


class _Cache:
    """One cache with its indices: gives the decoded keys of some tokens and which of them count."""

    def __init__(
        self, inputs: Inputs, kv: Tensor, indices: Tensor, lengths: Tensor | None, latents: Latents = exactly
    ) -> None:
        self.latents = latents
        self.topk = indices.shape[-1]
        self.indices = indices.reshape(inputs.tokens, self.topk)
        self.lengths = lengths
        if lengths is not None and lengths.numel() != inputs.tokens:
            self.lengths = lengths.repeat_interleave(inputs.s_q)  # one per batch row
        self.layout = inputs.kv_layout
        self.kv = kv
        self.slots = kv.shape[0] if self.layout == "bf16" else kv.shape[0] * kv.shape[1]

    def keys(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(keys float64 [r, topk, d], 0 where not valid; valid bool [r, topk])."""
        index = self.indices[tokens].long()
        valid = (index >= 0) & (index < self.slots)
        if self.lengths is not None:
            position = torch.arange(self.topk, device=index.device)
            valid &= position[None, :] < self.lengths[tokens].clamp(0, self.topk)[:, None]
        d = 576 if self.layout == "v32" else 512
        if self.layout == "bf16":
            d = self.kv.shape[-1]
        keys = torch.zeros(*index.shape, d, dtype=torch.float64, device=index.device)
        keys[valid] = decode_slots(self.kv, self.layout, index[valid], self.latents)  # only valid slots are ever read
        return keys, valid


def decode_slots(kv: Tensor, layout: str, slot: Tensor, latents: Latents = exactly) -> Tensor:
    """Rows of a cache as float64 [n, d_qk]: slot is int64 [n], every value in range; layout is the API's word."""
    if layout == "bf16":
        return kv.reshape(kv.shape[0], kv.shape[-1])[slot].double() if kv.dim() == 2 else kv[slot, 0].double()
    raw = kv.view(torch.uint8)
    pages, page = raw.shape[:2]
    at = (slot // page, slot % page)

    def region(offset: int, step: int, width: int) -> Tensor:
        view = raw.as_strided((pages, page, width), (raw.stride(0), step, 1), raw.storage_offset() + offset)
        return view[at]

    if layout == "v32":  # 512 e4m3, 4 fp32 scales, 64 bf16
        scale = region(512, 656, 16).view(torch.float32).double()
        latent = _scaled(region(0, 656, 512), scale, 128, latents)
        return torch.cat([latent, region(528, 656, 128).view(torch.bfloat16).double()], dim=1)
    if layout == "v4":  # 448 e4m3 and 64 bf16 per token; behind all of them 7 exponents and a pad byte per token
        scale = _ue8m0(region(page * 576, 8, 7))
        latent = _scaled(region(0, 576, 448), scale, 64, latents)
        return torch.cat([latent, region(448, 576, 128).view(torch.bfloat16).double()], dim=1)
    if layout == "v41_footer":  # 512 e4m3 per token; behind all of them 16 exponents per token
        return _scaled(region(0, 512, 512), _ue8m0(region(page * 512, 16, 16)), 32, latents)
    if layout == "v41_inline":  # 512 e4m3 and 16 exponents per token
        return _scaled(region(0, 528, 512), _ue8m0(region(512, 528, 16)), 32, latents)
    raise ValueError(f"the reference knows bf16, v32, v4, v41_footer and v41_inline, not {layout!r}")


def _scaled(codes: Tensor, scale: Tensor, group: int, latents: Latents) -> Tensor:
    values = _e4m3(codes).view(codes.shape[0], codes.shape[1] // group, group)
    return latents(values, scale[:, :, None]).flatten(1)


def _e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_E4M3 = [_e4m3_value(code) for code in range(256)]
_UE8M0 = [2.0 ** (byte - 127) for byte in range(255)] + [float("nan")]  # byte 0 is 2^-127, not 0; byte 255 is NaN


def _e4m3(codes: Tensor) -> Tensor:
    return torch.tensor(_E4M3, dtype=torch.float64, device=codes.device)[codes.int()]


def _ue8m0(scale_bytes: Tensor) -> Tensor:
    return torch.tensor(_UE8M0, dtype=torch.float64, device=scale_bytes.device)[scale_bytes.int()]
