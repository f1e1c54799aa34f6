"""Where a search begins: a base point that fits the shape, then its neighbours along each axis.

What the base is was learned on an H200 (docs/design.md): 64 keys per step, one warpgroup per 64x256 of output, two stages,
indices one step ahead, and as many splits as there are idle SMs. A search that begins here needs tens of trials, not hundreds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from kgen.archs import ArchSpec, DeviceClass
from kgen.runtime.families import FAMILIES
from kgen.space import SearchSpace
from kgen.types import Candidate, KernelSpec, LaunchOptions

LAUNCH = ("num_warps", "num_stages", "maxnreg")


def base_point(spec: KernelSpec, arch: ArchSpec, sms: int) -> dict[str, Any]:
    """Axis values of the base point; small shared memory (SM120) halves the blocks."""
    small = arch.smem_limit < 128 * 1024
    block_h = 16 if spec.heads <= 16 or small else 32 if spec.heads <= 32 else 64
    block_k = 32 if small else 64
    programs = spec.tokens * -(-spec.heads // block_h)
    blocks = -(-spec.topk // block_k) + -(-spec.extra_topk // block_k)
    splits = 1
    while splits < 32 and programs * splits * 2 <= sms + 8 and splits * 2 <= blocks:
        splits *= 2
    return {
        "block_h": block_h, "block_k": block_k, "swap_ab": False, "scale_site": "operand", "splits": splits,
        "specialise": False, "partial": "fp32", "prefetch": True, "chunk": 64 if spec.layout == "v4" else 128,
        "num_warps": 8 if block_h == 64 else 4, "num_stages": 2, "maxnreg": None,
    }  # fmt: skip


def _moves(spec: KernelSpec, base: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Changes to try, the ones that paid most often first."""
    yield {}
    splits, warps, block_h = base["splits"], base["num_warps"], base["block_h"]
    yield {"splits": splits * 2}
    yield {"num_stages": 3}
    yield {"specialise": True}
    yield {"block_k": base["block_k"] // 2}
    yield {"swap_ab": True}
    yield {"chunk": 64}
    yield {"splits": splits // 2}
    yield {"partial": "bf16"}
    yield {"chunk": 64, "specialise": True}
    yield {"block_k": base["block_k"] * 2}
    yield {"scale_site": "score"}
    yield {"swap_ab": True, "chunk": 64}
    yield {"num_stages": 1}
    yield {"num_warps": warps * 2}
    yield {"num_warps": warps // 2}
    yield {"block_k": base["block_k"] * 2, "num_warps": 8, "splits": max(1, splits // 2)}
    yield {"splits": splits * 4}
    yield {"prefetch": False, "num_stages": 3}
    yield {"block_h": block_h * 2}
    yield {"block_h": block_h // 2, "num_warps": 4}
    yield {"maxnreg": 128}
    yield {"chunk": 256}
    yield {"block_k": base["block_k"] // 2, "num_stages": 3}
    yield {"prefetch": False}


GLUON_STARTS = 16
"""Starting points of a Hopper family per latent type."""


def _gluon_points(
    spec: KernelSpec, space: SearchSpace, arch: ArchSpec, device: DeviceClass | None, sms: int
) -> list[Candidate]:
    """Spaces of the Hopper families are small and list on every axis what is usual first: the feasible points nearest to
    the usual one, at the split count that gives every SM one item. Points of the latent types take turns."""
    index = {axis.name: {value: place for place, value in enumerate(axis.values)} for axis in space.axes}
    heights = sorted(int(v) for v in space.axis("block_h").values if v is not None)
    block_h = _block_h(spec, heights, sms)

    # what the distance counts by itself, what takes turns, and what follows from the others
    apart = ("splits", "block_h", "latent", "places")

    def distance(candidate: Candidate) -> float:
        values = dict(candidate.tunables)
        block_k, splits = int(values["block_k"] or 64), int(values["splits"] or 1)
        blocks = -(-spec.topk // block_k) + -(-spec.extra_topk // block_k)
        resident = sms * (1 if candidate.launch.maxnreg is None else 2)  # programs on the device at a time
        full = max(1, min(resident // max(1, spec.tokens * -(-spec.heads // block_h)), blocks))
        away = sum(index[name][value] for name, value in values.items() if name not in apart)
        rounds = 2 if splits > full else 0  # more items than SMs
        # one consumer with one tile ahead is level with two, at best, where an item has more than two tiles and an SM for itself
        one = values.get("consumers") == 1 and values.get("stages") == 1
        lone = one and blocks > 2 * splits and candidate.launch.maxnreg is None
        together = 4 if candidate.launch.maxnreg is not None else 0  # ahead for some shapes only
        return (
            away + rounds + together + 4 * lone + 3 * abs(math.log2(splits / full)) + 4 * (values["block_h"] != block_h)
        )

    by_latent: dict[object, list[Candidate]] = {}
    for candidate in sorted(space.feasible(spec, arch, device), key=lambda c: (distance(c), c.slug)):
        by_latent.setdefault(dict(candidate.tunables).get("latent"), []).append(candidate)
    rows = itertools.zip_longest(*(_every_kind(points)[:GLUON_STARTS] for points in by_latent.values()))
    return [candidate for row in rows for candidate in row if candidate is not None]


def _block_h(spec: KernelSpec, heights: list[int], sms: int) -> int:
    """Heads of a block: all of them if one block holds them, else the most that one holds. Where no block holds 64 (sm90_few), so
    that every block reads the rows anew, narrow blocks are ahead while an item, one on every SM, is at most three tiles."""
    widest = heights[-1]
    if spec.heads <= widest or widest >= 64:
        return next((height for height in heights if height >= spec.heads), widest)
    tiles = -(-spec.topk // 64) + -(-spec.extra_topk // 64)
    return next((h for h in heights if tiles <= 3 * max(1, sms // (spec.tokens * -(-spec.heads // h)))), widest)


def _every_kind(points: list[Candidate]) -> list[Candidate]:
    """The nearest point of every number of programs on an SM and of keys in a tile goes first: a search along one axis at a time
    does not come from one to another, since several axes change with them."""
    nearest: dict[object, Candidate] = {}
    for point in points:
        nearest.setdefault((point.launch.maxnreg, point["block_k"]), point)
    return list(dict.fromkeys([*nearest.values(), *points]))


def starting_points(
    spec: KernelSpec, space: SearchSpace, arch: ArchSpec, device: DeviceClass | None = None
) -> list[Candidate]:
    """Feasible points to try first, in order."""
    sms = device.sms if device else arch.max_sms
    allowed = {axis.name: axis.values for axis in space.axes}
    found: dict[Candidate, None] = {}
    if space.family in FAMILIES and FAMILIES[space.family].gluon:
        return _gluon_points(spec, space, arch, device, sms)
    base = base_point(spec, arch, sms)
    for point in (base | move for move in _moves(spec, base)):
        if any(point[name] not in allowed[name] for name in point):
            continue
        tunables = {name: value for name, value in point.items() if name not in LAUNCH}
        launch = LaunchOptions(point["num_warps"], point["num_stages"], point["maxnreg"])
        candidate = Candidate.make(space.family, tunables, launch)
        if not space.refusals(candidate, spec, arch, device):
            found[candidate] = None
    return list(found)
