"""Static records and compile results as checked in: every pick fits its arch, and over-limit kernels are refused (B44, B45)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kgen.archs import ArchSpec, load_arch
from kgen.build import ProbeJob, attention_job, combine_job, limits_exceeded
from kgen.config import config_root
from kgen.cost import guess_resources
from kgen.models import all_models, model_specs
from kgen.records import load_records
from kgen.render import template_hash
from kgen.runtime.families import combine_tile
from kgen.static import MAX_SPILLS, Result, choose, ranked, refusal
from kgen.static_run import probe_store
from kgen.types import Candidate, Failure, KernelSpec, LaunchOptions, ResourceUse, Scalar, TuneRecord

ARCHS = ("sm90", "sm100", "sm120", "sm121")


def picks(arch: str) -> dict[str, TuneRecord]:
    records, aside = load_records(config_root() / "records" / f"static-{arch}.jsonl")
    assert not aside
    return {record.spec.slug: record for record in records}


@pytest.mark.parametrize("name", ARCHS)
def test_every_key_of_every_model_has_a_static_pick(name: str) -> None:
    """Its own, or with two tokens that of four, which serves both (`kgen.select`)."""
    found = picks(name)
    for spec in {spec for model in all_models().values() for spec in model_specs(model, name)}:
        slugs = [spec.slug, replace(spec, tokens=4).slug] if spec.tokens == 2 else [spec.slug]
        pick = next((found[slug] for slug in slugs if slug in found), None)
        assert pick is not None, spec.slug
        assert pick.template_hash == template_hash(pick.candidate.family)


@pytest.mark.parametrize("name", ARCHS)
def test_every_pick_was_compiled_and_fits_its_arch(name: str) -> None:
    arch, results = load_arch(name), probe_store(name).load().results
    for record in picks(name).values():
        use = results[attention_job(record.spec, record.candidate, arch.cc).key]
        assert isinstance(use, ResourceUse) and use == record.resources
        assert use.shared <= arch.smem_limit, record.spec.slug
        assert use.registers <= arch.max_regs, record.spec.slug
        assert use.registers * 32 * record.candidate.launch.num_warps <= arch.regs_per_sm, record.spec.slug
        assert use.tmem <= arch.tmem_columns and use.spills <= MAX_SPILLS, record.spec.slug
        assert record.considered and record.considered > sum(count for _, count in record.rejected)


@pytest.mark.parametrize("name", ARCHS)
def test_picks_share_kernels(name: str) -> None:
    cc = load_arch(name).cc
    assert len({attention_job(r.spec, r.candidate, cc) for r in picks(name).values()}) <= 60


@pytest.mark.parametrize("name", ARCHS)
def test_every_merge_kernel_was_compiled_and_fits(name: str) -> None:
    arch, results = load_arch(name), probe_store(name).load().results
    for part in ("fp32", "fp16") if name == "sm90" else ("fp32",):
        for splits, rows in itertools.product(range(2, 65), (1, 32, 33, 256, 257, 70_000)):
            parts, dims, warps = combine_tile(rows, splits, part)
            assert parts // 2 < splits <= parts
            use = results[combine_job(name, arch.cc, parts, dims, warps, part).key]
            assert isinstance(use, ResourceUse) and limits_exceeded(use, arch, warps) is None


@pytest.mark.parametrize("name", ARCHS)
def test_one_unit_over_a_limit_is_refused(name: str) -> None:
    arch = load_arch(name)

    def use(shared: int = 1024, registers: int = 64, spills: int = 0, tmem: int = 0) -> ResourceUse:
        return ResourceUse(shared, registers, spills, tmem, "mma.sync", 1)

    assert refusal(use(arch.smem_limit), arch, 4) is None
    assert refusal(use(arch.smem_limit + 1), arch, 4) == "over limits"
    assert refusal(use(tmem=arch.tmem_columns + 1), arch, 4) == "over limits"
    assert refusal(use(registers=arch.regs_per_sm // (16 * 32) + 1), arch, 16) == "over limits"
    many = replace(use(registers=arch.regs_per_sm // (16 * 32)), warps=16)  # partitions: the launch asks for 4
    assert refusal(many, arch, 4) is None
    assert refusal(replace(many, registers=many.registers + 1), arch, 4) == "over limits"
    assert refusal(use(spills=MAX_SPILLS + 1), arch, 4) == "spills"
    assert refusal(Failure("compile", "No."), arch, 4) == "compile failed"


def test_small_shared_memory_rejects_kernels_that_hopper_takes() -> None:
    small, large = load_arch("sm120"), load_arch("sm90")
    results = [use for use in probe_store("sm90").load().results.values() if isinstance(use, ResourceUse)]
    between = [use for use in results if small.smem_limit < use.shared <= large.smem_limit]
    assert between
    assert all(limits_exceeded(use, large, 4) is None and limits_exceeded(use, small, 4) for use in between)


def test_datacentre_blackwell_refuses_a_tile_that_hopper_takes() -> None:
    """B45: 64 x 64 at two stages, as compiled for each arch (sm100 needs more shared memory and tensor memory)."""
    uses = {}
    for name in ("sm90", "sm100"):
        arch, results = load_arch(name), probe_store(name).load().results
        spec = KernelSpec(name, "bf16_d512", 64, 512, 0, 4096)
        uses[name] = [
            (arch, results[job.key])
            for chunk in (128, 256)
            if (job := attention_job(spec, tile(64, 64, 8, 2, chunk), arch.cc)).key in results
        ]
        assert uses[name], name
    assert all(refusal(use, arch, 8) == "over limits" for arch, use in uses["sm100"])
    assert any(refusal(use, arch, 8) is None for arch, use in uses["sm90"])


def test_stages_are_compared_by_what_was_compiled_not_by_their_number() -> None:
    """B44: shared memory is not monotone in num_stages, so fewer stages may be what does not fit."""
    arch, spec = load_arch("sm120"), KernelSpec("sm120", "bf16_d512", 16, 512, 0, 4096)
    one, two = tile(16, 64, 4, 1, 128), tile(16, 64, 4, 2, 128)
    jobs = [attention_job(spec, candidate, arch.cc) for candidate in (one, two)]
    shared = (114_688, 84_224)  # field notes: D = 512 bf16, 16 x 64
    results: dict[ProbeJob, Result] = {
        job: ResourceUse(size, 128, 0, 0, "mma.sync", 1) for job, size in zip(jobs, shared, strict=True)
    }
    (pick,) = choose({spec: [one, two]}, arch, results)
    assert pick.candidate == two and pick.considered == 2 and pick.rejected == (("over limits", 1),)


def test_a_compile_result_overrules_the_guess() -> None:
    arch, spec = load_arch("sm120"), KernelSpec("sm120", "bf16_d512", 64, 512, 0, 4096)
    candidate = tile(64, 64, 8, 2, 128)
    assert guess_resources(spec, candidate, arch).shared > arch.smem_limit
    job = attention_job(spec, candidate, arch.cc)
    order = ranked(spec, [candidate], arch, {job: ResourceUse(arch.smem_limit, 128, 0, 0, "mma.sync", 1)})
    assert [c for _, c in order] == [candidate]
    assert ranked(spec, [candidate], arch, {job: ResourceUse(arch.smem_limit + 1, 128, 0, 0, "mma.sync", 1)}) == []


def tile(block_h: int, block_k: int, warps: int, stages: int, chunk: int) -> Candidate:
    tunables: dict[str, Scalar] = {
        "block_h": block_h, "block_k": block_k, "swap_ab": False, "scale_site": "operand", "chunk": chunk,
        "prefetch": True, "splits": 1, "specialise": False, "partial": "fp32",
    }  # fmt: skip
    return Candidate.make("portable", tunables, LaunchOptions(warps, stages))


def over_limits(arch: ArchSpec) -> int:
    results = probe_store(arch.name).load().results.values()
    return sum(isinstance(use, ResourceUse) and use.shared > arch.smem_limit for use in results)


@pytest.mark.parametrize("name", ("sm120", "sm121"))
def test_kernels_over_the_limit_are_on_record_and_counted(name: str) -> None:
    assert over_limits(load_arch(name)) > 0
    assert any(word == "over limits" for record in picks(name).values() for word, _ in record.rejected)
