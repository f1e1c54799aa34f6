"""Comparison as FlashMLA does it (decision 14), and the bounds with their reasons.

For each tensor: every element is within abs or within rel; NaN and infinities stand at the same places with the same
sign; and 1 - cosine of the whole tensor is small. Nothing here raises: a wrong shape is a failed report too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kgen.runtime.layouts import LAYOUTS

from .inputs import CaseSpec
from .reference import Reference


@dataclass(frozen=True)
class Bound:
    """An element passes if |a - r| <= abs or |a - r| <= rel * |r|; the tensor if 1 - 2<a,r>/(<a,a>+<r,r>) <= cos."""

    abs: float
    rel: float
    cos: float


@dataclass(frozen=True)
class Tolerance:
    """Bounds of one numeric path, with why they are so and where they come from."""

    name: str
    out: Bound
    lse: Bound
    max_logits: Bound
    reason: str
    source: str


TOLERANCES: dict[str, Tolerance] = {
    tolerance.name: tolerance
    for tolerance in (
        Tolerance(
            "bf16",
            out=Bound(8e-4, 3.01 / 128, 7e-6),
            lse=Bound(1e-6, 2.01 / 65536, 1e-7),
            max_logits=Bound(1e-6, 2.01 / 65536, 1e-7),
            reason="K is stored in bf16, sums are fp32: only P and out are rounded to bf16; abs is for |v| ~ 0.1",
            source="FlashMLA tests/test_flash_mla_sparse_prefill.py @9241ae3; cosine of lse and max_logits is ours",
        ),
        Tolerance(
            "fp8",
            out=Bound(1e-3, 2.01 / 128, 5e-6),
            lse=Bound(1e-6, 8.01 / 65536, 1e-7),
            max_logits=Bound(1e-6, 8.01 / 65536, 1e-7),
            reason="e4m3 times a power of two is exact in bf16, so that K is not rounded: as bf16",
            source="FlashMLA tests/test_flash_mla_sparse_decoding.py @9241ae3; max_logits as lse, cosines are ours",
        ),
        Tolerance(
            "fp8_rounded",
            out=Bound(1e-3, 2.01 / 128, 2.0**-17),
            lse=Bound(1e-6, 8.01 / 65536, 1e-11),
            max_logits=Bound(1e-6, 8.01 / 65536, 1e-11),
            reason="e4m3 times an arbitrary fp32 scale is rounded to bf16 or fp16, by up to 2^-8 of each K, which moves logits."
            " What comes of that is a definite function: a result must agree with the reference over K rounded so, or not"
            " rounded (rounding.py), as closely as fp8 agrees with its own. cos of out: rounding out alone, by up to 2^-8 of"
            " each element, makes 2^-17 at most; of the others: tells one rounding of K from another",
            source="fp8; the cosines are ours: lse of correct kernels needs 1.3e-13 on an H200, of another rounding 7e-11",
        ),
    )
}
"""By numeric path; what was seen over the matrix stands in docs/verification.md."""


def tolerance_for(spec: CaseSpec) -> Tolerance:
    """The row of `TOLERANCES` for a generated case."""
    if not LAYOUTS[spec.layout].fp8:
        return TOLERANCES["bf16"]
    arbitrary = spec.layout == "v32" and spec.scale_rule in ("arbitrary", "sglang", "odd_fp32")
    return TOLERANCES["fp8_rounded" if arbitrary else "fp8"]


@dataclass(frozen=True)
class TensorReport:
    """One tensor against the truth. The worst of each kind over elements that are finite on both sides.

    needed_abs: the smallest abs bound with which every element outside rel would pass (what to tighten bounds with).
    """

    name: str
    ok: bool
    max_abs: float = 0.0
    max_rel: float = 0.0
    needed_abs: float = 0.0
    cos_diff: float = 0.0
    outside: int = 0  # elements that meet neither abs nor rel
    special: int = 0  # elements whose NaN or infinity stands where it should not, or is missing
    why: str = ""


@dataclass(frozen=True)
class Report:
    """Outcome of `compare`: one entry per tensor that was given, and a sentence.

    from_truth: where the tensors were compared with a reference of rounded K, their largest difference from the truth.
    """

    ok: bool
    tensors: tuple[TensorReport, ...] = field(default=())
    sentence: str = ""
    from_truth: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, name: str) -> TensorReport:
        return next(t for t in self.tensors if t.name == name)

    @property
    def max_abs(self) -> float:
        """Largest absolute error of out."""
        return max((t.max_abs for t in self.tensors if t.name == "out"), default=float("nan"))


def compare(
    reference: Reference, tolerance: Tolerance, out: Tensor, lse: Tensor | None = None, max_logits: Tensor | None = None
) -> Report:
    """Compare what a kernel gave with the truth; lse in natural log, empty rows -inf (the native convention).

    Shapes must agree up to leading dims (a [T, ...] result may stand against a [b, s_q, ...] reference).
    """
    pairs = [("out", out, reference.out, tolerance.out)]
    if lse is not None:
        pairs.append(("lse", lse, reference.lse, tolerance.lse))
    if max_logits is not None:
        pairs.append(("max_logits", max_logits, reference.max_logits, tolerance.max_logits))
    # trailing dims that must agree: heads and width for out, heads for the others
    reports = tuple(_compare(name, a, r, bound, 2 if name == "out" else 1) for name, a, r, bound in pairs)
    bad = [f"{t.name}: {t.why}" for t in reports if not t.ok]
    good = ", ".join(f"{t.name} within {t.max_abs:.2e}" for t in reports)
    return Report(not bad, reports, f"{'; '.join(bad)}." if bad else f"As the reference ({tolerance.name}): {good}.")


def _compare(name: str, actual: Tensor, truth: Tensor, bound: Bound, trailing: int) -> TensorReport:
    if actual.shape[-trailing:] != truth.shape[-trailing:] or actual.numel() != truth.numel():
        return TensorReport(name, False, why=f"shape {tuple(actual.shape)} where {tuple(truth.shape)} was expected")
    a, r = actual.detach().double().reshape(-1), truth.double().reshape(-1).to(actual.device)
    same_special = (a.isnan() & r.isnan()) | (a.isinf() & (a == r))
    finite = a.isfinite() & r.isfinite()
    special = int((~(same_special | finite)).sum())
    a, r = a[finite], r[finite]
    error = (a - r).abs()
    if error.numel() == 0:
        why = f"NaN or infinity differs in {special} elements" if special else ""
        return TensorReport(name, special == 0, special=special, why=why)
    out_of_rel = error > bound.rel * r.abs()
    outside = int((out_of_rel & (error > bound.abs)).sum())
    needed = error[out_of_rel].max().item() if bool(out_of_rel.any()) else 0.0
    relative = torch.where(error == 0, error, error / r.abs().clamp_min(1e-300))
    cos_diff = _cos_diff(a, r)
    faults = []
    if special:
        faults.append(f"NaN or infinity differs in {special} elements")
    if outside:
        faults.append(
            f"{outside} of {a.numel()} elements off by more than {bound.abs:.1e} and {bound.rel:.1e} relative"
        )
    if cos_diff > bound.cos:
        faults.append(f"cosine differs by {cos_diff:.1e}, more than {bound.cos:.1e}")
    worst_abs, worst_rel = error.max().item(), relative.max().item()
    text = ", ".join(faults) + (f" (worst {worst_abs:.1e})" if faults else "")
    return TensorReport(name, not faults, worst_abs, worst_rel, needed, cos_diff, outside, special, text)


def _cos_diff(a: Tensor, r: Tensor) -> float:
    """1 - 2<a,r>/(<a,a>+<r,r>): unlike the plain cosine it also sees a wrong length."""
    size = max(a.abs().max().item(), r.abs().max().item())
    if size == 0:
        return 0.0
    a, r = a / size, r / size  # squares of very large values would overflow
    # the same number as 1 - 2<a,r>/(...), without the cancellation
    return ((a - r).square().sum() / (a.square().sum() + r.square().sum())).item()


def deepinfer_rule(out: Tensor, reference: Reference) -> tuple[bool, float]:
    """DeepInfer's "2 bf16 ULP": (max |out - ref| <= 2 * 2^-8 * max |ref|, the error in units of 2^-8 * max |ref|)."""
    truth = reference.out.reshape(-1)
    error = (out.detach().double().reshape(-1).to(truth.device) - truth).abs().max().item() if truth.numel() else 0.0
    unit = 2.0**-8 * (truth.abs().max().item() if truth.numel() else 0.0)
    if unit == 0.0:
        return error == 0.0, error
    return error <= 2 * unit, error / unit
