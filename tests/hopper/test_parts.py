"""Parts of a split in fp16, as the launcher lays them out where latents are in fp16."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from kgen.check import CaseSpec
from kgen.runtime.call import AttentionCall
from kgen.runtime.families import FAMILIES, part_type
from kgen.runtime.launch import plan_scratch_bytes

from . import running
from .forms import usual

NAN = float("nan")


def fp16_forms(layout: str) -> list[Any]:
    forms = [form for form in usual(layout) if "latent" in dict(form.tunables)]
    return [pytest.param(layout, form.replace(latent="fp16"), id=f"{layout}-{form.family}") for form in forms]


@pytest.mark.parametrize(("layout", "form"), [*fp16_forms("v32"), *fp16_forms("v4")])
def test_parts_of_16_bits_merge_to_the_truth(layout: str, form: running.Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last head block has rows that do not exist, one token has fewer keys than there are parts."""
    made: list[torch.Tensor] = []

    def parts_of(call: AttentionCall, splits: int) -> tuple[torch.Tensor, ...]:
        rows = call.tokens * splits * call.heads
        made.append(torch.full((rows + 1, 512), NAN, dtype=torch.float16))
        return made[-1][:rows], torch.full((rows,), NAN), torch.full((rows,), NAN)

    monkeypatch.setattr(running, "parts_of", parts_of)
    running.check(form, running.plain_case(layout, form, 3), 3)
    assert made[-1][-1].isnan().all() and made[-1][:-1].isfinite().any()


@pytest.mark.parametrize(
    ("family", "tunables", "parts"),
    [
        ("sm90_few", {"latent": "fp16"}, "fp16"),
        ("sm90_few", {"latent": "bf16"}, "fp32"),
        ("sm90_ws", {"latent": "bf16"}, "fp32"),
        ("portable", {"partial": "bf16"}, "bf16"),
        ("portable", {"partial": "fp32"}, "fp32"),
    ],
)
def test_the_type_of_parts_follows_the_latents(family: str, tunables: dict[str, Any], parts: str) -> None:
    assert part_type(FAMILIES[family], tunables) == parts
    form = next(f for f in usual("bf16_d576") if f.family == "sm90_few").replace(**tunables)
    call, _ = running.bound_call(
        running.aligned(running.make_case(CaseSpec(layout="bf16_d576", tokens=3, heads=5, q_pad=False)))
    )
    plan = replace(form.plan(call, 4, exact=False), parts=parts)
    # 60 parts of 512 values, then two numbers of four bytes each
    assert plan_scratch_bytes(plan, 3, 5) == 60 * (512 * (4 if parts == "fp32" else 2) + 8)


def accumulators(columns: int) -> dict[tuple[str, int], tuple[int, int]]:
    """Where a wgmma of 64 rows leaves its results: (register or lane or warp, bit) -> (row, column)."""
    places = {("register", 0): (0, 1), ("register", 1): (8, 0), ("lane", 0): (0, 2), ("lane", 1): (0, 4)}
    places |= {("register", 2 + i): (0, 8 << i) for i in range((columns // 8).bit_length() - 1)}
    places |= {("lane", 2 + i): (1 << i, 0) for i in range(3)}
    return places | {("warp", i): (16 << i, 0) for i in range(2)}


@functools.cache
def layouts_of(family: str) -> dict[str, Any]:
    """The layout functions of a template, each giving its bases by place."""
    text = running.Form.make(family).text("v32")
    found = {}
    for name in ("half_way", "by_eight"):
        body = text[text.index(f"def {name}(") :].split("\n\n\n")[0]
        scope: dict[str, Any] = {"gl": type("gl", (), {"DistributedLinearLayout": staticmethod(lambda *bases: bases)})}
        exec(body, scope)  # noqa: S102 - our own text
        found[name] = scope[name]
    return found


@pytest.mark.parametrize("family", ["sm90_ws_fp8", "sm90_pair_fp8"])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_a_lane_ends_with_16_bytes_of_a_row_by_one_exchange_at_a_time(family: str, columns: int) -> None:
    """Each step swaps one bit of the lane with one of the register, which is what shuffles do; with two the compiler would take
    shared memory."""

    def by_place(bases: Any) -> dict[tuple[int, int], str]:
        registers, lanes, warps, blocks, shape = bases
        assert blocks == [] and shape == [64, columns]
        out = {tuple(base): "register" for base in registers} | {tuple(base): "lane" for base in lanes}
        return out | {tuple(base): "warp" for base in warps}

    start = {place: kind for (kind, _), place in accumulators(columns).items()}
    half, end = (by_place(layouts_of(family)[name](columns)) for name in ("half_way", "by_eight"))
    for before, after in ((start, half), (half, end)):
        assert before.keys() == after.keys() and len(before) == 6 + (columns.bit_length() - 1)
        moved = {place for place in before if before[place] != after[place]}
        assert len(moved) == 2 and {before[place] for place in moved} == {"register", "lane"}
    registers, lanes = layouts_of(family)["by_eight"](columns)[:2]
    assert registers[:3] == [[0, 1], [0, 2], [0, 4]] and lanes[:2] == [[0, 8], [0, 16]]
