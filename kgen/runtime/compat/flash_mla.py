"""FlashMLA's sparse interface (deepseek-ai/FlashMLA, `flash_mla/flash_mla_interface.py` @9241ae3) over `sparse_mla`.

    from generated.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Names, order of arguments, defaults and results are FlashMLA's: natural-logarithm lse without the sink, +inf for a row
without a valid key, and max_logits -inf there. More is served than there: any head count from 1 to 128, any topk and
page size, no tokens at all, lengths with V32, lengths per token. Less: dense attention is refused. `out` and
`kv_layout` are additions.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from ..dispatch import execute
from ..layouts import D_V
from ..validate import Unsupported, build_call

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

_LAYOUT_OF_BYTES = {656: "v32", 584: "v4"}


@dataclasses.dataclass
class FlashMLASchedMeta:
    """FlashMLA's scheduling object. Nothing is scheduled here; its first call's shapes are kept and checked later."""

    @dataclasses.dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """An empty scheduling object and None. Arguments are those of FlashMLA's old interface, and are not used."""
    return FlashMLASchedMeta(), None


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prefill over bf16 rows: (out [s_q, h_q, 512] bf16, max_logits [s_q, h_q] fp32, lse [s_q, h_q] fp32).

    q [s_q, h_q, 576 or 512] bf16, kv [s_kv, 1, d_qk] bf16, indices [s_q, 1, topk] int32 (invalid: < 0 or >= s_kv),
    attn_sink [h_q] fp32, topk_length [s_q] int32. `out`, an addition, is written in place. Raises `Unsupported`.
    """
    if d_v != D_V:
        raise Unsupported([f"d_v is {d_v}: only {D_V} is served."])
    call = build_call(
        q,
        kv,
        indices,
        sm_scale=sm_scale,
        kv_layout="bf16",
        topk_length=topk_length,
        attn_sink=attn_sink,
        out=out,
        return_lse=True,
        return_max_logits=True,
        empty_lse=math.inf,
    )
    execute(call)
    assert call.max_logits is not None and call.lse is not None, "build_call was asked for both"
    return call.out, call.max_logits, call.lse


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    kv_layout: str | None = None,
    scale_range: tuple[float, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decode over a paged fp8 cache: (out [b, s_q, h_q, 512] bf16, lse [b, h_q, s_q] fp32, a transposed view).

    q [b, s_q, h_q, d_qk] bf16; k_cache [pages, page, 1, 656 (V32) or 584 (V4)] fp8, int8 or uint8, any page stride;
    indices [b, s_q, topk] int32, page number * page + position (invalid: < 0 or past the last page); topk_length [b]
    int32, broadcast over s_q; the extra cache likewise (V4). softmax_scale defaults to d_qk ** -0.5. block_table and
    cache_seqlens are not used by sparse attention. The scheduling object's shapes are checked when it is used again,
    lengths are not.

    Additions: `out` is written in place; `kv_layout` names the layout (v32, v4, v41_footer, v41_inline) instead of the
    width of the cache, which does not tell where a 528-byte V4.1 record keeps its scales; `scale_range` is the caller's
    promise about group scales, as in `dispatch.sparse_mla`. Raises `Unsupported`.
    """
    reasons = _mode_reasons(head_dim_v, tile_scheduler_metadata, num_splits, causal, is_fp8_kvcache, indices)
    if reasons or indices is None:
        raise Unsupported(reasons)
    config = _config_of(q, k_cache, causal, is_fp8_kvcache, indices, extra_k_cache, extra_indices_in_kvcache)
    if tile_scheduler_metadata.have_initialized:
        _check_reuse(tile_scheduler_metadata.config, config)
    call = build_call(
        q,
        k_cache,
        indices,
        sm_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        kv_layout=_layout_word(k_cache) if kv_layout is None else kv_layout,
        topk_length=topk_length,
        attn_sink=attn_sink,
        extra_kv=extra_k_cache,
        extra_indices=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
        out=out,
        return_lse=True,
        empty_lse=math.inf,
        scale_range=scale_range,
    )
    execute(call)
    tile_scheduler_metadata.have_initialized = True
    tile_scheduler_metadata.config = config
    assert call.lse is not None, "build_call was asked for it"
    return call.out, call.lse.transpose(1, 2)


def _mode_reasons(
    head_dim_v: int, meta: object, num_splits: object, causal: bool, is_fp8_kvcache: bool, indices: torch.Tensor | None
) -> list[str]:
    if indices is None:
        return [
            "indices is None, which asks for dense attention: only sparse attention is served; use FlashMLA for dense."
        ]
    reasons = []
    if head_dim_v != D_V:
        reasons.append(f"head_dim_v is {head_dim_v}: only {D_V} is served.")
    if not isinstance(meta, FlashMLASchedMeta):
        reasons.append(
            f"tile_scheduler_metadata is a {type(meta).__name__}: pass what this module's get_mla_metadata() returns."
        )
    if num_splits is not None:
        reasons.append("num_splits is given: it must be None.")
    if causal:
        reasons.append("causal is True: causality of sparse attention lies in the indices; pass False.")
    if not is_fp8_kvcache:
        reasons.append("is_fp8_kvcache is False: paged caches are fp8; for bf16 rows use flash_mla_sparse_fwd.")
    return reasons


def _layout_word(k_cache: torch.Tensor) -> str:
    """FlashMLA's rule: the last dimension names the layout. Raises `Unsupported` where it does not."""
    width = k_cache.shape[-1] if k_cache.ndim else 0
    word = _LAYOUT_OF_BYTES.get(width)
    if word is not None:
        return word
    if width == 528:
        raise Unsupported(
            [
                "k_cache has 528 bytes per token, which does not tell where a V4.1 record keeps its scales (page "
                "footer or inline): pass kv_layout='v41_footer' or kv_layout='v41_inline'."
            ]
        )
    raise Unsupported([f"k_cache has {width} bytes per token: V32 has 656 and V4 has 584."])


def _config_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    causal: bool,
    is_fp8_kvcache: bool,
    indices: torch.Tensor,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
) -> FlashMLASchedMeta.Config:
    reasons = [
        f"{name} has shape {list(tensor.shape)}: pass {form}."
        for name, tensor, ranks, form in (
            ("q", q, (4,), "[b, s_q, h_q, d_qk]"),
            ("k_cache", k_cache, (3, 4), "[pages, page, 1, bytes]"),
            ("extra_k_cache", extra_k_cache, (3, 4), "[pages, page, 1, bytes]"),
            ("indices", indices, (3,), "[b, s_q, topk]"),
            ("extra_indices_in_kvcache", extra_indices, (3,), "[b, s_q, topk]"),
        )
        if tensor is not None and tensor.ndim not in ranks
    ]
    if reasons:
        raise Unsupported(reasons)
    return FlashMLASchedMeta.Config(
        b=q.shape[0],
        s_q=q.shape[1],
        h_q=q.shape[2],
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2] if k_cache.ndim == 4 else 1,
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        topk=indices.shape[-1],
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_indices is None else extra_indices.shape[-1],
    )


def _check_reuse(first: FlashMLASchedMeta.Config | None, now: FlashMLASchedMeta.Config) -> None:
    if first is None or first == now:
        return
    reasons = [
        f"tile_scheduler_metadata was first used with {field.name} = {getattr(first, field.name)} and is now used with "
        f"{getattr(now, field.name)}: get a new one from get_mla_metadata()."
        for field in dataclasses.fields(now)
        if getattr(first, field.name) != getattr(now, field.name)
    ]
    raise Unsupported(reasons)
