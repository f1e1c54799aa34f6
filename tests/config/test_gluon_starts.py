"""Where a search of the Hopper families begins: feasible points only, every latent type, one item per SM."""

from __future__ import annotations

import pytest

from kgen.archs import load_arch
from kgen.runtime.families import FAMILIES
from kgen.space import spaces_of
from kgen.starts import GLUON_STARTS, starting_points
from kgen.types import KernelSpec

ARCH = load_arch("sm90")
H200 = ARCH.device("h200")


@pytest.mark.parametrize(
    ("family", "spec", "splits", "latents"),
    [
        ("sm90_ws", KernelSpec("sm90", "bf16_d576", 128, 2048, 0, 4096), 1, {"bf16"}),
        ("sm90_ws", KernelSpec("sm90", "bf16_d576", 128, 2048, 0, 4), 16, {"bf16"}),
        ("sm90_ws_fp8", KernelSpec("sm90", "v32", 64, 2048, 64, 64), 2, {"bf16", "fp16"}),
        ("sm90_ws_fp8", KernelSpec("sm90", "v4", 128, 128, 64, 1, 1024, 64), 16, {"bf16", "fp16"}),
        ("sm90_pair_fp8", KernelSpec("sm90", "v32", 64, 2048, 64, 64), 2, {"bf16", "fp16"}),
        ("sm90_pair_fp8", KernelSpec("sm90", "v4", 128, 128, 64, 1, 1024, 64), 8, {"bf16", "fp16"}),
        ("sm90_rs_fp8", KernelSpec("sm90", "v32", 64, 2048, 64, 64), 2, {"bf16", "fp16"}),
        ("sm90_rs_fp8", KernelSpec("sm90", "v32", 16, 2048, 64, 1), 16, {"bf16", "fp16"}),
        ("sm90_rs_fp8", KernelSpec("sm90", "v4", 128, 128, 64, 1, 1024, 64), 8, {"bf16", "fp16"}),
        ("sm90_cluster_fp8", KernelSpec("sm90", "v32", 128, 2048, 64, 4096), 1, {"bf16", "fp16"}),
        ("sm90_cluster_fp8", KernelSpec("sm90", "v32", 128, 2048, 64, 64), 1, {"bf16", "fp16"}),
        ("sm90_cluster_fp8", KernelSpec("sm90", "v32", 128, 2048, 64, 16), 4, {"bf16", "fp16"}),
        ("sm90_cluster_fp8", KernelSpec("sm90", "v4", 128, 128, 64, 1, 1024, 64), 8, {"bf16", "fp16"}),
        ("sm90_few", KernelSpec("sm90", "v32", 16, 2048, 64, 1), 32, {"bf16", "fp16"}),
        ("sm90_few", KernelSpec("sm90", "bf16_d512", 8, 512, 0, 16), 8, {"bf16"}),
    ],
)
def test_starts_are_feasible_and_fill_the_device(family: str, spec: KernelSpec, splits: int, latents: set[str]) -> None:
    assert H200 is not None
    space = spaces_of("sm90")[family]
    points = starting_points(spec, space, ARCH, H200)
    assert 0 < len(points) <= GLUON_STARTS * len(latents)
    assert not any(space.refusals(point, spec, ARCH, H200) for point in points)
    assert {point["latent"] for point in points[: len(latents)]} == latents
    assert all(point["splits"] == splits for point in points[: len(latents)])


@pytest.mark.parametrize("layout", ["v32", "bf16_d576"])
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize(
    ("tokens", "splits", "consumers"),
    [(1, 32, 1), (2, 32, 1), (4, 32, 1), (16, 8, 1), (64, 2, 2), (128, 1, 2), (256, 1, 2)],
)
def test_few_heads_start_where_the_h200_was_fastest(
    layout: str, heads: int, tokens: int, splits: int, consumers: int
) -> None:
    """One item per SM; one consumer for items of up to four tiles (docs/kernels/sm90_few.md)."""
    spec = KernelSpec("sm90", layout, heads, 2048, 64 if layout == "v32" else 0, tokens)
    first = starting_points(spec, spaces_of("sm90")["sm90_few"], ARCH, H200)[0]
    assert (first["splits"], first["consumers"]) == (splits, consumers)


@pytest.mark.parametrize(
    ("spec", "block_h", "splits"),
    [
        (KernelSpec("sm90", "v32", 128, 2048, 64, 1), 16, 16),
        (KernelSpec("sm90", "v32", 128, 2048, 64, 2), 32, 16),
        (KernelSpec("sm90", "v4", 64, 128, 256, 8, 512, 64), 16, 4),
        (KernelSpec("sm90", "v4", 64, 128, 256, 16, 512, 64), 32, 4),
        (KernelSpec("sm90", "v4", 128, 128, 256, 2, 1024, 64), 16, 8),
        (KernelSpec("sm90", "bf16_d576", 64, 2048, 0, 16), 32, 4),
    ],
)
def test_many_heads_of_few_tokens_start_in_narrow_blocks_while_items_are_short(
    spec: KernelSpec, block_h: int, splits: int
) -> None:
    """Measured with both heights (docs/kernels/sm90_few.md): narrow blocks are ahead in items of up to three tiles."""
    first = starting_points(spec, spaces_of("sm90")["sm90_few"], ARCH, H200)[0]
    assert (first["block_h"], first["splits"]) == (block_h, splits)


@pytest.mark.parametrize("arch", ["sm100", "sm120", "sm121"])
def test_other_archs_have_the_portable_family_alone(arch: str) -> None:
    assert set(spaces_of(arch)) == {"portable"}
    hopper = {"sm90_ws", "sm90_ws_fp8", "sm90_pair_fp8", "sm90_rs_fp8", "sm90_cluster_fp8", "sm90_few"}
    assert set(spaces_of("sm90")) == hopper | {"portable"}
    assert set(spaces_of("sm90", gluon=False)) == {"portable"}


@pytest.mark.parametrize(("heads", "block_h"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (128, 64)])
def test_rows_in_registers_start_with_the_fewest_head_blocks(heads: int, block_h: int) -> None:
    """Every block dequantises all rows anew; a ring of four tiles fits wherever Q has fewer than 64 heads."""
    for layout in ("v32", "v4"):
        spec = KernelSpec("sm90", layout, heads, 2048, 64, 64)
        first = starting_points(spec, spaces_of("sm90")["sm90_rs_fp8"], ARCH, H200)[0]
        assert (first["block_h"], first["stages"]) == (block_h, 3 if block_h == 64 else 4)


@pytest.mark.parametrize(
    ("tokens", "most"), [(1, 16), (16, 16), (66, 4), (67, 3), (132, 2), (133, 1), (263, 1), (4096, 1)]
)
def test_splits_of_clusters_are_counted_in_pairs_of_sms(tokens: int, most: int) -> None:
    """132 SMs hold 66 clusters: four items each at most."""
    space = spaces_of("sm90")["sm90_cluster_fp8"]
    spec = KernelSpec("sm90", "v32", 128, 2048, 64, tokens)
    assert max(int(point["splits"] or 0) for point in space.feasible(spec, ARCH, H200)) == most


@pytest.mark.parametrize("heads", [16, 64, 65, 72, 128])
def test_clusters_are_for_two_head_blocks(heads: int) -> None:
    """What the space allows is what the look-up may serve."""
    spec = KernelSpec("sm90", "v4", heads, 128, 64, 64)
    points = starting_points(spec, spaces_of("sm90")["sm90_cluster_fp8"], ARCH, H200)
    assert bool(points) == (heads >= FAMILIES["sm90_cluster_fp8"].min_heads)
