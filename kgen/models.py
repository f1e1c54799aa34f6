"""Models and the kernel shapes that engines ask for: `configs/models/*.yaml` as frozen data.

A model file lists *shapes*: a layout with index widths, page sizes and token buckets as an engine pairs them. The
product of a shape with the heads per rank of its variants gives `KernelSpec`s; nothing is crossed that no engine
combines.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kgen.archs import all_archs
from kgen.config import Node, config_root, find_yaml, read_yaml, yaml_files
from kgen.errors import ConfigError
from kgen.runtime.families import FP16_SCALES
from kgen.runtime.layouts import DUAL_LAYOUTS, LAYOUTS
from kgen.types import TOKEN_BUCKETS, KernelSpec

MAX_HEADS = 128
MAX_TOPK = 1 << 20
MAX_PAGE = 1 << 16
SCALE_RULES = ("pow2", "arbitrary")
ROLES = ("target", "draft")


@dataclass(frozen=True)
class Variant:
    """A size of a model: query heads in all, and the tensor-parallel degrees that divide them over ranks."""

    name: str
    heads: int
    tp: tuple[int, ...]
    source: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """Heads per rank, one per degree in `tp`."""
        return tuple(self.heads // degree for degree in self.tp)


@dataclass(frozen=True)
class Extra:
    """The compressed cache of a dual layout: index width and tokens per page. Width 0: the layer has none."""

    topk: int
    page: int


@dataclass(frozen=True)
class Shape:
    """One way in which an engine calls the kernel. `archs` empty: every arch."""

    name: str
    role: str
    layout: str
    variants: tuple[str, ...]
    topk: tuple[int, ...]
    pages: tuple[int, ...]
    extras: tuple[Extra, ...]
    tokens: tuple[int, ...]
    archs: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Anchor:
    """Specs of a shape that are measured before all others. `pages` empty: every page of the shape."""

    shape: str
    tp: tuple[int, ...]
    tokens: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A model as the attention kernel sees it.

    sm_scale is what engines pass (the pre-absorption width to the power -1/2, which is not d_qk for every model).
    scale_rule says which scales the cache writers use; scale_range is the stated range of group scales (None: unknown).
    token_weights are assumed shares of calls per token bucket, for "share of time" sums; they sum to 1.
    """

    name: str
    title: str
    variants: tuple[Variant, ...]
    sm_scale: float
    scale_rule: str
    scale_range: tuple[float, float] | None
    token_weights: tuple[tuple[int, float], ...]
    weights_assumed: bool
    shapes: tuple[Shape, ...]
    anchors: tuple[Anchor, ...]

    @property
    def fp16_latent(self) -> bool:
        """Whether the fp16 latent path is allowed: only for a stated range inside `families.FP16_SCALES`."""
        low, high = FP16_SCALES
        return self.scale_range is not None and low <= self.scale_range[0] and self.scale_range[1] <= high

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def shape(self, name: str) -> Shape:
        return next(shape for shape in self.shapes if shape.name == name)


def load_model(name: str, root: Path | None = None) -> ModelSpec:
    """The model of that name (`dsv4`); `root` is a configuration folder, by default `config_root()`."""
    return read_model(find_yaml((root or config_root()) / "models", name, "model"))


def all_models(root: Path | None = None) -> dict[str, ModelSpec]:
    """Every model of the configuration folder, by name."""
    return {name: read_model(path) for name, path in yaml_files((root or config_root()) / "models").items()}


def model_specs(model: ModelSpec, arch_name: str) -> list[KernelSpec]:
    """The specs that engines need for a model on an arch, without repetition, in the order of the file."""
    shapes = (shape for shape in model.shapes if not shape.archs or arch_name in shape.archs)
    return list(dict.fromkeys(spec for shape in shapes for spec in _shape_specs(model, shape, arch_name)))


def anchor_specs(model: ModelSpec, arch_name: str) -> list[KernelSpec]:
    """The specs of `model_specs` that are measured first: both ends of TP, decode and prefill."""
    specs: list[KernelSpec] = []
    for anchor in model.anchors:
        shape = model.shape(anchor.shape)
        if shape.archs and arch_name not in shape.archs:
            continue
        for spec in _shape_specs(model, shape, arch_name, anchor.tp):
            if spec.tokens in anchor.tokens and (not anchor.pages or spec.page in anchor.pages):
                specs.append(spec)
    return list(dict.fromkeys(specs))


