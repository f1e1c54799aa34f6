"""Generated cases: adversarial by default, peaked so that a lost key is seen (decision 16).

What must not matter is hostile: slots that no valid index names, pads, and the memory before and after a cache hold
NaN; positions beyond a length hold wild or in-range garbage; q and indices are slices of wider buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kgen.types import KernelSpec

from . import pack
from .edges import EDGE_CASES, WILD_INDICES, core_edges
from .inputs import CaseSpec, Inputs
from .tuning import tuning_inputs

__all__ = ["EDGE_CASES", "WILD_INDICES", "CaseSpec", "Inputs", "KernelSpec", "core_edges", "make_case", "tuning_inputs"]

GUARD_TOKENS = 64
_PEAKS = 5  # dominant keys of a head: first, last of the main cache, last, two at random
_PEAK_MASS = 2.3  # log of how much the peaks add to log(keys): where a "near" sink lies
_CHUNK = 1 << 26  # elements of a temporary


@dataclass(frozen=True)
class _Side:
    """One cache of a case while it is built."""

    rows: Tensor  # float32 [slots, d]
    slots: int
    page: int
    indices: Tensor  # int64 [T, topk]
    lengths: Tensor | None  # int32 [T] or [b]
    valid: Tensor  # bool [T, topk]


def make_case(spec: CaseSpec, device: torch.device | str = "cpu") -> Inputs:
    """The inputs of `spec` on `device`; the same spec gives the same inputs on the same kind of device."""
    gen = torch.Generator(device=device)
    gen.manual_seed(spec.seed * 7919 + 17)
    main = _side(spec, spec.topk, spec.slots, spec.main_page, gen)
    extra = _side(spec, spec.extra_topk, spec.extra_slots, spec.extra_page, gen) if spec.extra_topk else None
    sm_scale = spec.d_qk**-0.5 if spec.sm_scale is None else spec.sm_scale
    extremes = spec.scale_rule == "ue8m0_extremes"
    q = _queries(spec, main, extra, sm_scale, gen)
    scales = _forced_scales(spec, main, gen)
    if extremes:
        q = _extreme_scales(spec, q, main, scales, gen)
    counts = main.valid.sum(1) + (extra.valid.sum(1) if extra else 0)
    return Inputs(
        q=_pad_q(q.to(torch.bfloat16), spec),
        kv=_cache(spec, main, scales),
        indices=_index_view(main.indices, spec),
        sm_scale=sm_scale,
        kv_layout=spec.kv_layout,
        topk_length=main.lengths,
        attn_sink=_sink(spec, counts, gen),
        extra_kv=_cache(spec, extra, None) if extra else None,
        extra_indices=_index_view(extra.indices, spec) if extra else None,
        extra_topk_length=extra.lengths if extra else None,
    )


def _rand(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=gen, device=gen.device)


def _randn(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen, device=gen.device)


def _randint(gen: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=gen, device=gen.device)


def _side(spec: CaseSpec, topk: int, slots: int, page: int, gen: torch.Generator) -> _Side:
    slots = -(-slots // page) * page
    indices = _indices(spec, topk, slots, gen)
    lengths = _lengths(spec, topk, gen)
    position = torch.arange(topk, device=gen.device)[None, :]
    valid = (indices >= 0) & (indices < slots)
    if lengths is not None:
        per_token = lengths.repeat_interleave(spec.tokens // max(lengths.numel(), 1)) if lengths.numel() else lengths
        limit = per_token.clamp(0, topk).long()[:, None]
        beyond = position >= limit
        indices = torch.where(beyond, _garbage(indices, valid & ~beyond, position == limit, slots, gen), indices)
        valid = valid & ~beyond
    rows = _randn(gen, slots, spec.d_qk) * spec.value_scale
    # magnitudes differ from group to group, so that a scale taken from another group shows
    blocks = torch.exp2(_randint(gen, -1, 2, slots, spec.d_qk // 32).float())
    rows = (rows.view(slots, spec.d_qk // 32, 32) * blocks[:, :, None]).flatten(1)
    return _Side(rows, slots, page, indices, lengths, valid)


def _wild(slots: int, gen: torch.Generator, *shape: int) -> Tensor:
    table = torch.tensor([slots if w is None else w for w in WILD_INDICES], device=gen.device)
    # a small number may lie inside a big cache: then it is no wild index
    table = torch.where((table >= 0) & (table < slots), torch.full_like(table, -1), table)
    return table[_randint(gen, 0, len(WILD_INDICES), *shape)]


def _garbage(indices: Tensor, valid: Tensor, first: Tensor, slots: int, gen: torch.Generator) -> Tensor:
    """Beyond a length: the row's first valid key once more (a length + 1 then shows), then wild or in range."""
    shape = tuple(indices.shape)
    mixed = torch.where(_rand(gen, *shape) < 0.5, _wild(slots, gen, *shape), _randint(gen, 0, slots, *shape))
    if indices.numel() == 0:
        return mixed
    repeat = indices.gather(1, valid.int().argmax(1, keepdim=True))
    return torch.where(first & valid.any(1, keepdim=True), repeat, mixed)


