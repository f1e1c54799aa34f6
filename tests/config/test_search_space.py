"""Search spaces: counts that sum, feasibility against an independent filter, tunables apart from launch options."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from kgen.archs import all_archs, load_arch
from kgen.config import config_root
from kgen.errors import ConfigError
from kgen.models import all_models, anchor_specs
from kgen.space import SearchSpace, all_spaces, environment, load_space, read_space
from kgen.types import Candidate, KernelSpec, LaunchOptions

SPACE = load_space("portable")
ARCHS = all_archs()
V32 = KernelSpec("sm90", "v32", 128, 2048, 64, 16)
V4_FEW = KernelSpec("sm120", "v4", 8, 128, 64, 1, 512, 64)
PREFILL = KernelSpec("sm100", "bf16_d576", 16, 2048, 0, 4096)

TUNABLES = dict(
    block_h=64, block_k=64, swap_ab=False, scale_site="operand", chunk=128, prefetch=True, splits=1, specialise=True,
    partial="fp32",
)  # fmt: skip
LAUNCH = dict(num_warps=8, num_stages=2, maxnreg=None)


def test_portable_axes() -> None:
    assert [axis.name for axis in SPACE.axes if axis.kind == "tunable"] == list(TUNABLES)
    assert [axis.name for axis in SPACE.axes if axis.kind == "launch"] == list(LAUNCH)
    assert SPACE.size == (4 * 4 * 2 * 2 * 3 * 2 * 7 * 2 * 2) * (4 * 4 * 3) == 516_096
    assert SPACE.axis("maxnreg").values == (None, 128, 168)
    assert all(r.sentence.endswith((".", ").")) and len(r.sentence) > 30 for r in SPACE.restrictions)
    assert set(all_spaces()) >= {"portable"}


@pytest.mark.parametrize("spec", [V32, V4_FEW, PREFILL], ids=lambda spec: spec.slug)
def test_counts_sum_to_the_size(spec: KernelSpec) -> None:
    counts = SPACE.explain(spec, ARCHS[spec.arch])
    assert sum(counts.values()) == SPACE.size
    assert counts["feasible"] == sum(1 for _ in SPACE.feasible(spec, ARCHS[spec.arch])) > 0
    assert set(counts) == {*(r.name for r in SPACE.restrictions), "feasible"}


def hand_filter(spec: KernelSpec, smem: int, sms: int, wgmma: bool) -> set[tuple[object, ...]]:
    """The restrictions once more, written without the expression language."""
    result = set()
    grid = itertools.product(*(axis.values for axis in SPACE.axes))
    pow2 = 16
    while pow2 < spec.heads:
        pow2 *= 2
    chunks = {"v32": {128}, "v4": {64}}.get(spec.layout, {64, 128, 256})
    for bh, bk, swap, site, chunk, ahead, splits, special, partial, warps, stages, cap in grid:
        programs = spec.tokens * ((spec.heads + bh - 1) // bh)
        blocks = (spec.topk + bk - 1) // bk + (spec.extra_topk + bk - 1) // bk
        acc = bh * 16 // warps  # bh * 512 values over warps * 32 threads
        ok = bh <= pow2 and (site == "operand" or spec.layout in {"v32", "v4"})
        ok = ok and chunk in chunks
        ok = ok and (not swap or (bh <= 64 and bk >= 64 and wgmma))
        ok = ok and 2 * bk * spec.d_qk <= smem and splits <= blocks and 32 <= acc <= 224
        ok = ok and (splits == 1 or (programs < 4 * sms and programs * splits <= 16 * sms))
        ok = ok and (partial == "fp32" or splits > 1)
        ok = ok and (warps >= 4 or not wgmma or not (swap or bh >= 64))
        ok = ok and (stages <= 2 or (blocks + splits - 1) // splits >= stages)
        ok = ok and (cap is None or (cap * warps * 32 <= 65536 and acc + 32 <= cap))
        if ok:
            result.add((bh, bk, swap, site, chunk, ahead, splits, special, partial, warps, stages, cap))
    return result


@pytest.mark.parametrize(
    ("spec", "smem", "sms", "wgmma"),
    [(V32, 232_448, 132, True), (V4_FEW, 101_376, 188, False), (PREFILL, 232_448, 148, True)],
    ids=["sm90-v32", "sm120-v4-few", "sm100-prefill"],
)
def test_feasible_equals_a_filter_written_by_hand(spec: KernelSpec, smem: int, sms: int, wgmma: bool) -> None:
    found = {
        (*(c[name] for name in TUNABLES), c.launch.num_warps, c.launch.num_stages, c.launch.maxnreg)
        for c in SPACE.feasible(spec, ARCHS[spec.arch])
    }
    assert found == hand_filter(spec, smem, sms, wgmma)


def test_every_anchor_has_candidates() -> None:
    for arch in ARCHS.values():
        for model in all_models().values():
            for spec in anchor_specs(model, arch.name):
                assert next(SPACE.feasible(spec, arch), None) is not None, spec.slug


def test_device_class_moves_the_split_restrictions() -> None:
    """512 programs fill the 78 SMs of an H20 six times over, and the 132 of an H200 less than four times."""
    arch = ARCHS["sm90"]
    h20 = arch.device("h20")
    spec = KernelSpec("sm90", "v32", 128, 2048, 64, 256)
    assert environment(spec, arch, h20)["sms"] == 78 and environment(spec, arch)["sms"] == 132
    candidate = SPACE.candidate({**TUNABLES, "splits": 2}, LAUNCH)  # 256 tokens x 2 head blocks = 512 programs
    assert SPACE.refusals(candidate, spec, arch) == []
    assert ["every SM at least four times" in sentence for sentence in SPACE.refusals(candidate, spec, arch, h20)] == [
        True
    ]


def test_refusals_are_sentences() -> None:
    good = SPACE.candidate(TUNABLES, LAUNCH)
    assert SPACE.refusals(good, V32, ARCHS["sm90"]) == []
    bad = SPACE.candidate({**TUNABLES, "block_h": 128, "swap_ab": True, "partial": "bf16"}, {**LAUNCH, "maxnreg": 168})
    sentences = SPACE.refusals(bad, V32, ARCHS["sm90"])
    assert len(sentences) == 4  # 128 swapped heads; bf16 partials without splits; 256 accumulators; cap below them
    assert any("128 heads in a block" in s for s in sentences)
    with pytest.raises(ConfigError, match="is for sm90, not for sm120"):
        SPACE.refusals(good, V32, ARCHS["sm120"])


def test_refusals_agree_with_feasible() -> None:
    feasible = set(SPACE.feasible(V4_FEW, ARCHS["sm120"]))
    for i, candidate in enumerate(SPACE.points()):
        if i % 97 == 0:
            assert (SPACE.refusals(candidate, V4_FEW, ARCHS["sm120"]) == []) == (candidate in feasible)


@pytest.mark.parametrize(
    ("tunables", "launch", "words"),
    [
        ({**TUNABLES, "num_stages": 2}, LAUNCH, "'num_stages' is a launch option, not a tunable"),
        (TUNABLES, {**LAUNCH, "block_h": 64}, "'block_h' is a tunable of the template, not a launch"),
        ({**TUNABLES, "blok_h": 64}, LAUNCH, "did you mean 'block_h'"),
        ({**TUNABLES, "block_h": 48}, LAUNCH, "48 is no value of the axis 'block_h'"),
        ({**TUNABLES, "swap_ab": 1}, LAUNCH, "1 is no value of the axis 'swap_ab'"),
        ({**TUNABLES, "splits": True}, LAUNCH, "True is no value of the axis 'splits'"),
        ({k: v for k, v in TUNABLES.items() if k != "splits"}, LAUNCH, "needs a value of 'splits'"),
        (TUNABLES, {"num_warps": 8, "num_stages": 2}, "needs a value of 'maxnreg'"),
    ],
)
def test_tunables_and_launch_options_never_mix(tunables: dict, launch: dict, words: str) -> None:
    """B49 (FlagGems#2596: num_stages among the constants)."""
    with pytest.raises(ConfigError) as caught:
        SPACE.candidate(tunables, launch)
    assert words in str(caught.value)


def test_foreign_candidates_are_refused() -> None:
    launch = LaunchOptions(8, 2)
    with pytest.raises(ConfigError, match="does not belong to the space"):
        SPACE.values(Candidate.make("other", TUNABLES, launch))
    with pytest.raises(ConfigError, match="launch option"):
        SPACE.values(Candidate.make("portable", {**TUNABLES, "num_warps": 4}, launch))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("block_h: {kind: tunable", "block_h: {kind: tuneable", "did you mean 'tunable'"),
        ("num_stages: {kind: launch", "num_stages: {kind: tunable", "its kind is launch, not tunable"),
        ("num_stages: {kind: launch", "num_stagse: {kind: launch", "did you mean 'num_stages'"),
        ("block_k: {kind: tunable", "topk: {kind: tunable", "'topk' cannot name an axis"),
        ("values: [2, 4, 8, 16]", "values: [2, 4, 8, many]", "'many' is no value of the launch option num_warps"),
        ("values: [false, true]", "values: [false, false]", "listed twice"),
        ("values: [false, true]", "values: []", "at least one value"),
        ("programs: tokens", "tokens: tokens", "'tokens' cannot name a definition"),
        ("programs: tokens", "programs: tokns", "did you mean 'tokens'"),
        ("require: splits <= key_blocks", "require: splits <= key_block", "did you mean 'key_blocks'"),
        ("require: splits <= key_blocks", "require: splits.real <= 1", "is not allowed"),
        ("because: There are", "becuse: There are", "did you mean 'because'"),
        ("  stages_loop:", "  splits_waves:", "given twice"),
        ("  stages_loop:", "  feasible:", "name of the points that remain"),
        ("family: portable", "family: portabel", "the two must agree"),
        ("  num_warps: {kind: launch", "  warps: {kind: tunable", "are needed"),
    ],
)
def test_wrong_space_files(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (config_root() / "spaces" / "portable.yaml").read_text()
    assert old in text
    path = tmp_path / "portable.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        read_space(path)
    assert words in str(caught.value)
    assert "portable.yaml:" in str(caught.value)


def small_space(tmp_path: Path, require: str) -> SearchSpace:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "family: tiny\naxes:\n  tile: {kind: tunable, values: [16, 32]}\n  num_warps: {kind: launch, values: [4]}\n"
        "  num_stages: {kind: launch, values: [1, 2]}\nrestrictions:\n"
        f"  only: {{require: '{require}', because: A reason.}}\n"
    )
    return read_space(path)


