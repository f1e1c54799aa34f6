"""The Hopper templates compile for sm_90 on both API generations of Gluon, inside the arch's limits, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kgen.archs import load_arch
from kgen.build import ProbeJob, attention_job, compile_all, limits_exceeded
from kgen.render import TRITON_RANGE
from kgen.runtime.families import FAMILIES
from kgen.space import spaces_of
from kgen.starts import starting_points
from kgen.types import Failure, KernelSpec, ResourceUse

ARCH = load_arch("sm90")
NEWER = os.environ.get("KGEN_NEWER_TRITON", "")
"""A folder with a newer Triton, as `make test` provides; empty: only the installed one is tried."""

SPILLED_BY_NEWER = {"bf16_d512": 40}
"""Bytes of scalars that Triton 3.9 keeps in local memory and reads back, 9 words in a pair (docs/limits.md). Nothing is timed
there; with 3.6, which the timings are of, no form of sm90_ws has any."""

SPECS = {
    "sm90_ws": (KernelSpec("sm90", "bf16_d576", 128, 2048, 0, 4096), KernelSpec("sm90", "bf16_d512", 64, 512, 0, 4)),
    "sm90_ws_fp8": (KernelSpec("sm90", "v32", 128, 2048, 64, 256), KernelSpec("sm90", "v4", 64, 128, 256, 4, 512, 64)),
    "sm90_pair_fp8": (KernelSpec("sm90", "v32", 128, 2048, 64, 256), KernelSpec("sm90", "v4", 64, 128, 256, 64, 512, 64)),
    "sm90_rs_fp8": (KernelSpec("sm90", "v32", 128, 2048, 64, 256), KernelSpec("sm90", "v4", 16, 128, 256, 64, 512, 64)),
    "sm90_cluster_fp8": (KernelSpec("sm90", "v32", 128, 2048, 64, 256), KernelSpec("sm90", "v4", 128, 128, 256, 4, 512, 64)),
    "sm90_few": (
        KernelSpec("sm90", "v32", 16, 2048, 64, 1), KernelSpec("sm90", "v4", 8, 128, 256, 64, 512, 64),
        KernelSpec("sm90", "bf16_d576", 16, 2048, 0, 4096),
    ),
}  # fmt: skip


def jobs(family: str) -> dict[ProbeJob, str]:
    """What a search tries first for each spec: one kernel of every latent type. Families that take ptxas longest have a type for
    each spec."""
    found = {}
    for i, spec in enumerate(SPECS[family]):
        points = starting_points(spec, spaces_of("sm90")[family], ARCH, ARCH.device("h200"))
        latents = list(dict.fromkeys(point["latent"] for point in points))
        for latent in [latents[i]] if family in ("sm90_rs_fp8", "sm90_cluster_fp8") else latents:
            point = next(point for point in points if point["latent"] == latent)
            found[attention_job(spec, point, ARCH.cc)] = f"{spec.slug} {point.slug}"
    return found


def test_every_family_is_tried() -> None:
    assert set(SPECS) == {name for name, family in FAMILIES.items() if family.gluon}
    one_version = {family for family, (_, below) in TRITON_RANGE.items() if below != "4.0"}
    assert one_version == {"sm90_cluster_fp8"}, "what a newer Triton does not compile is said in docs/limits.md"


@pytest.mark.parametrize("family", sorted(SPECS))
def test_it_compiles_and_fits(family: str) -> None:
    check(family)


@pytest.mark.parametrize("family", [family for family in sorted(SPECS) if TRITON_RANGE[family][1] == "4.0"])
@pytest.mark.skipif(not NEWER, reason="KGEN_NEWER_TRITON names no folder with a newer Triton; make test sets it")
def test_it_compiles_on_a_newer_triton(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(NEWER).resolve()), os.environ.get("PYTHONPATH", "")]))
    line = "import triton; print(triton.__version__)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    seen = subprocess.run(
        [sys.executable, "-c", line], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert tuple(map(int, seen.split(".")[:2])) >= (3, 9), "the folder's Triton was not the one imported"
    check(family, newer=True)


def check(family: str, newer: bool = False) -> None:
    wanted = jobs(family)
    for job, use in compile_all(wanted, workers=1).items():
        assert isinstance(use, ResourceUse), (wanted[job], use.message if isinstance(use, Failure) else use)
        assert limits_exceeded(use, ARCH, job.num_warps) is None, wanted[job]
        assert use.warps is not None and use.warps in (8, 12, 16), wanted[job]  # all partitions, not the first alone
        assert use.mma == "wgmma" and use.registers <= 168
        if family == "sm90_ws":  # the whole kernel, and so its loops
            assert use.spills <= (SPILLED_BY_NEWER.get(job.layout, 0) if newer else 0), wanted[job]
