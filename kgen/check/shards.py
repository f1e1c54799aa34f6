"""Inputs derived from other inputs: shards of the keys and their merge, and padding of heads and of the index width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .inputs import Inputs


def split_row(inputs: Inputs, shards: int) -> list[Inputs]:
    """`shards` inputs that hold, in turn, every shards-th column of the indices, without sink and lengths.

    What lies beyond a length becomes -1 first; a second cache goes along in the same way.
    """
    main = _explicit(inputs.indices, inputs.topk_length, inputs.s_q)
    extra = None
    if inputs.extra_indices is not None:
        extra = _explicit(inputs.extra_indices, inputs.extra_topk_length, inputs.s_q)
    return [
        inputs.replace(
            indices=_every(main, part, shards),
            extra_indices=None if extra is None else _every(extra, part, shards),
            topk_length=None,
            extra_topk_length=None,
            attn_sink=None,
        )
        for part in range(shards)
    ]


def _every(indices: Tensor, part: int, shards: int) -> Tensor:
    piece = indices[..., part::shards]
    if piece.shape[-1] == 0:  # more shards than columns: a shard without keys still has a width
        piece = torch.full_like(indices[..., :1], -1)
    return piece.contiguous()


def _explicit(indices: Tensor, lengths: Tensor | None, s_q: int) -> Tensor:
    if lengths is None:
        return indices
    topk = indices.shape[-1]
    flat = indices.reshape(-1, topk)
    per_token = lengths if lengths.numel() == flat.shape[0] else lengths.repeat_interleave(s_q)
    beyond = torch.arange(topk, device=indices.device)[None, :] >= per_token[:, None]
    return flat.masked_fill(beyond, -1).view(indices.shape)


def merge_shards(
    outs: Sequence[Tensor], lses: Sequence[Tensor], lse_base: Literal["e", "2"] = "e", sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the whole from shards out [..., h, d] and lse [..., h] in `lse_base` (lse comes back in that base).

    Shards are without sink; `sink` [h] (natural) joins the denominator once. Empty shards have lse -inf.
    """
    unit = 1.0 if lse_base == "e" else math.log(2.0)
    lse = torch.stack(list(lses)) * unit
    whole = torch.logsumexp(lse, dim=0)
    base = whole if sink is None else torch.logaddexp(whole, sink.to(whole.dtype).expand_as(whole))
    share = torch.exp(lse - base)
    share = torch.where(lse == float("-inf"), torch.zeros_like(share), share)
    return (share[..., None] * torch.stack(list(outs))).sum(0), whole / unit


def pad_heads(inputs: Inputs, heads: int) -> Inputs:
    """The same call with zero queries (and sink 0) in heads up to `heads`: what engines that pad send (B22)."""
    extra = heads - inputs.heads
    lead = inputs.q.shape[:-2]
    q = torch.cat([inputs.q, inputs.q.new_zeros(*lead, extra, inputs.d_qk)], dim=-2)
    sink = inputs.attn_sink
    return inputs.replace(q=q, attn_sink=None if sink is None else torch.cat([sink, sink.new_zeros(extra)]))


def pad_topk(inputs: Inputs, width: int, extra_width: int | None = None) -> Inputs:
    """The same call with -1 in index columns up to `width` (B12); the lengths stay."""

    def padded(indices: Tensor, to: int) -> Tensor:
        return torch.cat([indices, indices.new_full((*indices.shape[:-1], to - indices.shape[-1]), -1)], dim=-1)

    # without a length, positions of the pad count by value alone; with "over" lengths the pad is inside: -1 either way
    extra = inputs.extra_indices
    if extra is not None and extra_width is not None:
        extra = padded(extra, extra_width)
    return inputs.replace(indices=padded(inputs.indices, width), extra_indices=extra)
