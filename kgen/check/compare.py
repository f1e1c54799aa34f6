"""Comparison as FlashMLA does it (decision 14), and the bounds with their reasons.

For each tensor: every element is within abs or within rel; NaN and infinities stand at the same places with the same
sign; and 1 - cosine of the whole tensor is small. Nothing here raises: a wrong shape is a failed report too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kgen.runtime.layouts import LAYOUTS

from .inputs import CaseSpec, Inputs
from .reference import Reference, attention_reference, rounded_to_bf16, rounded_to_fp16


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
            out=Bound(4e-3, 3.01 / 128, 2e-5),
            lse=Bound(6e-3, 8.01 / 65536, 1e-6),
            max_logits=Bound(1.5e-2, 8.01 / 65536, 1e-6),
            reason="e4m3 times an arbitrary fp32 scale is rounded to bf16 (2^-9 of each K): a logit moves with its size",
            source="seen on an H200: lse 5.8e-3, max_logits 1.1e-2, out 2.4e-3; `narrowed` asks for less where K allows it",
        ),
    )
}
"""By numeric path; what was seen over the matrix stands in docs/verification.md (each own bound is at most 4 x that)."""


def tolerance_for(spec: CaseSpec) -> Tolerance:
    """The row of `TOLERANCES` for a generated case."""
    if not LAYOUTS[spec.layout].fp8:
        return TOLERANCES["bf16"]
    arbitrary = spec.layout == "v32" and spec.scale_rule in ("arbitrary", "sglang", "odd_fp32")
    return TOLERANCES["fp8_rounded" if arbitrary else "fp8"]


ROUNDING_SHARE = 1.5
"""How much further than rounding K alone a result of rounded K may be off: the largest of a case may lie in another element."""


def narrowed(
    tolerance: Tolerance, inputs: Inputs, truth: Reference, rows: Tensor | None = None, stated: bool = False
) -> Tolerance:
    """The tolerance of a case whose kernels round K, by what rounding does to this very case; never wider than `tolerance`.

    Rounding is no accident: the reference over K as a kernel rounds it (to bf16, and where the call has `stated` its scales
    also to fp16) says how far the case's out, lse and max_logits move at most. Each abs bound is 1.5 x that beside what
    kernels need that do not round K. `truth` and `rows` are those that the kernel is compared with.
    """
    if tolerance.name != "fp8_rounded":
        return tolerance
    others = (rounded_to_bf16, rounded_to_fp16) if stated else (rounded_to_bf16,)
    moved = [attention_reference(inputs, rows, latents=other) for other in others]
    plain = TOLERANCES["fp8"]

    def bound(name: str) -> Bound:
        wide: Bound = getattr(tolerance, name)
        exact: Bound = getattr(plain, name)
        furthest = max(_furthest(getattr(other, name), getattr(truth, name)) for other in moved)
        return replace(wide, abs=min(wide.abs, exact.abs + ROUNDING_SHARE * furthest))

    return replace(tolerance, out=bound("out"), lse=bound("lse"), max_logits=bound("max_logits"))


def _furthest(a: Tensor, b: Tensor) -> float:
    """The largest difference of elements that are finite on both sides."""
    a, b = a.reshape(-1), b.reshape(-1)
    apart = (a - b)[a.isfinite() & b.isfinite()].abs()
    return apart.max().item() if apart.numel() else 0.0


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
    """Outcome of `compare`: one entry per tensor that was given, and a sentence."""

    ok: bool
    tensors: tuple[TensorReport, ...] = field(default=())
    sentence: str = ""

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
