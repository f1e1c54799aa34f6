"""The shipped models: shapes that engines need (B13), numbers by hand, refusals (B15), and that a model is one file."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.archs import all_archs
from kgen.config import config_root
from kgen.errors import ConfigError
from kgen.models import all_models, anchor_specs, load_model, model_specs, spec_by_slug
from kgen.runtime.layouts import LAYOUTS
from kgen.types import TOKEN_BUCKETS, KernelSpec

ARCH_NAMES = ("sm90", "sm100", "sm120", "sm121")


def test_shipped_models_load() -> None:
    models = all_models()
    assert set(models) == {"dsv32", "glm5", "dsv4", "dsv41"}
    for name, model in models.items():
        assert load_model(name) == model
        assert model.weights_assumed
        assert {tokens for tokens, _ in model.token_weights} == set(TOKEN_BUCKETS)
        assert all(len(shape.source) > 8 for shape in model.shapes)
        assert model.scale_range is None and not model.fp16_latent  # no engine states a range: bf16 latents


def test_scales_and_heads() -> None:
    models = all_models()
    assert models["dsv32"].sm_scale == pytest.approx(192**-0.5)
    assert models["glm5"].sm_scale == 0.0625  # 256 ** -0.5, not 576 ** -0.5
    assert models["dsv4"].sm_scale == models["dsv41"].sm_scale == pytest.approx(0.04419417382415922)  # 512 ** -0.5
    assert [models[m].scale_rule for m in ("dsv32", "glm5", "dsv4", "dsv41")] == [
        "arbitrary",
        "arbitrary",
        "pow2",
        "pow2",
    ]
    assert models["dsv32"].variant("dsv32").ranks == (128, 64, 32, 16)
    assert models["glm5"].variant("glm5").ranks == (64, 32, 16, 8)
    assert models["dsv4"].variant("pro").ranks == (128, 64, 32, 16)
    assert models["dsv41"].variant("flash").ranks == (64, 32, 16, 8)


def test_page_bytes_by_hand() -> None:
    """FlashMLA's allocations: V4 pages rounded up to 576 bytes, V32 without footer."""
    v4 = LAYOUTS["v4"]
    assert [v4.page_bytes(p) for p in (2, 64, 128, 256)] == [1728, 37440, 74880, 149760]
    assert LAYOUTS["v32"].page_bytes(64) == 64 * 656
    assert LAYOUTS["v41_footer"].page_bytes(128) == 67584  # 128 * 528, a multiple of 512
    assert LAYOUTS["v41_inline"].page_bytes(256) == 256 * 528


@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("model", ["dsv32", "glm5", "dsv4", "dsv41"])
def test_spec_lists_are_sane(model: str, arch: str) -> None:
    specs = model_specs(load_model(model), arch)
    anchors = anchor_specs(load_model(model), arch)
    assert 40 <= len(specs) <= 50 * len(TOKEN_BUCKETS)
    assert len(set(specs)) == len(specs)
    assert len({spec.slug for spec in specs}) == len(specs)
    assert anchors and len(anchors) <= 60 and set(anchors) <= set(specs)
    for spec in specs:
        assert spec.arch == arch and spec.tokens in TOKEN_BUCKETS
        assert (spec.page > 0) == spec.kv.paged
        assert (spec.extra_page > 0) == (spec.extra_topk > 0)


