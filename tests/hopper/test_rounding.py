"""A key that dominates its row has a P of exactly 1 where P is rounded to bf16, wherever it comes, though the maximum is lazy."""

from __future__ import annotations

import math

import pytest
import torch

from kgen.check import Inputs
from kgen.check.gluon_model import run_module
from kgen.check.pack import pack_paged
from kgen.runtime.launch import attention_args, item_counter
from kgen.runtime.layouts import LAYOUTS

from .forms import FORMS, exact_scales
from .running import Form, bound_call, parts_of

WS = [form for form in FORMS["bf16_d512"] if form.family == "sm90_ws"]
FP8 = [
    (layout, form)
    for layout in ("v32", "v4")
    for form in FORMS[layout]
    if form.family in ("sm90_ws_fp8", "sm90_pair_fp8", "sm90_rs_fp8")
]
FIRST_FP8 = {(layout, form.family): form for layout, form in reversed(FP8)}
GROWTH = 7 + math.log2(1 + 1 / 256)  # less than the slack of 8; a P of 2^GROWTH is as far from a bf16 as can be
PLACES = (5, 64 + 5, 128 + 5, 192 + 5)  # tile 0 and 1 of the first pair, and of the second
SHARES = {"sm90_rs_fp8": "before + rough_log2(l) - {:.1f}"}
"""How the text of a family says how much of a row's sum a key must have, where it is not this:"""
SHARE = "SHARE = gl.constexpr({})"


