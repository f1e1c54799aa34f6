"""The FlashMLA façade: signatures as published, results in its conventions, its scheduling object."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch

from kgen.runtime.compat.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from kgen.runtime.validate import Unsupported

from .conftest import FakeTree
from .samples import paged

BF16, I32 = torch.bfloat16, torch.int32

# FlashMLA @9241ae3, flash_mla/flash_mla_interface.py: positional order and defaults
PUBLISHED = {
    flash_mla_sparse_fwd: "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None",
    flash_mla_with_kvcache: (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, "
        "softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, "
        "extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None"
    ),
}


@pytest.mark.parametrize("function", PUBLISHED, ids=lambda function: function.__name__)
def test_signature_is_flash_mla_s(function: Any) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [p.replace(annotation=p.empty) for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert ", ".join(map(str, positional)) == PUBLISHED[function]
    added = [p for p in parameters if p.kind == p.KEYWORD_ONLY]
    assert {p.name for p in added} <= {"out", "kv_layout", "scale_range"} and all(p.default is None for p in added)


def test_scheduling_object_is_flash_mla_s() -> None:
    meta, none = get_mla_metadata(torch.zeros(2), 128, 1, num_heads_q=64)
    assert isinstance(meta, FlashMLASchedMeta) and none is None
    assert {f.name: getattr(meta, f.name) for f in dataclasses.fields(meta)} == {
        "have_initialized": False,
        "config": None,
        "tile_scheduler_metadata": None,
        "num_splits": None,
    }
    assert [f.name for f in dataclasses.fields(FlashMLASchedMeta.Config)] == [
        "b", "s_q", "h_q", "page_block_size", "h_k", "causal", "is_fp8_kvcache", "topk",
        "extra_page_block_size", "extra_topk",
    ]  # fmt: skip


def decode(layout: str = "v4", **changes: Any) -> dict[str, Any]:
    d_qk = 576 if layout == "v32" else 512
    return {
        "q": torch.zeros(2, 3, 8, d_qk, dtype=BF16),
        "k_cache": paged(layout),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "is_fp8_kvcache": True,
        "indices": torch.zeros(2, 3, 6, dtype=I32),
    } | changes


def test_prefill(tree: FakeTree) -> None:
    q, kv = torch.zeros(5, 8, 576, dtype=BF16), torch.zeros(12, 1, 576, dtype=BF16)
    sink, lengths = torch.zeros(8), torch.zeros(5, dtype=I32)
    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, torch.zeros(5, 1, 6, dtype=I32), 0.5, 512, sink, lengths)
    call = tree.launched[-1].call
    assert out is call.out and max_logits is call.max_logits and lse is call.lse
    assert (out.shape, max_logits.shape, lse.shape) == ((5, 8, 512), (5, 8), (5, 8))
    assert (call.layout.name, call.sm_scale) == ("bf16_d576", 0.5)
    assert call.attn_sink is sink and call.main.lengths is lengths and call.s_q == 1
    assert (call.lse_scale, call.empty_lse) == (1.0, math.inf)


@pytest.mark.parametrize(("layout", "d_qk"), [("v32", 576), ("v4", 512)])
def test_decode(tree: FakeTree, layout: str, d_qk: int) -> None:
    lengths = torch.zeros(2, dtype=I32)
    out, lse = flash_mla_with_kvcache(**decode(layout, topk_length=lengths))
    call = tree.launched[-1].call
    assert call.layout.name == layout and out is call.out and out.shape == (2, 3, 8, 512)
    assert lse.shape == (2, 8, 3) and call.lse is not None and lse.data_ptr() == call.lse.data_ptr()
    assert lse.stride() == (24, 1, 8)  # a view of [b, s_q, h]
    assert (call.lse_scale, call.empty_lse, call.max_logits) == (1.0, math.inf, None)
    assert call.sm_scale == pytest.approx(d_qk**-0.5) and call.s_q == 3 and call.main.lengths is lengths


def test_decode_with_two_caches_as_vllm_calls_it(tree: FakeTree) -> None:
    """q.unsqueeze(1): every token is its own batch row, so lengths are per token."""
    tokens, out = 4, torch.zeros(4, 1, 8, 512, dtype=BF16)
    given = decode(
        q=torch.zeros(tokens, 1, 8, 512, dtype=BF16),
        indices=torch.zeros(tokens, 1, 6, dtype=I32),
        topk_length=torch.zeros(tokens, dtype=I32),
        attn_sink=torch.zeros(8),
        extra_k_cache=paged("v4", page=2),
        extra_indices_in_kvcache=torch.zeros(tokens, 1, 3, dtype=I32),
        extra_topk_length=torch.zeros(tokens, dtype=I32),
        softmax_scale=0.25,
        out=out,
    )
    assert flash_mla_with_kvcache(**given)[0] is out
    call = tree.launched[-1].call
    assert call.extra is not None and call.extra.page == 2 and call.sm_scale == 0.25 and call.s_q == 1
    assert call.extra.lengths is given["extra_topk_length"] and call.attn_sink is given["attn_sink"]


def test_no_tokens(tree: FakeTree) -> None:
    given = decode(q=torch.zeros(0, 3, 8, 512, dtype=BF16), indices=torch.zeros(0, 3, 6, dtype=I32))
    out, lse = flash_mla_with_kvcache(**given)
    assert out.shape == (0, 3, 8, 512) and lse.shape == (0, 8, 3) and tree.launched == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"indices": None}, "indices is None, which asks for dense attention: only sparse attention is served"),
        ({"head_dim_v": 448}, "head_dim_v is 448: only 512 is served."),
        ({"tile_scheduler_metadata": None}, "tile_scheduler_metadata is a NoneType"),
        ({"num_splits": 1}, "num_splits is given: it must be None."),
        ({"causal": True}, "causal is True"),
        ({"is_fp8_kvcache": False}, "is_fp8_kvcache is False"),
        ({"k_cache": paged("v41_footer")}, "pass kv_layout='v41_footer' or kv_layout='v41_inline'."),
        ({"k_cache": torch.zeros(3, 4, 1, 288, dtype=torch.uint8)}, "k_cache has 288 bytes per token"),
        ({"q": torch.zeros(6, 8, 512, dtype=BF16)}, "q has shape [6, 8, 512]: pass [b, s_q, h_q, d_qk]."),
        ({"indices": torch.zeros(6, 6, dtype=I32)}, "indices has shape [6, 6]: pass [b, s_q, topk]."),
    ],
)
def test_refusals(tree: FakeTree, changes: dict[str, Any], sentence: str) -> None:
    given = decode(**changes)
    with pytest.raises(Unsupported) as raised:
        flash_mla_with_kvcache(**given)
    assert sentence in str(raised.value) and tree.launched == []
    meta = given["tile_scheduler_metadata"]
    assert meta is None or not meta.have_initialized  # a refused call leaves it as it was


def test_refused_d_v(tree: FakeTree) -> None:
    with pytest.raises(Unsupported, match="d_v is 576"):
        flash_mla_sparse_fwd(
            torch.zeros(5, 8, 576, dtype=BF16),
            torch.zeros(12, 1, 576, dtype=BF16),
            torch.zeros(5, 1, 6, dtype=I32),
            0.5,
            576,
        )


@pytest.mark.parametrize("layout", ["v41_footer", "v41_inline"])
def test_layout_by_name(tree: FakeTree, layout: str) -> None:
    from .samples import entry

    tree.set_table((entry(layout, heads=8),))
    flash_mla_with_kvcache(**decode(layout, kv_layout=layout))
    assert tree.launched[-1].call.layout.name == layout


def test_scheduling_object_is_checked_when_used_again(tree: FakeTree) -> None:
    meta = get_mla_metadata()[0]
    flash_mla_with_kvcache(**decode(tile_scheduler_metadata=meta, topk_length=torch.tensor([1, 2], dtype=I32)))
    assert meta.have_initialized
    assert meta.config == FlashMLASchedMeta.Config(2, 3, 8, 4, 1, False, True, 6, None, None)
    flash_mla_with_kvcache(**decode(tile_scheduler_metadata=meta, topk_length=torch.tensor([3, 4], dtype=I32)))
    with pytest.raises(Unsupported) as raised:
        flash_mla_with_kvcache(
            **decode(tile_scheduler_metadata=meta, k_cache=paged("v4", page=2), indices=torch.zeros(2, 3, 7, dtype=I32))
        )
    assert [reason.split(":")[0] for reason in raised.value.reasons] == [
        "tile_scheduler_metadata was first used with page_block_size = 4 and is now used with 2",
        "tile_scheduler_metadata was first used with topk = 6 and is now used with 7",
    ]
