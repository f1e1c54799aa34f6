"""A broken kernel must fail on its output: text of the rendered module is replaced, and the comparison has to see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.check import CaseSpec

from .running import CHUNK, broken, candidate, report

BASE = CaseSpec(layout="v4", heads=16, topk=64, page=61, slots=300, tokens=2, sink="near", index="clean")
V32 = CaseSpec(layout="v32", heads=16, topk=64, page=61, slots=300, tokens=2, sink="near", index="clean")
SWAP = (
    ("scale0 = load_scale(scale_row, valid, 0)", "scale0 = load_scale(scale_row, valid, 9)"),
    ("scale1 = load_scale(scale_row, valid, 1)", "scale1 = load_scale(scale_row, valid, 0)"),
    ("scale0 = load_scale(scale_row, valid, 9)", "scale0 = load_scale(scale_row, valid, 1)"),
)
BROKEN = {
    "last_key_dropped": (BASE, (("mask=pos < bound, other=-1", "mask=pos < bound - 1, other=-1"),)),
    "sink_ignored": (BASE, (("(has_sink != 0)", "(has_sink < 0)"),)),
    "page_stride_ignored": (
        CaseSpec(layout="v32", heads=16, topk=64, page=61, slots=300, tokens=2, page_gap=64, poison=False),
        (("page_id.to(tl.int64) * page_stride", "page_id.to(tl.int64) * (rows_per_page * ROW_BYTES)"),),
    ),
    "length_plus_1": (
        CaseSpec(layout="v4", heads=16, topk=64, page=61, slots=300, tokens=2, index="clean", poison=False),
        (
            (
                "length = tl.minimum(tl.maximum(length, 0), width)",
                "length = tl.minimum(tl.maximum(length, 0), width) + 1",
            ),
        ),
    ),
    "scale_groups_swapped_v4": (BASE, SWAP),
    "scale_groups_swapped_v32": (V32, SWAP),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_fails_on_its_output(name: str, tmp_path: Path) -> None:
    spec, changes = BROKEN[name]
    chosen = candidate(spec.layout)
    module = broken(spec.layout, CHUNK.get(spec.layout, 128), tmp_path, *changes)
    good = report(chosen, spec)
    assert good.ok, good.sentence
    assert not report(chosen, spec, module)["out"].ok
