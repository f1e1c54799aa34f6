"""A key that dominates its row has a P of exactly 1, wherever it comes, though the maximum is lazy."""

from __future__ import annotations

import math

import pytest
import torch

from kgen.check import Inputs
from kgen.check.gluon_model import run_module
from kgen.runtime.launch import attention_args, item_counter

from .forms import FORMS
from .running import Form, bound_call, parts_of

WS = [form for form in FORMS["bf16_d512"] if form.family == "sm90_ws"]
GROWTH = 7 + math.log2(1 + 1 / 256)  # less than the slack of 8; a P of 2^GROWTH is as far from a bf16 as can be
PLACES = (5, 64 + 5, 128 + 5, 192 + 5)  # tile 0 and 1 of the first pair, and of the second


def first_parts(form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 rows of the split that has the keys, what they should be): a small key in both tiles of the first pair, and a
    dominant one at each place."""
    kv = torch.zeros(4, 512)
    kv[1, 300] = 1.0  # its logit is 0
    kv[2, :3] = torch.tensor([7.0, GROWTH - 7, 0.5])
    kv[2, 400] = 1.0
    kv = kv.bfloat16()
    q = torch.zeros(len(PLACES), 20, 512)
    q[..., :2] = 1.0
    indices = torch.full((len(PLACES), 512), -1, dtype=torch.int32)
    indices[:, (0, 64)] = 1
    for token, place in enumerate(PLACES):
        indices[token, place] = 2
    call, _ = bound_call(Inputs(q.bfloat16(), kv, indices, math.log(2), "bf16"))
    parts = parts_of(call, 2)
    plan = form.plan(call, 2, exact=True)
    args = attention_args(call, parts, plan, item_counter(call, plan))
    run_module(form.text("bf16_d512"), plan.constants, args, form.grid(call, 2, 3))
    logit = kv[2, :2].double().sum()
    small = 2 / (2 + torch.exp2(logit))
    return parts[0].view(len(PLACES), 2, 20, 512)[:, 0], kv[1].double() * small + kv[2].double() * (1 - small)


@pytest.mark.parametrize("form", WS, ids=str)
def test_a_dominant_key_is_not_rounded(form: Form) -> None:
    rows, truth = first_parts(form)
    assert (rows - truth).abs().max() < 1e-5


def test_growth_alone_would_round_it() -> None:
    """What the share is for: without it the key's P is off by 2^-8 in the second pair, and the row's 7 by 0.027."""
    rows, truth = first_parts(WS[0].replace(share=-100))
    assert ((rows - truth).abs().amax((1, 2))[2:] > 0.02).all()