def first_parts(form: Form, layout: str, text: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 rows of the split that has the keys, what they should be): a small key in both tiles of the first pair, and a
    dominant one at each place. The logit and the largest values are in the last 64 dims, which are bf16 in every layout."""
    d = LAYOUTS[layout].d_qk
    kv = torch.zeros(4, d)
    kv[1, 300] = 1.0  # its logit is 0
    kv[2, -64:-61] = torch.tensor([7.0, GROWTH - 7, 0.5])
    kv[2, 100] = 7.0
    kv[2, 400] = 1.0
    kv[2] = kv[2].bfloat16()
    q = torch.zeros(len(PLACES), 20, d)
    q[..., -64:-62] = 1.0
    indices = torch.full((len(PLACES), 512), -1, dtype=torch.int32)
    indices[:, (0, 64)] = 1
    for token, place in enumerate(PLACES):
        indices[token, place] = 2
    fp8 = LAYOUTS[layout].fp8
    cache = pack_paged(kv, layout, 2) if fp8 else kv.bfloat16()
    call, _ = bound_call(Inputs(q.bfloat16(), cache, indices, math.log(2), layout if fp8 else "bf16"))
    parts = parts_of(call, 2)
    plan = form.plan(call, 2, exact=True)
    args = attention_args(call, parts, plan, item_counter(call, plan))
    run_module(text or form.text(layout), plan.constants, args, form.grid(call, 2, 3))
    logit = kv[2, -64:-62].double().sum()
    small = 2 / (2 + torch.exp2(logit))
    return parts[0].view(len(PLACES), 2, 20, 512)[:, 0], (kv[1] * small + kv[2].double() * (1 - small))[:512]


def with_share(form: Form, layout: str, share: int) -> str:
    text = form.text(layout)
    said = SHARES.get(form.family, SHARE)
    assert text.count(said.format(1)) == 1
    return text.replace(said.format(1), said.format(share))


@pytest.mark.parametrize("form", WS, ids=str)
def test_a_dominant_key_is_not_rounded(form: Form) -> None:
    rows, truth = first_parts(form, "bf16_d512")
    assert (rows - truth).abs().max() < 1e-5


def test_growth_alone_would_round_it() -> None:
    """What the share is for: without it the key's P is off by 2^-8 in the second pair, and the row's 7 by 0.027."""
    rows, truth = first_parts(WS[0].replace(share=-100), "bf16_d512")
    assert ((rows - truth).abs().amax((1, 2))[2:] > 0.02).all()


def test_the_first_sum_saves_a_rescale() -> None:
    """A key of the first tile 1 that grew, but is no half of the left group's sum, moves the maximum only where that sum is not
    known: then its P is 1, else 2^3, with a mantissa that bf16 rounds."""
    growth = math.log2(8 * (1 + 1 / 256))
    kv = torch.zeros(4, 512)
    kv[2, -64:-61] = torch.tensor([2.0, growth - 2, 0.5])
    kv[2, 100] = 7.0
    kv = kv.bfloat16()
    q = torch.zeros(1, 20, 512)
    q[..., -64:-62] = 1.0
    indices = torch.ones(1, 128, dtype=torch.int32)
    indices[0, 69] = 2
    logit = kv[2, -64:-62].double().sum()
    share = torch.exp2(logit) / (127 + torch.exp2(logit))
    errors = []
    for first_sum in (False, True):
        form = WS[0].replace(first_sum=first_sum)
        call, _ = bound_call(Inputs(q.bfloat16(), kv, indices, math.log(2), "bf16"))
        parts = parts_of(call, 2)
        plan = form.plan(call, 2, exact=True)
        args = attention_args(call, parts, plan, item_counter(call, plan))
        run_module(form.text("bf16_d512"), plan.constants, args, form.grid(call, 2, 1))
        errors.append(float((parts[0].view(2, 20, 512)[0, :, 100] - 7 * share).abs().max()))
    rounded = abs(float(torch.exp2(logit).bfloat16() - torch.exp2(logit))) / 135 * 7
    assert errors[0] < 1e-6 and rounded / 2 < errors[1] < 2 * rounded


@pytest.mark.parametrize(("layout", "form"), FP8, ids=lambda part: getattr(part, "family", part))
def test_a_dominant_key_of_fp8_is_not_rounded(layout: str, form: Form) -> None:
    """P is fp16 alone in v32 with fp16 latents, and in sm90_rs_fp8, whose rope values are fp16 then, too: rounded, but by no more
    than 2^-11."""
    rows, truth = first_parts(form, layout)
    alone = dict(form.tunables)["latent"] == "fp16" and (layout == "v32" or form.family == "sm90_rs_fp8")
    assert (rows - truth).abs().max() < (7 * 2**-11 if alone else 1e-5)


@pytest.mark.parametrize("latent", ["bf16", "fp16"])
@pytest.mark.parametrize(("layout", "family"), sorted(FIRST_FP8))
def test_growth_alone_would_round_it_in_fp8(layout: str, family: str, latent: str) -> None:
    """Without the share, P is off where it is bf16: for bf16 latents, and for the rope dims of v4, which are values, where these
    stay bf16."""
    form = FIRST_FP8[layout, family]
    form = exact_scales(form) if latent == "bf16" else form.replace(latent=latent)
    rows, truth = first_parts(form, layout, with_share(form, layout, -100))
    error = (rows - truth).abs().amax(1)[2:]
    fp16_alone = latent == "fp16" and family == "sm90_rs_fp8"
    for dim, rounded in ((100, latent == "bf16"), (448, layout == "v4" and not fp16_alone)):
        assert ((error[:, dim] > 0.02) if rounded else (error[:, dim] < 7 * 2**-11)).all()


@pytest.mark.parametrize(
    ("layout", "family"),
    [("v32", "sm90_ws_fp8"), ("v32", "sm90_pair_fp8"), ("v32", "sm90_rs_fp8"), ("v4", "sm90_rs_fp8")],
)
def test_fp16_alone_has_no_share(layout: str, family: str) -> None:
    """Where no P is bf16 the rule is not there: a share that any growth exceeds changes no bit."""
    form = FIRST_FP8[layout, family].replace(latent="fp16")
    rows, _ = first_parts(form, layout)
    assert torch.equal(rows, first_parts(form, layout, with_share(form, layout, 100))[0])
