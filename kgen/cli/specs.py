"""Which specs a command means: a model's anchors or all of them, named slugs, or one shape from the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kgen.config import suggestion
from kgen.errors import ConfigError
from kgen.models import all_models, anchor_specs, load_model, model_specs
from kgen.runtime.layouts import DUAL_LAYOUTS, LAYOUTS
from kgen.types import TOKEN_BUCKETS, KernelSpec


def choose_specs(arch: str, models: Sequence[str], slugs: Sequence[str], everything: bool) -> list[KernelSpec]:
    """Specs of `models` on `arch` (all of them, or their anchors), narrowed to `slugs` if any are given.

    A slug may be a pattern with `*`. ConfigError when one names nothing.
    """
    chosen = models or list(all_models())
    pool: dict[KernelSpec, None] = {}
    for name in chosen:
        model = load_model(name)
        source = model_specs(model, arch) if everything or slugs else anchor_specs(model, arch)
        pool.update(dict.fromkeys(source))
    if not slugs:
        return list(pool)
    known = {spec.slug: spec for spec in pool}
    found: dict[KernelSpec, None] = {}
    for slug in slugs:
        pattern = re.compile(".*".join(re.escape(part) for part in slug.split("*")))
        matches = [spec for name, spec in known.items() if pattern.fullmatch(name)]
        if not matches:
            raise ConfigError(f"No spec of {', '.join(chosen)} on {arch} is called {slug!r}{suggestion(slug, known)}.")
        found.update(dict.fromkeys(matches))
    return list(found)


def spec_from_shape(
    arch: str, layout: str, heads: int, topk: int, page: int, tokens: int, extra_topk: int, extra_page: int
) -> KernelSpec:
    """One spec from numbers, as the error of a look-up prints them; `tokens` becomes its bucket."""
    if layout not in LAYOUTS:
        raise ConfigError(f"No KV layout is called {layout!r}{suggestion(layout, LAYOUTS)}.")
    kv = LAYOUTS[layout]
    if not 1 <= heads <= 128 or topk < 1 or tokens < 1:
        raise ConfigError("A shape needs --heads from 1 to 128 and --topk and --tokens of at least 1.")
    if kv.paged and page < 1:
        raise ConfigError(f"Layout {layout} is paged: give --page, the tokens per page.")
    if bool(extra_topk) != bool(extra_page) or (extra_topk and layout not in DUAL_LAYOUTS):
        raise ConfigError(
            f"--extra-topk and --extra-page go together, with one of the layouts {', '.join(DUAL_LAYOUTS)}."
        )
    bucket = next((b for b in TOKEN_BUCKETS if tokens <= b), TOKEN_BUCKETS[-1])
    return KernelSpec(arch, layout, heads, topk, page if kv.paged else 0, bucket, extra_topk, extra_page)