def _distinct(spec: CaseSpec, topk: int, slots: int, gen: torch.Generator) -> Tensor:
    if (
        topk > slots or spec.tokens * slots > 1 << 30
    ):  # no room for distinct ones, or too dear: duplicates are rare then
        return _randint(gen, 0, slots, spec.tokens, topk)
    step = max(1, _CHUNK // slots)
    parts = [_rand(gen, min(step, spec.tokens - t), slots).argsort(1)[:, :topk] for t in range(0, spec.tokens, step)]
    return torch.cat(parts) if parts else _randint(gen, 0, slots, 0, topk)


def _indices(spec: CaseSpec, topk: int, slots: int, gen: torch.Generator) -> Tensor:
    """int64 [T, topk] for one index kind of `CaseSpec`."""
    tokens, at = spec.tokens, spec.index_at
    good = _distinct(spec, topk, slots, gen)
    column = torch.arange(topk, device=gen.device).expand(tokens, topk)
    wild = _wild(slots, gen, tokens, topk)
    if spec.index == "duplicates":
        return good.gather(1, _randint(gen, 0, max(1, topk // 4), tokens, topk))
    if spec.index == "wild":
        return torch.where(column == min(at, topk - 1), torch.full_like(good, spec.index_value), good)
    masks = {
        "clean": torch.zeros_like(column, dtype=torch.bool),
        "random": _rand(gen, tokens, topk) < 0.2,
        "all_invalid": column >= 0,
        "some_empty": (torch.arange(tokens, device=gen.device)[:, None] % 3 == 1) | (_rand(gen, tokens, topk) < 0.2),
        "leading": column < at,
        "trailing": column >= topk - at,
        "alternating": (column // max(at, 1)) % 2 == 0,
        "single": column != min(at, topk - 1),
        "tail": column < topk - max(1, min(slots, topk) // 2),
    }
    return torch.where(masks[spec.index], wild, good)


def _lengths(spec: CaseSpec, topk: int, gen: torch.Generator) -> Tensor | None:
    if spec.lengths == "none":
        return None
    n = spec.tokens // spec.s_q
    wide = _randint(gen, 0, topk + 1, n)
    values = {
        "full": torch.full_like(wide, topk),
        "random": wide,
        "half": _randint(gen, topk // 2, topk + 1, n),
        "one": torch.ones_like(wide),
        "zero": torch.zeros_like(wide),
        "negative": torch.where(_rand(gen, n) < 0.6, -_randint(gen, 0, 9, n), wide),
        "over": topk + _randint(gen, 1, 1000, n),
    }
    return values[spec.lengths].to(torch.int32)


def _queries(spec: CaseSpec, main: _Side, extra: _Side | None, sm_scale: float, gen: torch.Generator) -> Tensor:
    """float32 [T, h, d]: noise plus, for each head, a few selected keys whose logits stand about 1 over log(keys)."""
    d = spec.d_qk
    q = _randn(gen, spec.tokens, spec.heads, d)
    if not spec.peaked or spec.tokens == 0:
        return q
    valid = main.valid if extra is None else torch.cat([main.valid, extra.valid], 1)
    slot = main.indices if extra is None else torch.cat([main.indices, extra.indices + main.slots], 1)
    rows = main.rows if extra is None else torch.cat([main.rows, extra.rows])
    order = valid.int().argsort(dim=1, descending=True, stable=True)
    count, count_main = valid.sum(1), main.valid.sum(1)
    step = max(1, _CHUNK // (spec.heads * _PEAKS * d))
    for start in range(0, spec.tokens, step):
        part = slice(start, start + step)
        n = count[part, None]
        rank = (_rand(gen, n.shape[0], spec.heads, _PEAKS) * n[:, :, None]).long()
        rank[:, :, 0], rank[:, :, 1], rank[:, :, 2] = 0, count_main[part, None] - 1, n - 1
        rank = rank.clamp_min(0).flatten(1)
        chosen = slot[part].gather(1, order[part].gather(1, rank)).view(-1, spec.heads, _PEAKS)
        same = chosen[:, :, :, None] == chosen[:, :, None, :]
        repeated = same.tril(-1).any(3)  # a key chosen twice would get twice the logit, and all of the mass
        height = n.clamp_min(1).log()[:, :, None] + 0.5 + _rand(gen, *chosen.shape)
        height = torch.where(repeated | (n[:, :, None] == 0), torch.zeros_like(height), height)
        keys = rows[chosen.clamp(0, rows.shape[0] - 1)]
        weight = height / (sm_scale * keys.square().sum(3).clamp_min(1e-30))
        q[part] += torch.einsum("thj,thjd->thd", weight, keys)
    return q


def _forced_scales(spec: CaseSpec, side: _Side, gen: torch.Generator) -> Tensor | None:
    """Scales that no writer's rule gives: B30's 0.3 and 1.7 (fp32), or UE8M0 with a NaN; else None."""
    kind = spec.scale_rule
    if kind in ("flashmla", "vllm", "sglang", "arbitrary") or not spec.paged:
        return None
    latent, group = {"v32": (512, 128), "v4": (448, 64)}.get(spec.layout, (512, 32))
    amax = side.rows[:, :latent].reshape(side.slots, latent // group, group).abs().amax(2)
    scales = pack.group_scales(amax, spec.layout, "flashmla")
    if kind == "odd_fp32":
        if spec.layout != "v32":
            raise ValueError("scale_rule odd_fp32 needs fp32 scales: layout v32")
        factors = torch.tensor([0.3, 1.7, 0.77, 1.0], device=gen.device, dtype=torch.float64)
        return factors[_randint(gen, 0, 4, *amax.shape)] * scales.clamp_min(2.0**-7)
    if kind == "nan_scale" and side.valid.any():
        victim = int(side.indices[side.valid][0])
        scales[victim, 1] = float("nan")
    return scales


def _extreme_scales(spec: CaseSpec, q: Tensor, side: _Side, scales: Tensor | None, gen: torch.Generator) -> Tensor:
    """Group 0 gets UE8M0 byte 0 (2^-127) and group 1 byte 254 (2^127); q is sized so that both move the logits.

    Values of group 1 share a sign, or cancellation among numbers of 2^119 would drown every absolute bound.
    """
    if scales is None or spec.layout not in ("v4", "v41_footer", "v41_inline"):
        raise ValueError("scale_rule ue8m0_extremes needs UE8M0 scales: layouts v4, v41_footer, v41_inline")
    group = 64 if spec.layout == "v4" else 32
    scales[:, 0], scales[:, 1] = 2.0**-127, 2.0**127
    # codes of at least 16 keep 2^-127 * code a normal float32, so that flushing subnormals is no excuse
    small = _randn(gen, side.slots, group).sign() * (16 + 400 * _rand(gen, side.slots, group))
    side.rows[:, :group] = small * 2.0**-127
    side.rows[:, group : 2 * group] = torch.exp2(-_randint(gen, 7, 10, side.slots, group).float()) * 2.0**127
    q[:, :, :group] = _randn(gen, spec.tokens, spec.heads, group) * 2.0**121
    q[:, :, group : 2 * group] = _randn(gen, spec.tokens, spec.heads, group) * 2.0**-121
    return q


def _cache(spec: CaseSpec, side: _Side, scales: Tensor | None) -> Tensor:
    used = torch.zeros(side.slots, dtype=torch.bool, device=side.rows.device)
    used[side.indices[side.valid]] = True
    if not spec.paged:
        return pack.pack_flat(
            side.rows,
            row_gap=spec.page_gap // 2,
            guard_rows=GUARD_TOKENS,
            used=used if spec.poison else None,
            poison=spec.poison,
        )
    rules: dict[str, pack.ScaleRule] = {"vllm": "vllm", "sglang": "sglang", "arbitrary": "arbitrary"}
    return pack.pack_paged(
        side.rows,
        spec.layout,
        side.page,
        scale_rule=rules.get(spec.scale_rule, "flashmla"),
        page_stride=pack.page_bytes(spec.layout, side.page) + spec.page_gap,
        guard_bytes=GUARD_TOKENS * 1024,
        used=used if spec.poison else None,
        poison=spec.poison,
        scales=scales,
    )


def _sink(spec: CaseSpec, counts: Tensor, gen: torch.Generator) -> Tensor | None:
    """fp32 [h] in natural-log units."""
    if spec.sink == "none":
        return None
    noise = _randn(gen, spec.heads)
    near = math.log(max(1.0, counts.double().mean().item() if counts.numel() else 1.0)) + _PEAK_MASS
    fixed = {"zero": 0.0, "plus5": 5.0, "minus5": -5.0, "plus_inf": float("inf"), "minus_inf": float("-inf")}
    if spec.sink in fixed:
        return torch.full_like(noise, fixed[spec.sink])
    if spec.sink == "normal":
        return noise
    sink = near + 0.5 * noise
    if spec.sink == "mixed":  # starts with a finite one, so that a single head is a case too
        sink[1::4], sink[3::4] = float("inf"), float("-inf")
    return sink


def _pad_q(q: Tensor, spec: CaseSpec) -> Tensor:
    tokens, heads, d = q.shape
    if spec.q_pad:
        wide = torch.full((tokens, heads + 1, d + 8), float("nan"), dtype=q.dtype, device=q.device)
        wide[:, :heads, :d] = q
        q = wide[:, :heads, :d]
    return q.view(tokens // spec.s_q, spec.s_q, heads, d) if spec.s_q > 1 else q


def _index_view(indices: Tensor, spec: CaseSpec) -> Tensor:
    indices = indices.to(torch.int32)
    if spec.q_pad:
        wide = torch.full(
            (indices.shape[0], indices.shape[1] + 4), 2147483647, dtype=torch.int32, device=indices.device
        )
        wide[:, : indices.shape[1]] = indices
        indices = wide[:, : indices.shape[1]]
    if spec.s_q > 1:
        return indices.view(spec.tokens // spec.s_q, spec.s_q, indices.shape[1])
    return indices[:, None, :] if spec.index_3d else indices
