"""How good the static ranking is where the truth is known (decision 19), and the fit of its coefficients.

For every measured spec the cost model ranks the candidates that were measured there, as a static run would. The ratio is
the measured time of its pick over the best measured time: 1.0 is a perfect pick. For the strict figure the coefficients
are fitted anew without the whole group of layouts of the spec in question (`GROUPS`): that leaves out more than the spec
itself, whose near twins (another page size, heads or token count) would give it away. The shipped coefficients' own figure
is in-sample. A ratio says little alone, since most measured candidates were chosen to be good, so that it stands beside
two baselines: a candidate drawn at random, and the coefficients before any fit.

`python -m kgen.honesty` prints the figures and writes `bench/results/static_honesty.json`; `--fit` fits the coefficients.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kgen.archs import ArchSpec, load_arch
from kgen.config import config_root
from kgen.cost import FITTED, Coefficients, Work, predict, work_of
from kgen.records import load_records, settle
from kgen.runtime.families import FAMILIES
from kgen.types import TOKEN_BUCKETS, Candidate, KernelSpec, TuneRecord

BOUNDS: dict[str, tuple[float, float]] = {
    "launch_us": (1.5, 6), "combine_us": (1.5, 6), "prologue": (100, 1e4), "step": (100, 3000), "load_latency": (300, 5000),
    "hidden": (0.05, 0.95), "index_latency": (50, 2000), "chunk": (1, 500), "mma_share": (0.2, 0.85),
    "mma_sync_rate": (600, 2600), "dequantise": (3, 20), "score_scales": (0.3, 1), "softmax": (3, 20), "rescale": (0.7, 4),
    "warps_to_fill": (4, 12), "spill": (0.01, 5), "l2_bytes": (10, 100), "dram_share": (0.3, 0.95), "special": (0.93, 1),
    "swap": (0.7, 1.5), "smem": (0.5, 1.6), "contention": (0.01, 1),
}  # fmt: skip
"""What each coefficient can be on any hardware: several are not told apart by the records and would drift outside."""

GROUPS = {"bf16_d512": "bf16", "bf16_d576": "bf16", "v41_footer": "v41", "v41_inline": "v41"}
"""Layouts that differ in little but addresses: a fit that has seen one has seen the other. Others stand alone."""

SWEEPS = 60
"""Passes over the coefficients at most. Not seconds: a fit must not depend on how busy the machine is."""

SHARPNESS = 12
"""How sharply a candidate's weight in the fit falls with its estimate; a pick is the limit of infinity."""


@dataclass(frozen=True)
class Point:
    """A measured candidate: what the model reads of it, and its time in µs."""

    candidate: Candidate
    work: Work
    us: float


@dataclass(frozen=True)
class Verdict:
    """The model's pick for a spec: its measured time over the best measured time, and its estimate over its time."""

    spec: KernelSpec
    pick: Candidate
    us: float
    best_us: float
    estimate_us: float
    candidates: int

    @property
    def ratio(self) -> float:
        return self.us / self.best_us


