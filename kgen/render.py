"""Template + constants -> module text, and text -> module.

One template per kernel family, rendered once per (layout, arch): everything that can be a `tl.constexpr` argument is one, so
that shapes and tunables never change the text. `StrictUndefined`, a `py` filter for values, and `ast.parse` on every result.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2

from kgen.config import template_root
from kgen.errors import BuildError, ConfigError
from kgen.runtime.families import FAMILIES, Family
from kgen.runtime.layouts import D_V, LAYOUTS, KvLayout
from kgen.same_code import known_as

HELPERS = ("combine", "cache_ops", "index_ops")
"""Templates beside the attention families."""


def _valid_for(family: Family) -> tuple[str, str]:
    """Clusters of blocks that compute the same are written against the compiler of Triton 3.6; in 3.9 a barrier that is replicated
    over a cluster is one barrier for all of its blocks."""
    if family.gluon:
        return "3.6", "4.0" if family.ctas == 1 else "3.7"
    return "3.4", "4.0"


TRITON_RANGE = {
    **{name: _valid_for(family) for name, family in FAMILIES.items()},
    **dict.fromkeys(HELPERS, ("3.4", "4.0")),
}
"""Triton versions [from, below) that a family's text is valid for."""

LAYOUT_FREE = ("combine", "index_ops")
"""Families whose text does not depend on the cache layout."""

CHUNK_FAMILIES = ("portable",)
"""Families whose text also depends on `chunk`, the width of the slices of the head dimension."""

CHUNKS = (64, 128, 256)


@dataclass(frozen=True)
class Chunk:
    """A slice of the head dimension that is loaded and multiplied on its own."""

    i: int
    kind: str  # "fp8" or "bf16"
    q_start: int  # first dim, in q and in out
    width: int
    v_width: int  # dims that also belong to V: all of them or none
    byte_offset: int  # from the row
    group: int  # first scale group; fp8 only
    groups: int  # scale groups in the chunk; fp8 only


def chunk_choices(kv: KvLayout) -> tuple[int, ...]:
    """Chunk widths that a layout can be cut into: a scale group of at least 64 dims is a chunk, else any of CHUNKS."""
    return (kv.group,) if kv.group >= 64 else CHUNKS


