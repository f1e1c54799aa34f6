"""Every bad input is a sentence that names it and says what would work (B12, B15, B17)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kgen.runtime.validate import Unsupported, build_call, refusals

from .samples import arguments, dual, paged

BF16, I32, F32 = torch.bfloat16, torch.int32, torch.float32


def zeros(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def q4(layout: str = "v4", **changes: Any) -> dict[str, Any]:
    """[b, s_q] = [2, 3]."""
    return arguments(layout, **({"q": zeros(2, 3, 8, 512), "indices": zeros(2, 3, 6, dtype=I32)} | changes))


CASES: dict[str, tuple[dict[str, Any], str]] = {
    # q
    "q list": (arguments(q=[1.0]), "q is a list: pass a torch.Tensor"),
    "q fp16": (arguments(q=zeros(5, 8, 512, dtype=torch.float16)), "q is float16: pass bfloat16"),
    "q rank 2": (arguments(q=zeros(5, 512)), r"q has shape [5, 512]: pass [T, heads, d_qk]"),
    "q no heads": (arguments(q=zeros(5, 0, 512)), "q has 0 heads: 1 to 128"),
    "q 129 heads": (arguments(q=zeros(5, 129, 512)), "q has 129 heads: 1 to 128"),
    "q d 96": (arguments(q=zeros(5, 8, 96)), "q has d_qk = 96: layout v4 has 512."),
    "q d 72": (arguments("bf16", q=zeros(5, 8, 72)), "q has d_qk = 72: layout bf16 has 512 or 576."),
    "q strided": (arguments(q=zeros(5, 8, 1024)[..., ::2]), "q has stride 2 in its last dimension"),
    "q glm no rope": (arguments("v32", q=zeros(5, 8, 512)), "GLM-5.3 without rope"),
    # layout words
    "near miss": (arguments(kv_layout="v4_footer"), "did you mean 'v41_footer'?"),
    "near miss case": (arguments(kv_layout="BF16"), "did you mean 'bf16'?"),
    "unknown word": (arguments(kv_layout="paged"), "kv_layout 'paged' is unknown; known layouts: bf16, v32, v4"),
    "no word": (arguments(kv_layout=None), "kv_layout is a NoneType: pass a string"),
    "fp4 word": (arguments(kv_layout="v41_fp4"), "FP4 caches are not built yet"),
    "nvfp4 word": (arguments(kv_layout="nvfp4_ds_mla"), "FP4 caches are not built yet"),
    "glm word": (arguments(kv_layout="glm53_nope"), "GLM-5.3 without rope"),
    "v41 ambiguous": (arguments(kv_layout="fp8_dsv41"), "say v41_footer or v41_inline"),
    "vllm word": (arguments(kv_layout="fp8_ds_mla"), "did you mean v32 (656-byte rows) or v4 (584-byte rows)?"),
    "axis order": (arguments(kv_layout="HND"), "is an order of axes"),
    # caches
    "kv fp32": (arguments(kv=paged("v4").float()), "kv is float32: layout v4 takes uint8, int8 or float8_e4m3fn"),
    "kv e5m2": (arguments(kv=paged("v4", dtype=torch.float8_e5m2)), "kv is float8_e5m2"),
    "kv rank 2": (arguments(kv=zeros(3, 584, dtype=torch.uint8)), "layout v4 takes [pages, page, 1, 584]"),
    "kv of v32": (arguments(kv=paged("v32")), "has 584 (656 is the size of v32)"),
    "kv 528": (arguments(kv=paged("v41_footer")), "the bytes do not tell which"),
    "kv fp4 bytes": (arguments(kv=zeros(3, 4, 1, 288, dtype=torch.uint8)), "288 is the size of an FP4 record"),
    "two kv heads": (arguments(kv=zeros(3, 4, 2, 584, dtype=torch.uint8)), "kv has h_kv = 2: sparse MLA has one"),
    "hnd": (arguments(kv=zeros(3, 1, 4, 584, dtype=torch.uint8)), "pass kv.transpose(1, 2)"),
    "page of 0": (arguments(kv=zeros(3, 0, 1, 584, dtype=torch.uint8)), "pages of 0 tokens"),
    "page of 2 GiB": (
        arguments(kv=zeros(3, 1, 1, 584, dtype=torch.uint8).expand(3, 3_677_199, 1, 584)),  # 2^31 + 568 bytes
        "kv has pages of 2147484216 bytes: pass it as smaller pages, each of less than 2 GiB.",
    ),
    "token stride": (
        arguments(kv=zeros(3, 4, 1, 600, dtype=torch.uint8)[..., :584]),
        "kv has stride 600 from token to token: layout v4 needs stride(1) == 584.",
    ),
    "kv bytes apart": (arguments(kv=zeros(3, 4, 1, 1168, dtype=torch.uint8)[..., ::2]), "kv has stride 2 in its last"),
    "expanded pages": (arguments(kv=paged("v4", pages=1).expand(3, 4, 1, 584)), "kv has a page stride of 0 bytes"),
    "misaligned page stride": (
        arguments("v32", kv=zeros(8000, dtype=torch.uint8).as_strided((2, 4, 1, 656), (2626, 656, 656, 1))),
        "kv is not aligned: layout v32 needs start and page stride to be multiples of 4 bytes.",
    ),
    "misaligned start": (
        arguments(kv=zeros(8000, dtype=torch.uint8)[1:].as_strided((1, 4, 1, 584), (2336, 584, 584, 1), 1)),
        "multiples of 2 bytes",
    ),
    "flat rank 4": (arguments("bf16", kv=zeros(3, 4, 1, 512)), "view a paged bf16 cache as rows: kv.view(-1, 512)"),
    "flat width": (arguments("bf16", kv=zeros(3, 576)), "layout bf16 takes [slots, 512]"),
    "flat fp8": (arguments("bf16", kv=zeros(3, 512, dtype=torch.uint8)), "kv is uint8: layout bf16 takes bfloat16"),
    "flat two heads": (arguments("bf16", kv=zeros(3, 2, 512)), "kv has h_kv = 2"),
    "flat expanded": (arguments("bf16", kv=zeros(1, 512).expand(3, 512)), "row stride of 0 elements"),
    "flat strided": (arguments("bf16", kv=zeros(3, 1024)[:, ::2]), "kv has stride 2 in its last dimension"),
    # indices
    "int64 indices": (arguments(indices=zeros(5, 6, dtype=torch.int64)), "indices is int64: pass int32"),
    "indices rows": (arguments(indices=zeros(4, 6, dtype=I32)), "indices has shape [4, 6]: pass [5, topk]"),
    "indices rows of 4-D q": (q4(indices=zeros(3, 2, 6, dtype=I32)), "or [b, s_q, topk] = [2, 3, topk]"),
    "topk 0": (arguments(indices=zeros(5, 0, dtype=I32)), "indices is 0 wide: pass a topk of at least 1"),
    "indices strided": (arguments(indices=zeros(5, 12, dtype=I32)[:, ::2]), "indices has stride 2"),
    # lengths
    "length dtype": (arguments(topk_length=zeros(5, dtype=torch.int64)), "topk_length is int64: pass int32"),
    "length shape": (arguments(topk_length=zeros(4, dtype=I32)), "topk_length has shape [4]: pass [5]."),
    "length rank": (arguments(topk_length=zeros(5, 1, dtype=I32)), "topk_length has shape [5, 1]"),
    "length shape 4-D": (
        q4(topk_length=zeros(5, dtype=I32)),
        "pass [2] (one per batch row) or [6] (one per token)",
    ),
    "length strided": (arguments(topk_length=zeros(10, dtype=I32)[::2]), "topk_length has stride 2: make it"),
    "length expanded": (arguments(topk_length=zeros(1, dtype=I32).expand(5)), "topk_length has stride 0"),
    "q does not collapse": (
        q4(q=zeros(2, 4, 8, 512)[:, :3], topk_length=zeros(6, dtype=I32)),
        "Lengths per token need q with one token stride",
    ),
    "indices do not collapse": (
        q4(indices=zeros(2, 4, 6, dtype=I32)[:, :3], topk_length=zeros(6, dtype=I32)),
        "Lengths per token need indices with one token stride",
    ),
    # sink, scalars
    "sink bf16": (arguments(attn_sink=zeros(8)), "attn_sink is bfloat16: pass float32"),
    "sink shape": (arguments(attn_sink=zeros(1, dtype=F32)), "attn_sink has shape [1]: pass [8]"),
    "sink strided": (arguments(attn_sink=zeros(16, dtype=F32)[::2]), "attn_sink has stride 2"),
    "scale tensor": (arguments(sm_scale=torch.tensor(1.0)), "sm_scale is a Tensor: pass a Python float"),
    "scale nan": (arguments(sm_scale=float("nan")), "sm_scale is nan: pass a finite number"),
    "lse base": (arguments(lse_base="10"), "lse_base is '10'"),
    # out, lse
    "out fp32": (arguments(out=zeros(5, 8, 512, dtype=F32)), "out is float32: pass bfloat16"),
    "out d_v": (arguments(out=zeros(5, 8, 448)), "out has shape [5, 8, 448]: pass [5, 8, 512] (d_v is 512)"),
    "out strided": (arguments(out=zeros(5, 8, 1024)[..., ::2]), "out has stride 2"),
    "out expanded": (arguments(out=zeros(1, 8, 512).expand(5, 8, 512)), "so its rows overlap"),
    "lse bf16": (arguments(lse=zeros(5, 8)), "lse is bfloat16: pass float32"),
    "lse shape": (arguments(lse=zeros(8, 5, dtype=F32)), "lse has shape [8, 5]: pass [5, 8]"),
    "lse expanded": (arguments(lse=zeros(5, 1, dtype=F32).expand(5, 8)), "lse has strides [1, 0]"),
    # two caches
    "extra half": (arguments(extra_kv=paged("v4")), "extra_kv is given without extra_indices"),
    "extra other half": (arguments(extra_indices=zeros(5, 3, dtype=I32)), "extra_indices is given without extra_kv"),
    "extra length alone": (arguments(extra_topk_length=zeros(5, dtype=I32)), "extra_topk_length is given without"),
    "extra of v32": (
        arguments("v32", extra_kv=paged("v32"), extra_indices=zeros(5, 3, dtype=I32)),
        "Layout v32 has no second cache",
    ),
    "extra of bf16": (
        arguments("bf16", extra_kv=zeros(3, 512), extra_indices=zeros(5, 3, dtype=I32)),
        "Layout bf16 has no second cache",
    ),
    "extra of another layout": (dual(extra_kv=paged("v32")), "extra_kv has 656 bytes per token: layout v4 has 584"),
    "extra indices rows": (dual(extra_indices=zeros(4, 3, dtype=I32)), "extra_indices has shape [4, 3]"),
    "extra topk 0": (dual(extra_indices=zeros(5, 0, dtype=I32)), "extra_indices is 0 wide"),
    "extra length shape": (dual(extra_topk_length=zeros(4, dtype=I32)), "extra_topk_length has shape [4]"),
    "lengths of two forms": (
        q4(
            topk_length=zeros(2, dtype=I32),
            extra_kv=paged("v4"),
            extra_indices=zeros(2, 3, 3, dtype=I32),
            extra_topk_length=zeros(6, dtype=I32),
        ),
        "must both have one entry per batch row or both one per token",
    ),
    # devices
    "mixed devices": (arguments(kv=paged("v4").to("meta")), "kv is on meta and q on cpu: put every tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_bad_input_is_one_sentence(case: str) -> None:
    given, sentence = CASES[case]
    reasons = refusals(**given)
    assert any(sentence in reason for reason in reasons), reasons
    assert all(reason.endswith(".") or reason.endswith("?") for reason in reasons), reasons
    with pytest.raises(Unsupported) as raised:
        build_call(**given)
    assert raised.value.reasons == reasons
    assert all(reason in str(raised.value) for reason in reasons)


ONLY_ONE = [case for case in CASES if case not in ("kv bytes apart", "expanded pages")]


@pytest.mark.parametrize("case", ONLY_ONE)
def test_one_fault_gives_one_reason(case: str) -> None:
    assert len(refusals(**CASES[case][0])) == 1, refusals(**CASES[case][0])


def test_every_fault_is_reported_at_once() -> None:
    given = arguments(
        q=zeros(5, 8, 512, dtype=F32),
        indices=zeros(5, 6, dtype=torch.int64),
        attn_sink=zeros(3),
        sm_scale=float("inf"),
        topk_length=zeros(2, dtype=I32),
    )
    assert len(refusals(**given)) == 6  # two of them about the sink


def test_an_output_that_is_an_input_is_refused() -> None:
    q = zeros(5, 8, 512)
    assert "out overlaps an input" in refusals(**arguments(q=q, out=q))[0]
    buffer = zeros(7, 8, 512)
    assert "out overlaps an input" in refusals(**arguments(q=buffer[:5], out=buffer[1:6]))[0]
    kv = zeros(40, 512)
    assert "out overlaps an input" in refusals(**arguments("bf16", kv=kv, out=kv.view(5, 8, 512)))[0]
    assert refusals(**arguments(q=zeros(10, 8, 512)[:5], out=zeros(10, 8, 512)[5:])) == []


def test_slices_of_one_buffer_are_not_an_overlap() -> None:
    buffer = zeros(5, 8, 1024)
    assert refusals(**arguments(q=buffer[..., :512], out=buffer[..., 512:])) == []
