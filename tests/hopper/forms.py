"""The forms in which the Hopper families are tested: drawn from their search spaces, so that every two values of different
axes that some shape may use together occur together, for every layout."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import pytest

from kgen.archs import load_arch
from kgen.runtime.families import FAMILIES
from kgen.space import load_space
from kgen.types import KernelSpec, Scalar

from .running import ARCH, Form

OURS = ("splits", "specialise")
"""Tunables that the tests choose case by case."""

Point = tuple[tuple[str, Scalar], ...]


def specs(family: str, layout: str) -> list[KernelSpec]:
    """Shapes that between them allow every value: few and many heads (of the family's), keys and tokens."""
    page = 0 if layout.startswith("bf16") else 64
    heads_of = {"sm90_few": (16, 32), "sm90_rs_fp8": (64, 32, 16), "sm90_cluster_fp8": (128,)}
    return [
        KernelSpec(ARCH, layout, heads, topk, page, tokens)
        for heads in heads_of.get(family, (64,))
        for topk in (2048, 128)
        for tokens in (4096, 1)
    ]


@cache
def feasible(family: str, layout: str) -> tuple[Point, ...]:
    """What the space allows, each combination once. Register counts, which the model does not have, stay as they come."""
    space, arch = load_space(family), load_arch(ARCH)
    found: dict[Point, Point] = {}
    for spec in specs(family, layout):
        for candidate in space.feasible(spec, arch):
            point = tuple((name, value) for name, value in candidate.tunables if name not in OURS)
            found.setdefault(tuple(pair for pair in point if not pair[0].startswith("r_")), point)
    points = tuple(sorted(found.values(), key=lambda point: not dict(point).get("persistent")))
    return points + flipped(points)


def flipped(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The first point with each flag turned that a layout's space leaves alone: the template has that code all the same."""
    first = dict(points[0])
    fixed = [n for n, v in first.items() if isinstance(v, bool) and all(dict(point)[n] == v for point in points)]
    return tuple(tuple({**first, name: not first[name]}.items()) for name in fixed)


def cover(points: tuple[Point, ...], size: int) -> list[Point]:
    """A few of the points in which every choice of `size` values occurs that occurs in any point. The first is the first."""

    def choices(point: Point) -> set[Point]:
        return set(combinations((item for item in point if not item[0].startswith("r_")), size))

    missing = set().union(*map(choices, points))
    chosen: list[Point] = []
    while missing:
        best = max(points, key=lambda point: len(missing & choices(point)))
        chosen.append(best)
        missing -= choices(best)
    return chosen


def drawn(size: int) -> dict[str, tuple[Form, ...]]:
    return {
        layout: tuple(
            Form(family.name, point)
            for family in FAMILIES.values()
            if family.gluon and layout in family.layouts
            for point in cover(feasible(family.name, layout), size)
        )
        for layout in ("bf16_d576", "bf16_d512", "v32", "v4")
    }


FORMS = drawn(1)
"""By layout: forms that have all values of all axes."""


def usual(layout: str) -> tuple[Form, ...]:
    """One form of each family that reads the layout."""
    return tuple({form.family: form for form in reversed(FORMS[layout])}.values())


def exact_scales(form: Form) -> Form:
    """The same form, right for every scale. sm90_rs_fp8's lean form is of fp16 latents alone."""
    changes = {"lean": False} if "lean" in dict(form.tunables) else {}
    return form.replace(latent="bf16", **changes)


def parameters(forms: dict[str, tuple[Form, ...]]) -> list[Any]:
    """Parameters of a test: a layout and a form."""
    return [
        pytest.param(layout, form, id=f"{layout}-{form.family}-{i}")
        for layout in forms
        for i, form in enumerate(forms[layout])
    ]


USUAL = [pytest.param(layout, form, id=f"{layout}-{form.family}") for layout in FORMS for form in usual(layout)]
VALUES = parameters(FORMS)
PAIRS = parameters(drawn(2))
