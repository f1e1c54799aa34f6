"""Axes of size 1: their strides are never used, so that an odd one changes neither what serves a call nor what it gives."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from kgen.check import CaseSpec, make_case
from kgen.runtime.call import AttentionCall, CacheView
from kgen.runtime.launch import call_shape
from kgen.runtime.validate import build_call, shape_of

ODD = 1_000_003


def with_odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same values; axes of size 1, but the last, have an odd stride."""
    pairs = list(zip(tensor.shape, tensor.stride(), strict=True))
    strides = [ODD if size == 1 else stride for size, stride in pairs[:-1]] + [tensor.stride(-1)]
    return tensor.as_strided(tensor.shape, strides)


def arguments(layout: str, *, heads: int = 4, tokens: int = 1, dual: bool = False) -> dict[str, Any]:
    """A call whose caches have one page (or one row); all its tensors are contiguous."""
    flat = layout.startswith("bf16")
    extra = {"extra_topk": 3, "extra_page": 2, "extra_slots": 2} if dual else {}
    case = CaseSpec(
        layout=layout, heads=heads, topk=4, page=0 if flat else 16, slots=1 if flat else 16, tokens=tokens, index="random",
        q_pad=False, **extra,
    )  # fmt: skip
    given = make_case(case).kwargs()
    return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


CASES = [
    ("v32", 4, 1, False),
    ("v32", 1, 3, False),
    ("bf16_d512", 1, 1, False),
    ("v4", 1, 1, True),
    ("v41_inline", 4, 3, True),
]


def odd(given: dict[str, Any]) -> dict[str, Any]:
    return {n: with_odd_strides(v) if isinstance(v, torch.Tensor) and v.dim() > 1 else v for n, v in given.items()}


def numbers(call: AttentionCall | CacheView) -> dict[str, Any]:
    """Everything of a call that is no tensor."""
    out: dict[str, Any] = {}
    for field in (field for field in fields(call) if field.compare):
        value = getattr(call, field.name)
        if isinstance(value, CacheView):
            out[field.name] = numbers(value)
        elif not isinstance(value, torch.Tensor):
            out[field.name] = value
    return out


@pytest.mark.parametrize(("layout", "heads", "tokens", "dual"), CASES)
def test_the_kernel_gets_the_strides_of_contiguous_tensors(layout: str, heads: int, tokens: int, dual: bool) -> None:
    """So nothing else is compiled, either: Triton compiles once per divisibility of a stride."""
    given = arguments(layout, heads=heads, tokens=tokens, dual=dual)
    strange = odd(given)
    assert any(v.stride() != given[n].stride() for n, v in strange.items() if isinstance(v, torch.Tensor))
    outputs = {
        "out": torch.zeros(tokens, heads, 512, dtype=torch.bfloat16), "lse": torch.zeros(tokens, heads)
    }  # fmt: skip
    odd_outputs = {name: with_odd_strides(tensor) for name, tensor in outputs.items()}
    plain, made = build_call(**given, **outputs), build_call(**strange, **odd_outputs)
    assert numbers(made) == numbers(plain)
    assert made.aligned and call_shape(made) == call_shape(plain)
    keys = ("q", "kv", "indices", "kv_layout", "extra_kv", "extra_indices")
    picked = {key: strange.get(key) for key in keys}
    # the look-up does not ask whether lse is wanted
    assert shape_of(**picked, out=odd_outputs["out"]) == replace(call_shape(made), lse=False)


def test_an_axis_of_more_than_one_keeps_its_stride() -> None:
    given = arguments("v32", heads=2, tokens=3)
    given["q"] = torch.zeros(3, 2, 577, dtype=torch.bfloat16)[..., :576]
    made = build_call(**given)
    assert made.q_strides == (2 * 577, 2 * 577, 577) and not made.aligned


@pytest.mark.parametrize(("layout", "heads", "tokens", "dual"), CASES)
def test_results_are_the_same(layout: str, heads: int, tokens: int, dual: bool) -> None:
    from generated.dispatch import sparse_mla

    given = arguments(layout, heads=heads, tokens=tokens, dual=dual)
    plain = sparse_mla(**given, return_lse=True)
    out = with_odd_strides(torch.full((tokens, heads, 512), float("nan"), dtype=torch.bfloat16))
    strange = sparse_mla(**odd(given), out=out, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, strange, strict=True)) and plain[0].isfinite().all()
