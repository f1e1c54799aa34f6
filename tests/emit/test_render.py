"""Templates: the variables they read, errors that name their line, equal bytes every time."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2.meta
import pytest

from kgen import render
from kgen.config import template_root
from kgen.errors import BuildError, ConfigError
from kgen.runtime.families import FAMILIES as launchable
from kgen.runtime.layouts import LAYOUTS

FAMILIES = sorted(render.TRITON_RANGE)


def variables(family: str) -> set[str]:
    text = (Path(template_root()) / f"{family}.py.jinja").read_text()
    assigned = set(re.findall(r"{%-? set (\w+) ", text))  # jinja takes a conditional assignment for a free variable
    return jinja2.meta.find_undeclared_variables(render._environment().parse(text)) - assigned


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_read_only_what_the_context_has(family: str) -> None:
    layouts = ("v4",) if family not in launchable else launchable[family].layouts
    layout = None if family in render.LAYOUT_FREE else layouts[-1]
    chunk = render.chunk_choices(LAYOUTS[layouts[-1]])[0] if family in render.CHUNK_FAMILIES else 0
    context = render.render_context(family, layout, "sm90", chunk)
    assert variables(family) <= set(context)
    assert {"arch", "template_hash", "triton_range"} <= variables(family)


def test_every_layout_renders_in_every_chunk() -> None:
    for kv in LAYOUTS.values():
        for width in render.chunk_choices(kv):
            text = render.render_module("portable", kv.name, "sm90", width)
            assert text == render.render_module.__wrapped__("portable", kv.name, "sm90", width)
            chunks = render.chunks_of(kv, width)
            assert sum(chunk.width for chunk in chunks) == kv.d_qk
            assert sum(chunk.v_width for chunk in chunks) == 512
            assert [chunk.q_start for chunk in chunks] == [sum(c.width for c in chunks[:i]) for i in range(len(chunks))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A = 1\n{% if %}\n", "line 2"),
        ("A = 1\nB = {{ nothing }}\n", "line 2: 'nothing' is undefined"),
        ("A = 1\nB = = 2\n", "does not parse"),
    ],
)
def test_template_errors_name_their_place(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "combine.py.jinja").write_text(text)
    monkeypatch.setenv("KGEN_TEMPLATES", str(tmp_path))
    caches = (render._environment, render.template_hash, render.render_module)
    for cache in caches:
        cache.cache_clear()
    try:
        with pytest.raises(BuildError, match=r"combine\.py\.jinja") as caught:
            render.render_module("combine", None, "sm90")
        assert words in str(caught.value)
    finally:
        monkeypatch.undo()
        for cache in caches:
            cache.cache_clear()


def test_unknown_names_are_sentences() -> None:
    with pytest.raises(ConfigError, match="No template for family 'hopper'"):
        render.render_module("hopper", "v4", "sm90", 64)
    with pytest.raises(ConfigError, match="No KV layout 'v5'"):
        render.render_module("portable", "v5", "sm90", 64)
    with pytest.raises(ConfigError, match="cannot be cut into chunks of 128"):
        render.render_module("portable", "v4", "sm90", 128)


def test_a_layout_that_a_family_does_not_read_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="does not read layout v41_inline; it reads"):
        render.render_module("sm90_few", "v41_inline", "sm90")