def shapes_of(model: str, arch: str) -> set[tuple[str, int, int, int, int, int]]:
    return {
        (s.layout, s.heads, s.topk, s.page, s.extra_topk, s.extra_page) for s in model_specs(load_model(model), arch)
    }


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_single_cache_coverage(arch: str) -> None:
    for model, heads in (("dsv32", (16, 32, 64, 128)), ("glm5", (8, 16, 32, 64))):
        for h in heads:
            assert ("v32", h, 2048, 64, 0, 0) in shapes_of(model, arch)
            assert ("bf16_d576", h, 2048, 0, 0, 0) in shapes_of(model, arch)


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_dual_cache_and_draft_coverage(arch: str) -> None:
    """B13 (sglang#33943, flashinfer#4336, #3989): the model's own file asks for every TP size, target and draft."""
    shapes = shapes_of("dsv4", arch)
    required = {("v4", h, 128, page, 512, 64) for h in (8, 16, 32, 64) for page in (64, 256)}
    required |= {("v4", h, 128, page, 1024, 64) for h in (16, 32, 64, 128) for page in (64, 256)}
    required |= {("v4", h, 128, 64, w, 2) for h in (8, 16, 32, 64, 128) for w in (128, 640, 1152, 2048)}
    required |= {("v4", h, w, 64, 0, 0) for h in (8, 16, 32, 64, 128) for w in (128, 192, 256)}
    required |= {("bf16_d512", h, w, 0, 0, 0) for h in (8, 16, 32, 64) for w in (512, 640)}
    required |= {("bf16_d512", h, w, 0, 0, 0) for h in (16, 32, 64, 128) for w in (1024, 1152)}
    assert required <= shapes
    assert {("v4", 16, 256, 64, 0, 0), ("v4", 32, 256, 64, 0, 0), ("v4", 16, 192, 64, 0, 0)} <= shapes

    shapes = shapes_of("dsv41", arch)
    for h in (8, 16, 32, 64):
        assert {("v4", h, 128, 64, 512, 32), ("v4", h, 128, 64, 512, 64), ("v4", h, 128, 64, 0, 0)} <= shapes
        assert {("v41_footer", h, 128, 128, 512, 64), ("v41_footer", h, 128, 128, 512, 128)} <= shapes
        assert {("v41_inline", h, 128, 256, 512, 64), ("v41_inline", h, 128, 256, 2048, 64)} <= shapes
        assert {("v4", h, w, 64, 0, 0) for w in (192, 256)} <= shapes


@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("model", ["dsv32", "glm5", "dsv4", "dsv41"])
def test_what_is_asked_for_with_four_tokens_is_asked_for_with_two(model: str, arch: str) -> None:
    """One request with one draft token is a call of two."""
    specs = set(model_specs(load_model(model), arch))
    four = {spec for spec in specs if spec.tokens == 4}
    assert four and {replace(spec, tokens=2) for spec in four} == {spec for spec in specs if spec.tokens == 2}


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_anchors_measure_decode_and_prefill_at_both_ends_of_tp(arch: str) -> None:
    anchors = anchor_specs(load_model("dsv32"), arch)
    for h in (128, 16):
        for tokens in (1, 16, 256, 4096):
            assert KernelSpec(arch, "v32", h, 2048, 64, tokens) in anchors
        assert KernelSpec(arch, "bf16_d576", h, 2048, 0, 4096) in anchors
    assert {spec.heads for spec in anchors} == {128, 16}


def test_slug_finds_its_spec() -> None:
    spec = KernelSpec("sm90", "v4", 64, 128, 256, 16, 512, 64)
    assert spec.slug == "sm90-decode-v4-d512-h64-k128+512-p256+64-t16"
    assert spec_by_slug(spec.slug) == spec
    with pytest.raises(ConfigError, match="did you mean 'sm90-decode-v4-d512-h64-k128\\+512-p256\\+64-t16'"):
        spec_by_slug(spec.slug + "0")


def test_unknown_model_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Unknown model 'dsv23'.*did you mean 'dsv32'"):
        load_model("dsv23")