@dataclass(frozen=True)
class Honesty:
    """The verdicts of all specs, best first."""

    verdicts: tuple[Verdict, ...]

    def share(self, limit: float) -> float:
        """Share of specs whose pick is at most `limit` times the best."""
        return sum(v.ratio <= limit for v in self.verdicts) / len(self.verdicts)

    @property
    def worst(self) -> Verdict:
        return self.verdicts[-1]

    def summary(self) -> dict[str, Any]:
        errors = sorted(abs(math.log(v.estimate_us / v.us)) for v in self.verdicts)
        return {
            "specs": len(self.verdicts), "share_1_30": round(self.share(1.3), 4), "share_1_15": round(self.share(1.15), 4),
            "worst": round(self.worst.ratio, 3), "worst_spec": self.worst.spec.slug,
            "median_ratio": round(self.verdicts[len(self.verdicts) // 2].ratio, 3),
            "median_error_of_estimate": round(math.expm1(errors[len(errors) // 2]), 3),
        }  # fmt: skip

    def lines(self) -> list[str]:
        s = self.summary()
        return [
            f"{s['specs']} specs: {s['share_1_30']:.1%} within 1.30 x the measured best, {s['share_1_15']:.1%} within 1.15",
            f"median {s['median_ratio']}, worst {s['worst']} ({s['worst_spec']})",
            f"the picks' estimates are off by {s['median_error_of_estimate']:.0%} in the median",
        ]


Measured = Mapping[KernelSpec, Sequence[Point]]


def measured_points(records: Iterable[TuneRecord], arch: ArchSpec) -> dict[KernelSpec, list[Point]]:
    """The compiled and measured candidates of each spec, one time each (the one that counts)."""
    found: dict[KernelSpec, dict[Candidate, Point]] = defaultdict(dict)
    for record in settle(records):
        device = arch.device(record.environment.device_class)
        if record.measurement is None or record.outdated or record.resources is None or device is None:
            continue
        if record.spec.tokens not in TOKEN_BUCKETS:  # a second measurement of even candidates (`KernelSpec.half`)
            continue
        if FAMILIES[record.candidate.family].gluon:  # the cost model does not know them
            continue
        work = work_of(record.spec, record.candidate, record.resources, arch, device)
        found[record.spec][record.candidate] = Point(record.candidate, work, record.measurement.median_us)
    return {spec: list(points.values()) for spec, points in found.items() if len(points) > 1}


def judge(measured: Measured, coefficients: Coefficients = FITTED) -> list[Verdict]:
    """The pick of each spec among its measured candidates."""
    verdicts = []
    for spec, points in measured.items():
        estimates = [predict(point.work, coefficients).us for point in points]
        at = min(range(len(points)), key=estimates.__getitem__)
        best = min(point.us for point in points)
        verdicts.append(Verdict(spec, points[at].candidate, points[at].us, best, estimates[at], len(points)))
    return verdicts


def honesty(verdicts: Iterable[Verdict]) -> Honesty:
    return Honesty(tuple(sorted(verdicts, key=lambda v: v.ratio)))


def group_of(spec: KernelSpec) -> str:
    return GROUPS.get(spec.layout, spec.layout)


def left_out(measured: Measured, sweeps: int = SWEEPS) -> list[Verdict]:
    """As `judge`, each group of layouts with coefficients that were fitted without it."""
    verdicts: list[Verdict] = []
    for group in sorted({group_of(spec) for spec in measured}):
        rest = {spec: points for spec, points in measured.items() if group_of(spec) != group}
        held = {spec: points for spec, points in measured.items() if group_of(spec) == group}
        verdicts += judge(held, fit(rest, START, sweeps))
    return verdicts


def random_shares(measured: Measured) -> dict[str, float]:
    """The shares that a candidate drawn at random would reach, each spec counting once."""
    shares = {}
    for name, limit in (("share_1_30", 1.3), ("share_1_15", 1.15)):
        each = []
        for points in measured.values():
            best = min(point.us for point in points)
            each.append(sum(point.us <= limit * best for point in points) / len(points))
        shares[name] = round(sum(each) / len(each), 4)
    return shares


START = Coefficients(
    launch_us=3, combine_us=3, prologue=3000, step=800, load_latency=1200, hidden=0.5, index_latency=300, chunk=40,
    mma_share=0.6, mma_sync_rate=1500, dequantise=6, score_scales=0.7, softmax=10, rescale=2, warps_to_fill=6, spill=0.1,
    l2_bytes=30, dram_share=0.7, special=0.98, swap=1, smem=1, contention=0.5,
)  # fmt: skip
"""Where a fit begins: guesses from data sheets, made before any record was read."""


def loss(measured: Measured, coefficients: Coefficients) -> float:
    """Squared log errors (the spread within a spec counts three times its mean) plus the expected log ratio of a pick."""
    total = 0.0
    for points in measured.values():
        estimates = [predict(point.work, coefficients).us for point in points]
        logs = [math.log(e / p.us) for e, p in zip(estimates, points, strict=True)]
        mean = sum(logs) / len(logs)
        spread = sum((x - mean) ** 2 for x in logs) / len(logs)
        least, best = min(estimates), min(point.us for point in points)
        weights = [(least / e) ** SHARPNESS for e in estimates]
        regret = sum(w * math.log(p.us / best) for w, p in zip(weights, points, strict=True)) / sum(weights)
        total += 0.3 * mean * mean + spread + 2 * regret
    return total / len(measured)


def fit(measured: Measured, start: Coefficients = START, sweeps: int = SWEEPS) -> Coefficients:
    """Coordinate descent with a factor per coefficient that grows on success and shrinks on failure. Deterministic."""
    names = [field.name for field in fields(Coefficients)]
    factors = dict.fromkeys(names, 1.4)
    now, least = start, loss(measured, start)
    for _ in range(sweeps):
        if max(factors.values()) <= 1.02:
            break
        for name in names:
            low, high = BOUNDS[name]
            better = False
            for factor in (factors[name], 1 / factors[name]):
                value = min(high, max(low, getattr(now, name) * factor))
                there = replace(now, **{name: value})
                found = loss(measured, there)
                if found < least - 1e-6:
                    now, least, better = there, found, True
                    break
            factors[name] = min(1.6, factors[name] * 1.15) if better else 1 + (factors[name] - 1) * 0.6
    return now


def load_measured(device_class: str = "h200", arch_name: str = "sm90") -> dict[KernelSpec, list[Point]]:
    """The checked-in measurements of a device class."""
    records, _ = load_records(config_root() / "records" / f"{device_class}.jsonl")
    return measured_points(records, load_arch(arch_name))


def at_bounds(coefficients: Coefficients) -> list[str]:
    """Coefficients that a bound decides, and no measurement."""
    close = 0.01
    return [n for n, v in asdict(coefficients).items() if min(abs(v / bound - 1) for bound in BOUNDS[n]) < close]


def static_honesty(measured: Measured, sweeps: int = SWEEPS) -> tuple[Honesty, dict[str, Any]]:
    """The strict verdicts (each group of layouts left out), and every figure with its baselines, ready for JSON."""
    strict = honesty(left_out(measured, sweeps))
    specs = {
        v.spec.slug: {"ratio": round(v.ratio, 3), "candidates": v.candidates, "pick": v.pick.slug}
        for v in strict.verdicts
    }
    return strict, {
        "measured_candidates": sum(map(len, measured.values())), "left_out": strict.summary(),
        "shipped": honesty(judge(measured)).summary(), "unfitted": honesty(judge(measured, START)).summary(),
        "random": random_shares(measured), "at_bounds": at_bounds(FITTED), "specs_left_out": specs,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Static picks against measured truth.")
    parser.add_argument("--fit", action="store_true", help="fit the coefficients to all records and print them")
    parser.add_argument("--sweeps", type=int, default=SWEEPS, help="passes over the coefficients per fit, at most")
    parser.add_argument("--out", type=Path, default=Path("bench/results/static_honesty.json"))
    args = parser.parse_args()
    measured = load_measured()
    if args.fit:
        for name, value in asdict(fit(measured, START, args.sweeps)).items():
            print(f"{name} = {value:.3g}")
        return
    strict, figures = static_honesty(measured, args.sweeps)
    shipped, unfitted = honesty(judge(measured)), honesty(judge(measured, START))
    titles = ("fitted without the layout's group", "shipped coefficients, in-sample", "baseline: before any fit")
    for title, found in zip(titles, (strict, shipped, unfitted), strict=True):
        print(f"{title}:", *found.lines(), sep="\n  ")
    print(f"baseline: a candidate drawn at random: {figures['random']}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"device_class": "h200", **figures}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
