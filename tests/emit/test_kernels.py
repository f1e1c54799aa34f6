"""How many kernels a table means: counted for its summary, and compiled by `kgen verify --compile`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kgen.archs import load_arch
from kgen.build import attention_job
from kgen.cli.verify import table_jobs
from kgen.runtime.families import MAX_SPLITS, combine_tile, family_of
from kgen.runtime.launch import make_plan
from kgen.runtime.table import Config, Entry, Provenance, Shape, config
from kgen.select import summary
from kgen.types import Candidate, KernelSpec, LaunchOptions

PLAIN = config(
    4, 2, block_h=16, block_k=64, splits=1, partial="fp32", specialise=False, swap_ab=False, scale_site="operand", prefetch=True
)  # fmt: skip
GLUON = config(4, 1, block_h=64, block_k=64, splits=1, specialise=False, latent="bf16", stages=2)


def entry(module: str, made: Config, heads: int = 64, topk: int = 2048, page: int = 64, tokens: int = 16) -> Entry:
    provenance = Provenance("measured", "h200", us=10.0, anchor_tokens=tokens)
    return Entry("v32", False, heads, (topk, topk), (0, 0), page, None, (1, tokens), module, made, provenance)


def kernels(*entries: Entry) -> int:
    return summary(entries)["kernels"]


def special(made: Config) -> Config:
    return replace(made, tunables=tuple((k, True if k == "specialise" else v) for k, v in made.tunables))


def with_splits(made: Config, splits: int) -> Config:
    return replace(made, tunables=tuple((k, splits if k == "splits" else v) for k, v in made.tunables))


@pytest.mark.parametrize(("module", "made", "exact"), [("portable_v32_c128", PLAIN, 3), ("sm90_ws_fp8_v32", GLUON, 1)])
def test_heads_and_widths_are_constants_of_the_portable_family_alone(module: str, made: Config, exact: int) -> None:
    shapes = [(64, 2048), (128, 2048), (64, 1024)]
    assert kernels(*(entry(module, made, heads, topk) for heads, topk in shapes)) == 1
    assert kernels(*(entry(module, special(made), heads, topk) for heads, topk in shapes)) == exact
    # pages are constants of both
    assert kernels(entry(module, special(made), page=64), entry(module, special(made), page=128)) == 2
    assert kernels(entry(module, made, page=64), entry(module, made, page=128)) == 1


def test_stages_of_a_launch_make_no_kernel_of_a_gluon_family() -> None:
    assert kernels(entry("sm90_ws_fp8_v32", GLUON), entry("sm90_ws_fp8_v32", replace(GLUON, num_stages=2))) == 1
    assert kernels(entry("portable_v32_c128", PLAIN), entry("portable_v32_c128", replace(PLAIN, num_stages=3))) == 2


def test_split_or_not_is_a_kernel_but_the_number_of_parts_is_none() -> None:
    for module, made in (("portable_v32_c128", PLAIN), ("sm90_ws_fp8_v32", GLUON)):
        assert kernels(*(entry(module, with_splits(made, splits)) for splits in (1, 2, 8))) == 2


def test_every_form_that_a_launch_may_ask_for_is_compiled() -> None:
    """Over the checked-in table: any token count, whether the entry was made for it or stands in."""
    import generated.sm90.table as table

    arch = load_arch("sm90")
    jobs = table_jobs(arch)
    tiles = {
        (constants["BLOCK_S"], constants["BLOCK_D"], job.num_warps, job.part)
        for job in jobs
        if job.family == "combine" and (constants := dict(job.constants))
    }
    both = 0
    for entry in table.ENTRIES:
        launch = LaunchOptions(entry.config.num_warps, entry.config.num_stages, entry.config.maxnreg)
        page = entry.page or (64 if entry.layout[0] == "v" else 0)
        extra_page = (entry.extra_page or 64) if entry.dual else 0
        forms = set()
        for tokens in (1, 2, 5, 16, 65, 300, 5000):
            shape = Shape(entry.layout, entry.heads, entry.topk[1], page, tokens, entry.extra_topk[1], extra_page)
            plan = make_plan(shape, entry, exact=False)
            forms.add(plan.splits > 1)
            made = dict(entry.config.tunables) | {"specialise": False, "splits": plan.splits}
            candidate = Candidate.make(family_of(entry.module, entry.layout).name, made, launch)
            spec = KernelSpec(
                "sm90", entry.layout, entry.heads, entry.topk[1], page, tokens, entry.extra_topk[1], extra_page
            )
            assert attention_job(spec, candidate, arch.cc) in jobs, (entry, tokens)
            if plan.splits > 1:
                assert (*combine_tile(tokens * entry.heads, plan.splits, plan.parts), plan.parts) in tiles
        both += len(forms) == 2
    assert both > 100 and {tile[0] for tile in tiles} == {2, 4, 8, 16, 32, MAX_SPLITS}