def spec_by_slug(slug: str, root: Path | None = None) -> KernelSpec:
    """The spec of that slug among all models and archs of the configuration folder, or a sentence with the nearest."""
    specs = _slugs(root or config_root())
    if slug not in specs:
        near = difflib.get_close_matches(slug, specs, n=1, cutoff=0.6)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"No model asks for a spec {slug!r}{hint}; `kgen list` shows all.")
    return specs[slug]


def _slugs(root: Path) -> dict[str, KernelSpec]:
    files = [*yaml_files(root / "models").values(), *yaml_files(root / "archs").values()]
    return _slugs_of(root, tuple((str(path), path.stat().st_mtime_ns) for path in files))


@lru_cache(maxsize=4)
def _slugs_of(root: Path, files: tuple[tuple[str, int], ...]) -> dict[str, KernelSpec]:
    """Cached until a file changes: `files` (path, mtime) is there to be a part of the key."""
    models = all_models(root).values()
    return {spec.slug: spec for arch in all_archs(root) for model in models for spec in model_specs(model, arch)}


def _shape_specs(
    model: ModelSpec, shape: Shape, arch_name: str, tp: tuple[int, ...] | None = None
) -> Iterator[KernelSpec]:
    variants = [model.variant(name) for name in shape.variants]
    heads = dict.fromkeys(v.heads // degree for v in variants for degree in v.tp if tp is None or degree in tp)
    for count in heads:
        for topk in shape.topk:
            for page in shape.pages:
                for extra in shape.extras:
                    for tokens in shape.tokens:
                        yield KernelSpec(arch_name, shape.layout, count, topk, page, tokens, extra.topk, extra.page)


def read_model(path: Path) -> ModelSpec:
    """Read one model file; its stem is the model's name."""
    document = read_yaml(path)
    fields = document.fields(
        ("name", "title", "variants", "sm_scale", "fp8_scale", "token_weights", "shapes", "anchors")
    )
    name = fields["name"].text()
    if name != path.stem:
        fields["name"].fail(f"the model is called {name!r} but its file is {path.name}; the two must agree.")
    variants = tuple(_variant(node, key) for key, node in fields["variants"].mapping().items())
    if not variants:
        fields["variants"].fail("expected at least one variant.")
    names = tuple(variant.name for variant in variants)
    archs = tuple(yaml_files(path.parent.parent / "archs"))
    shapes = tuple(_shape(node, key, names, archs) for key, node in fields["shapes"].mapping().items())
    if not shapes:
        fields["shapes"].fail("expected at least one shape.")
    scale = fields["fp8_scale"].fields(("rule", "range", "source"))
    scale["source"].text()
    weights, assumed = _weights(fields["token_weights"])
    return ModelSpec(
        name=name,
        title=fields["title"].text(),
        variants=variants,
        sm_scale=_sm_scale(fields["sm_scale"]),
        scale_rule=scale["rule"].choice(SCALE_RULES, "scale rule"),
        scale_range=_scale_range(scale["range"]),
        token_weights=weights,
        weights_assumed=assumed,
        shapes=shapes,
        anchors=tuple(_anchor(node, variants, shapes) for node in fields["anchors"].items()),
    )


def _variant(node: Node, name: str) -> Variant:
    fields = node.fields(("heads", "tp", "source"))
    heads = fields["heads"].integer(1, 1024)
    tp = fields["tp"].integers(1, 1024)
    for degree in tp:
        if heads % degree:
            fields["tp"].fail(f"{heads} heads cannot be divided over {degree} ranks.")
        if heads // degree > MAX_HEADS:
            fields["tp"].fail(f"{heads // degree} heads on a rank exceed the {MAX_HEADS} that kernels serve.")
    return Variant(name, heads, tp, fields["source"].text())


def _sm_scale(node: Node) -> float:
    """(nope + rope) ** -0.5 of the model before weight absorption."""
    fields = node.fields(("nope", "rope", "source"))
    fields["source"].text()
    width = fields["nope"].integer(0, 4096) + fields["rope"].integer(0, 4096)
    if width == 0:
        node.fail("nope and rope cannot both be 0: sm_scale is (nope + rope) ** -0.5.")
    return float(width**-0.5)


def _scale_range(node: Node) -> tuple[float, float] | None:
    if node.is_null:
        return None
    ends = [item.number(2.0**-127, 2.0**127) for item in node.items()]
    if len(ends) != 2 or ends[0] > ends[1]:
        node.fail("expected null or [lowest, highest] group scale.")
    return ends[0], ends[1]


def _weights(node: Node) -> tuple[tuple[tuple[int, float], ...], bool]:
    fields = node.fields(("values", "assumed", "source"))
    fields["source"].text()
    weights: list[tuple[int, float]] = []
    for key, value in fields["values"].mapping().items():
        if key not in map(str, TOKEN_BUCKETS):
            value.fail(f"{key!r} is not a token bucket; the buckets are {', '.join(map(str, TOKEN_BUCKETS))}.")
        weights.append((int(key), value.number(0, 1)))
    total = sum(weight for _, weight in weights)
    if abs(total - 1) > 1e-6:
        fields["values"].fail(f"the weights must sum to 1, they sum to {total:g}.")
    return tuple(weights), fields["assumed"].boolean()


def _shape(node: Node, name: str, variants: tuple[str, ...], known_archs: tuple[str, ...]) -> Shape:
    fields = node.fields(("layout", "topk", "tokens", "source"), ("role", "variants", "page", "extra", "archs"))
    layout = fields["layout"].choice(tuple(LAYOUTS), "layout")
    paged = LAYOUTS[layout].paged
    if paged and "page" not in fields:
        node.fail(f"the layout {layout} is paged: 'page' (tokens per page) is missing.")
    if not paged and "page" in fields:
        fields["page"].fail(f"the layout {layout} has flat rows: it takes no page.")
    if "extra" in fields and layout not in DUAL_LAYOUTS:
        fields["extra"].fail(f"the layout {layout} has no second cache; layouts that have: {', '.join(DUAL_LAYOUTS)}.")
    extras = (
        tuple(e for item in fields["extra"].items() for e in _extras(item)) if "extra" in fields else (Extra(0, 0),)
    )
    if not extras:
        fields["extra"].fail("expected at least one pair of topk and page; leave 'extra' out for layers without one.")
    named = fields.get("variants")
    archs = fields.get("archs")
    return Shape(
        name=name,
        role=fields["role"].choice(ROLES, "role") if "role" in fields else "target",
        layout=layout,
        variants=tuple(item.choice(variants, "variant") for item in named.items()) if named else variants,
        topk=fields["topk"].integers(1, MAX_TOPK),
        pages=fields["page"].integers(1, MAX_PAGE) if paged else (0,),
        extras=extras,
        tokens=_buckets(fields["tokens"]),
        archs=tuple(item.choice(known_archs, "arch") for item in archs.items()) if archs else (),
        source=fields["source"].text(),
    )


def _extras(node: Node) -> Iterator[Extra]:
    fields = node.fields(("topk", "page"))
    page = fields["page"].integer(1, MAX_PAGE)
    for topk in fields["topk"].integers(1, MAX_TOPK):
        yield Extra(topk, page)


def _buckets(node: Node) -> tuple[int, ...]:
    values = node.integers(1, TOKEN_BUCKETS[-1])
    for value in values:
        if value not in TOKEN_BUCKETS:
            node.fail(f"{value} is not a token bucket; the buckets are {', '.join(map(str, TOKEN_BUCKETS))}.")
    return values


def _anchor(node: Node, variants: tuple[Variant, ...], shapes: tuple[Shape, ...]) -> Anchor:
    fields = node.fields(("shape", "tp", "tokens"), ("page",))
    name = fields["shape"].choice(tuple(shape.name for shape in shapes), "shape")
    shape = next(shape for shape in shapes if shape.name == name)
    anchor = Anchor(
        shape=name,
        tp=fields["tp"].integers(1, 1024),
        tokens=_buckets(fields["tokens"]),
        pages=fields["page"].integers(1, MAX_PAGE) if "page" in fields else (),
    )
    degrees = {degree for variant in variants if variant.name in shape.variants for degree in variant.tp}
    for field, wanted, known in (
        ("tp", anchor.tp, degrees),
        ("tokens", anchor.tokens, set(shape.tokens)),
        ("page", anchor.pages, set(shape.pages)),
    ):
        for value in wanted:
            if value not in known:
                fields[field].fail(
                    f"the shape {name} has no {field} {value}; it has {', '.join(map(str, sorted(known)))}."
                )
    return anchor