def chunks_of(kv: KvLayout, width: int) -> tuple[Chunk, ...]:
    """The latent part in chunks of `width` dims; the rope part is a chunk of its own."""
    if width not in chunk_choices(kv):
        raise ConfigError(f"Layout {kv.name} cannot be cut into chunks of {width} dims; choose {chunk_choices(kv)}.")
    chunks: list[Chunk] = []
    for i in range(kv.latent_dims // width):
        start, groups = i * width, width // kv.group if kv.fp8 else 0
        element = 1 if kv.fp8 else 2
        chunks.append(Chunk(i, "fp8" if kv.fp8 else "bf16", start, width, width, start * element, i * groups, groups))
    if kv.rope_dims:
        in_v = kv.rope_dims if kv.latent_dims < D_V else 0
        chunks.append(Chunk(len(chunks), "bf16", kv.latent_dims, kv.rope_dims, in_v, kv.rope_offset, 0, 0))
    return tuple(chunks)


def module_name(family: str, layout: str | None, chunk: int = 0) -> str:
    """Name of the emitted module, e.g. `portable_v4_c64`."""
    name = family if family in LAYOUT_FREE else f"{family}_{layout}"
    return f"{name}_c{chunk}" if family in CHUNK_FAMILIES else name


def render_context(family: str, layout: str | None, arch: str, chunk: int = 0) -> dict[str, Any]:
    """Every variable that a template may read."""
    context: dict[str, Any] = {
        "arch": arch,
        "template_hash": template_hash(family),
        "triton_range": TRITON_RANGE[family],
    }
    if family in LAYOUT_FREE:
        return context
    if layout not in LAYOUTS:
        raise ConfigError(f"No KV layout {layout!r}; known layouts: {', '.join(LAYOUTS)}.")
    if family in FAMILIES and layout not in FAMILIES[family].layouts:
        raise ConfigError(
            f"Family {family} does not read layout {layout}; it reads {', '.join(FAMILIES[family].layouts)}."
        )
    kv = LAYOUTS[layout]
    context |= asdict(kv) | {"layout": kv.name}
    return context | {"chunks": chunks_of(kv, chunk)} if family in CHUNK_FAMILIES else context


@functools.cache
def _environment() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_root()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["py"] = repr
    return env


def template_path(family: str) -> Path:
    path = Path(template_root()) / f"{family}.py.jinja"
    if family not in TRITON_RANGE or not path.is_file():
        raise ConfigError(
            f"No template for family {family!r} in templates/; known families: {', '.join(TRITON_RANGE)}."
        )
    return path


def text_hash(family: str, text: bytes) -> str:
    """First 16 hex digits of the SHA-256 of a template's text and of the layout facts it is rendered with."""
    if family in LAYOUT_FREE:
        facts = ""
    elif family in FAMILIES and family not in CHUNK_FAMILIES:
        facts = repr([LAYOUTS[name] for name in FAMILIES[family].layouts])
    else:
        facts = repr([(kv, [chunks_of(kv, width) for width in chunk_choices(kv)]) for kv in LAYOUTS.values()])
    return hashlib.sha256(text + facts.encode()).hexdigest()[:16]


@functools.cache
def template_hash(family: str) -> str:
    """What records of a family are keyed by: the hash of its text, or of an earlier text with the same code."""
    return known_as(family, text_hash(family, template_path(family).read_bytes()))


def render_text(text: str, family: str, layout: str | None, arch: str, chunk: int = 0) -> str:
    """Any text rendered as a family's template is."""
    return _squeeze_blank_lines(_environment().from_string(text).render(render_context(family, layout, arch, chunk)))


@functools.cache
def render_module(family: str, layout: str | None, arch: str, chunk: int = 0) -> str:
    """The text of the module that serves `layout` on `arch`. Deterministic: same templates, same bytes."""
    path = template_path(family)
    try:
        text = _environment().get_template(path.name).render(render_context(family, layout, arch, chunk))
    except jinja2.TemplateSyntaxError as error:
        raise BuildError(f"Template {path.name}, line {error.lineno}: {error.message}.") from error
    except jinja2.UndefinedError as error:
        line = _template_line(error, path.name)
        raise BuildError(
            f"Template {path.name}, line {line}: {error.message}; see kgen.render.render_context."
        ) from error
    text = _squeeze_blank_lines(text)
    try:
        ast.parse(text)
    except SyntaxError as error:
        at = error.lineno or 1
        context = "\n".join(f"{n:5d} {line}" for n, line in enumerate(text.splitlines(), 1) if abs(n - at) <= 3)
        raise BuildError(
            f"Template {path.name} renders to Python that does not parse ({error.msg}):\n{context}"
        ) from error
    return text


def _squeeze_blank_lines(text: str) -> str:
    """At most two blank lines in a row: what the tags on lines of their own leave behind."""
    lines: list[str] = []
    for line in text.splitlines():
        stripped = line.rstrip()
        if stripped or lines[-2:] != ["", ""]:
            lines.append(stripped)
    return "\n".join(lines).rstrip("\n") + "\n"


def _template_line(error: BaseException, name: str) -> int | str:
    trace, line = error.__traceback__, "?"
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(name):
            line = str(trace.tb_lineno)
        trace = trace.tb_next
    return line


def load_module(family: str, layout: str | None, arch: str, chunk: int = 0, folder: Path | None = None) -> ModuleType:
    """Import the rendered module. `@triton.jit` reads its source from a file, so the text is written to
    `folder` (default: a per-user cache), atomically and only when it is not there yet."""
    text = render_module(family, layout, arch, chunk)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = folder or Path(os.environ.get("KGEN_CACHE", Path.home() / ".cache" / "kgen")) / "modules"
    name = f"kgen_{arch}_{module_name(family, layout, chunk)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    path = folder / f"{name}.py"
    if not path.is_file() or path.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
