"""The forms in which the Hopper families are tested: every choice of a template that changes its code, at least once."""

from __future__ import annotations

import pytest

from .running import Form

WS = Form.make(
    "sm90_ws", block_h=64, latent="bf16", persistent=True, prefetch_l2=True, qk_first=True, slack=8, fence=True,
    r_right=216, r_producer=72,
)  # fmt: skip
WS_FP8 = Form.make(
    "sm90_ws_fp8", block_h=64, latent="fp16", persistent=True, nw=4, rp=32, r_value=224, r_prod=128, n_value=256, slack=8,
    prefetch=True,
)  # fmt: skip
FEW = Form.make(
    "sm90_few", block_h=16, latent="fp16", persistent=True, consumers=2, stages=2, producers=4, rows=32, prefetch_l2=True,
)  # fmt: skip
FEW_BF16 = FEW.replace(latent="bf16")

FORMS: dict[str, tuple[Form, ...]] = {
    "bf16_d576": (
        WS,
        WS.replace(persistent=False, prefetch_l2=False, qk_first=False, slack=0, fence=False),
        FEW_BF16,
        FEW_BF16.replace(block_h=32, persistent=False, consumers=1, stages=2),
    ),
    "v32": (
        WS_FP8,
        WS_FP8.replace(persistent=False, latent="bf16", nw=8, slack=0, prefetch=False),
        FEW,
        FEW.replace(block_h=32, persistent=False, latent="bf16", consumers=1, stages=2, rows=16),
    ),
}
FORMS["bf16_d512"] = FORMS["bf16_d576"]
FORMS["v4"] = FORMS["v32"]
"""By layout. The first form of each family is its usual one."""


def usual(layout: str) -> tuple[Form, ...]:
    """One form of each family that reads the layout."""
    return tuple({form.family: form for form in reversed(FORMS[layout])}.values())


def exact_scales(form: Form) -> Form:
    """The same form, right for every scale."""
    return form.replace(latent="bf16")


USUAL = [pytest.param(layout, form, id=f"{layout}-{form.family}") for layout in FORMS for form in usual(layout)]
"""Parameters of a test: a layout and a form."""
