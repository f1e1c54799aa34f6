"""Warm-up over the checked-in tables: every kernel of every token count, the merge's as well."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from generated import explain, launch
from generated.call import AttentionCall
from generated.lookup import choose
from generated.table import Entry, Shape
from generated.target import Target


def kernels(shape: Shape, entry: Entry, exact: bool) -> tuple[object, ...]:
    plan = launch.make_plan(shape, entry, exact)
    rows = shape.tokens * shape.heads
    early = launch.merges_early(plan, shape.tokens, shape.heads)
    merge = (*launch.combine_tile(rows, plan.splits, plan.parts), plan.parts, early) if plan.splits > 1 else ()
    return (tuple(plan.constants.items()), tuple(plan.options.items()), merge)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("heads", [1, 8, 16, 64])
@pytest.mark.parametrize(("layout", "topk", "page"), [("v32", 2048, 64), ("bf16_d576", 2048, 0), ("v4", 128, 64)])
def test_warmup_compiles_all_that_any_token_count_needs(
    layout: str, topk: int, page: int, heads: int, fp16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(layout, heads, topk, page, 64, fp16=fp16)
    made: set[tuple[object, ...]] = set()

    def run(call: AttentionCall, arch: str, entry: Entry, exact: bool, workspace: object, package: str) -> None:
        made.add(kernels(launch.call_shape(call), entry, exact))

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(explain, "target_of", lambda device: Target("sm90", "h200", "NVIDIA H200"))
    assert explain.warmup([shape], device=torch.device("cpu")) >= len(made)
    merges = {merge for _, _, merge in made}
    for tokens, lse in itertools.product(range(1, 65), (False, True)):
        at = replace(shape, tokens=tokens, lse=lse)
        choice = choose("sm90", "h200", at)
        needed = kernels(at, choice.entry, choice.exact)
        assert needed[2] in merges and needed[:2] in {kernel[:2] for kernel in made}, (tokens, needed)
