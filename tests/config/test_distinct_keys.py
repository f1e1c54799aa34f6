"""B54 (triton#1242: all configs measured as one): keys and slugs of things that differ in any field differ."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.archs import ArchSpec, load_arch
from kgen.runtime.layouts import DUAL_LAYOUTS, LAYOUTS
from kgen.space import load_space
from kgen.types import TOKEN_BUCKETS, Candidate, KernelSpec, LaunchOptions

SPACE = load_space("portable")


@st.composite
def specs(draw: st.DrawFn) -> KernelSpec:
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    dual = layout in DUAL_LAYOUTS and draw(st.booleans())
    return KernelSpec(
        arch=draw(st.sampled_from(["sm90", "sm100", "sm120", "sm121"])),
        layout=layout,
        heads=draw(st.integers(1, 128)),
        topk=draw(st.integers(1, 4096)),
        page=draw(st.integers(1, 256)) if LAYOUTS[layout].paged else 0,
        tokens=draw(st.sampled_from(TOKEN_BUCKETS)),
        extra_topk=draw(st.integers(1, 4096)) if dual else 0,
        extra_page=draw(st.integers(1, 256)) if dual else 0,
    )


CANDIDATES = st.builds(
    lambda values: Candidate.make(
        "portable",
        {axis.name: values[axis.name] for axis in SPACE.axes if axis.kind == "tunable"},
        LaunchOptions(**{axis.name: values[axis.name] for axis in SPACE.axes if axis.kind == "launch"}),
    ),
    st.fixed_dictionaries({axis.name: st.sampled_from(axis.values) for axis in SPACE.axes}),
)


@settings(max_examples=200, deadline=None)
@given(specs(), specs())
def test_slugs_of_different_specs_differ(a: KernelSpec, b: KernelSpec) -> None:
    assert (a == b) == (a.slug == b.slug)


@settings(max_examples=100, deadline=None)
@given(specs(), st.data())
def test_one_field_of_a_spec_changes_its_slug(spec: KernelSpec, data: st.DataObject) -> None:
    other = data.draw(specs())
    for field in fields(KernelSpec):
        value = getattr(other, field.name)
        changed = replace(spec, **{field.name: value})
        if not spec.dual and field.name in {"extra_topk", "extra_page"}:
            continue  # the extra fields of a spec mean something only together
        if field.name == "extra_topk" and value == 0:
            continue
        assert (changed == spec) == (changed.slug == spec.slug), field.name


@settings(max_examples=200, deadline=None)
@given(CANDIDATES, CANDIDATES)
def test_slugs_of_different_candidates_differ(a: Candidate, b: Candidate) -> None:
    assert (a == b) == (a.slug == b.slug)


def test_one_axis_of_a_candidate_changes_its_slug() -> None:
    base = {axis.name: axis.values[0] for axis in SPACE.axes}
    slugs = set()
    expected = 1
    for axis in SPACE.axes:
        for value in axis.values:
            values = {**base, axis.name: value}
            tunables = {a.name: values[a.name] for a in SPACE.axes if a.kind == "tunable"}
            launch = {a.name: values[a.name] for a in SPACE.axes if a.kind == "launch"}
            slugs.add(SPACE.candidate(tunables, launch).slug)
        expected += len(axis.values) - 1
    assert len(slugs) == expected == 1 + 3 + 3 + 1 + 1 + 2 + 1 + 6 + 1 + 1 + 3 + 3 + 2


def test_archs_that_differ_in_any_field_differ() -> None:
    arch = load_arch("sm90")
    for field in fields(ArchSpec):
        value = getattr(arch, field.name)
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value[:-1]
        assert replace(arch, **{field.name: other}) != arch, field.name