def test_a_space_without_maxnreg(tmp_path: Path) -> None:
    space = small_space(tmp_path, "tile > 16")
    found = list(space.feasible(V32, load_arch("sm90")))
    assert [c.launch for c in found] == [LaunchOptions(4, 1), LaunchOptions(4, 2)]
    assert space.explain(V32, load_arch("sm90")) == {"only": 2, "feasible": 2}
    assert space.values(found[0]) == {"tile": 32, "num_warps": 4, "num_stages": 1}
    with pytest.raises(ConfigError, match="no axis 'maxnreg'"):
        space.values(Candidate.make("tiny", {"tile": 16}, LaunchOptions(4, 1, 128)))


def test_a_restriction_on_the_spec_alone_takes_the_whole_grid(tmp_path: Path) -> None:
    assert small_space(tmp_path, "cc == 120").explain(V32, load_arch("sm90")) == {"only": 4, "feasible": 0}


def test_a_restriction_must_be_a_truth(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither true nor false"):
        small_space(tmp_path, "tile + 1").explain(V32, load_arch("sm90"))


def test_a_new_space_is_one_file(tmp_path: Path) -> None:
    root = tmp_path / "configs"
    shutil.copytree(config_root(), root)
    text = (root / "spaces" / "portable.yaml").read_text().replace("family: portable", "family: second")
    (root / "spaces" / "second.yaml").write_text(text)
    assert load_space("second", root).size == SPACE.size
    assert next(load_space("second", root).feasible(V32, ARCHS["sm90"])).family == "second"
    with pytest.raises(ConfigError, match="Unknown kernel family 'secnd'.*did you mean 'second'"):
        load_space("secnd", root)