@pytest.mark.parametrize(
    ("model", "old", "new", "words"),
    [
        ("dsv32", "layout: v32", "layout: v33", "shapes.fp8.layout: unknown layout 'v33' (did you mean 'v32'?)"),
        ("dsv32", "layout: v32", "layout: nvfp4", "known: bf16_d576, bf16_d512, v32, v4, v41_footer, v41_inline"),
        ("dsv32", "layout: v32", "layout: 576", "expected text"),
        ("dsv32", "    page: [64]\n", "", "'page' (tokens per page) is missing"),
        ("dsv32", "layout: bf16_d576", "layout: bf16_d576\n    page: [64]", "flat rows: it takes no page"),
        (
            "dsv32",
            "page: [64]",
            "page: [64]\n    extra: [{topk: [64], page: 2}]",
            "no second cache; layouts that have: v4",
        ),
        ("dsv32", "topk: [2048]", "topk: [0]", "shapes.fp8.topk[0]"),
        ("dsv32", "topk: [2048]", "top_k: [2048]", "did you mean 'topk'"),
        ("dsv32", "tokens: [1, 2, 4", "tokens: [1, 2, 5", "5 is not a token bucket"),
        ("dsv32", "heads: 128", "heads: 127", "127 heads cannot be divided over 2 ranks"),
        ("dsv32", "heads: 128", "heads: 512", "512 heads on a rank exceed the 128"),
        ("dsv32", '"1": 0.15', '"1": 0.25', "sum to 1"),
        ("dsv32", '"2": 0.05', '"3": 0.05', "'3' is not a token bucket"),
        ("dsv32", "range: null", "range: [1, 0.5]", "[lowest, highest]"),
        ("dsv32", "rule: arbitrary", "rule: power", "known: pow2, arbitrary"),
        ("dsv32", "nope: 128\n  rope: 64", "nope: 0\n  rope: 0", "cannot both be 0"),
        ("dsv32", "shape: fp8, tp: [1, 8]", "shape: fp8, tp: [1, 16]", "anchors[0].tp: the shape fp8 has no tp 16"),
        ("dsv32", "shape: fp8", "shape: fp9", "did you mean 'fp8'"),
        ("dsv4", "variants: [flash]", "variants: [flsh]", "did you mean 'flash'"),
        ("dsv4", "archs: [sm90, sm100]", "archs: [sm90, sm10]", "unknown arch 'sm10'"),
        ("dsv4", "role: draft", "role: daft", "did you mean 'draft'"),
        ("dsv4", "tokens: [1, 16, 64]", "tokens: [1, 16, 64]\n    extra: []", "at least one pair of topk and page"),
    ],
)
def test_wrong_model_files(tmp_path: Path, model: str, old: str, new: str, words: str) -> None:
    """B15 and near misses: refused when the file is read, with the place."""
    root = tmp_path / "configs"
    shutil.copytree(config_root(), root)
    path = root / "models" / f"{model}.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_model(model, root)
    assert words in str(caught.value)
    assert f"{model}.yaml:" in str(caught.value)


def test_a_scale_range_opens_the_fp16_path(tmp_path: Path) -> None:
    """Decision 12: only a stated range inside [6e-5, 146]."""
    root = tmp_path / "configs"
    shutil.copytree(config_root(), root)
    path = root / "models" / "dsv32.yaml"
    text = path.read_text()
    for scales, allowed in (
        ("[0.001, 2]", True),
        ("[0.00006, 146]", True),
        ("[0.001, 147]", False),
        ("[0.00005, 1]", False),
    ):
        path.write_text(text.replace("range: null", f"range: {scales}"))
        assert load_model("dsv32", root).fp16_latent is allowed


def test_a_new_model_is_one_file(tmp_path: Path) -> None:
    root = tmp_path / "configs"
    shutil.copytree(config_root(), root)
    text = (root / "models" / "glm5.yaml").read_text()
    text = (
        text.replace("name: glm5", "name: tiny")
        .replace("heads: 64", "heads: 48")
        .replace("tp: [1, 2, 4, 8]", "tp: [1, 8]")
    )
    (root / "models" / "tiny.yaml").write_text(text)
    for arch in all_archs(root):
        specs = model_specs(load_model("tiny", root), arch)
        assert {spec.heads for spec in specs} == {48, 6}
        assert len(specs) == 2 * 2 * len(TOKEN_BUCKETS)  # head counts, layouts
    assert spec_by_slug("sm90-decode-v32-d576-h6-k2048-p64-t1", root).heads == 6
    with pytest.raises(ConfigError):
        spec_by_slug("sm90-decode-v32-d576-h6-k2048-p64-t1")
