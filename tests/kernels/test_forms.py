"""Every layout in every form: orientation, place of the scales, number of splits, constants or run-time shapes."""

from __future__ import annotations

import itertools

import pytest

from kgen.check import CaseSpec
from kgen.runtime.layouts import DUAL_LAYOUTS, LAYOUTS

from .running import CHUNK, candidate, check

SITES = [(layout, site) for layout in LAYOUTS for site in ("operand", "score") if site == "operand" or layout in CHUNK]


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize(("layout", "site"), SITES)
def test_every_form_is_right(layout: str, site: str, swap_ab: bool, splits: int) -> None:
    for specialise in (False, True):
        dual = layout in DUAL_LAYOUTS and specialise == swap_ab
        chunk = CHUNK.get(layout, (64, 128, 256)[(splits + swap_ab) % 3])
        chosen = candidate(
            layout, block_k=16, swap_ab=swap_ab, scale_site=site, splits=splits, specialise=specialise, chunk=chunk,
            prefetch=splits != 3,
        )  # fmt: skip
        second = {"extra_topk": 20, "extra_page": 2, "extra_slots": 90} if dual else {}
        width = 116 if splits == 8 else 52  # blocks of 16 keys: as many as splits, or one more
        page = 61 if LAYOUTS[layout].paged else 0
        check(
            chosen,
            CaseSpec(
                layout=layout, heads=11, topk=width - 20 * dual, page=page, slots=200, tokens=1, sink="near",
                lengths="half", **second,
            ),
        )  # fmt: skip


@pytest.mark.parametrize(("block_h", "block_k"), list(itertools.product((16, 32, 64), (16, 32, 128))))
def test_blocks(block_h: int, block_k: int) -> None:
    layout = tuple(LAYOUTS)[(block_h + block_k) // 16 % len(LAYOUTS)]
    check(candidate(layout, block_h=block_h, block_k=block_k), CaseSpec(layout=layout, heads=24, topk=100, tokens=1))


def test_parts_in_bf16_stay_within_four_times_the_bound() -> None:
    from .running import report

    chosen = candidate("bf16_d576", block_k=16, splits=8, partial="bf16")
    found = report(chosen, CaseSpec(heads=8, topk=100, tokens=1))
    assert found["out"].needed_abs <= 4 * 8e-4 and found["lse"].ok and found["max_logits"].ok
