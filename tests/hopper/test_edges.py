"""Edges of validity on the CPU model, and proof that its comparison sees faults."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kgen.check import CaseSpec
from kgen.check.gluon_model import ModelError

from .forms import USUAL
from .running import Form, check, few_heads, report

EDGES: dict[str, dict[str, Any]] = {
    "nothing valid": {"index": "all_invalid", "lengths": "none", "sink": "near"},
    "lengths of zero": {"lengths": "zero", "sink": "near"},
    "some lengths negative": {"lengths": "negative", "sink": "none"},
    "lengths beyond topk": {"lengths": "over", "index": "some_empty", "sink": "mixed"},
    "first tile masked": {"index": "leading", "index_at": 64, "lengths": "none", "sink": "plus5"},
    "every other tile masked": {"index": "alternating", "index_at": 64, "lengths": "none", "sink": "none"},
    "one key, in the second tile": {"index": "single", "index_at": 100, "lengths": "none", "sink": "near"},
    "the last key alone": {"index": "single", "index_at": 139, "lengths": "full", "sink": "minus_inf"},
    "one key in all": {"lengths": "one", "index": "clean", "sink": "plus_inf"},
    "the same keys again": {"index": "duplicates", "lengths": "none", "sink": "near"},
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("layout", "form"), USUAL)
def test_edges(layout: str, form: Form, edge: str) -> None:
    seed = list(EDGES).index(edge)
    spec = CaseSpec(layout=layout, heads=few_heads(form), topk=140, tokens=2, seed=seed, **EDGES[edge])
    check(form, spec, splits=1 + seed % 2 * 2, seed=seed)


BROKEN = {
    "a length too long by one": (r"gl\.maximum\(length, 0\)", "gl.maximum(length + 1, 0)"),
    "exponentials a little off": (r"(?<!def )exp2\(", "exp2(1.01 * "),  # gl.exp2, or a template's own
    "accumulators read too early": (r"warpgroup_mma_wait\(0", "warpgroup_mma_wait(1"),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize(("layout", "form"), USUAL)
def test_faults_are_seen(layout: str, form: Form, fault: str) -> None:
    text = form.text(layout)
    old, new = BROKEN[fault]
    assert re.search(old, text), f"{form.family} no longer says {old!r}"
    spec = CaseSpec(layout=layout, heads=few_heads(form), topk=70, tokens=2, lengths="half", index="clean")
    try:
        found = report(form, spec, text=re.sub(old, new, text))
    except ModelError:
        return
    assert not found.ok
