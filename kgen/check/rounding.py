"""Kernels that round K: which functions they may compute, and a comparison with each of them.

e4m3 times an arbitrary fp32 scale is no bf16 number. A kernel that gives its MMA bf16 rounds the product (portable.py, and
the Hopper templates with bf16 latents); one that was told the scales' range may multiply in fp16 by a scale in fp16 (the
Hopper templates with fp16 latents); one that applies scales to scores and P rounds no K. Each is a definite function of the
stored bytes, so that none needs room for "some rounding": a result must agree in all its tensors with one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from .compare import Report, Tolerance, compare
from .inputs import Inputs
from .reference import Latents, Reference, attention_reference, exactly, rounded_to_bf16, rounded_to_fp16
from .scales import selected_range

EXACT, BF16, FP16 = "exact", "bf16", "fp16"

_LATENTS: dict[str, Latents] = {EXACT: exactly, BF16: rounded_to_bf16, FP16: rounded_to_fp16}
_WORDS = {EXACT: "K as it is stored", BF16: "K rounded to bf16", FP16: "K rounded to fp16"}

FP16_SCALES = (6e-5, 146.0)
"""Decision 12, written out once more: scales outside of it must not be multiplied in fp16, whatever the call states."""


def roundings(tolerance: Tolerance, inputs: Inputs, stated: bool = False) -> tuple[str, ...]:
    """What kernels may do to K in this case; `stated`: the call states the range of its scales. The truth comes first."""
    if tolerance.name != "fp8_rounded":
        return (EXACT,)
    held = selected_range(inputs) if stated else None
    if held is not None and FP16_SCALES[0] <= held[0] and held[1] <= FP16_SCALES[1]:
        return EXACT, BF16, FP16
    return EXACT, BF16


def references(
    inputs: Inputs, kinds: Sequence[str] = (EXACT,), rows: Sequence[int] | Tensor | None = None
) -> dict[str, Reference]:
    """The reference over K of each kind (of `roundings`)."""
    return {kind: attention_reference(inputs, rows, latents=_LATENTS[kind]) for kind in kinds}


def compare_any(
    known: Mapping[str, Reference],
    tolerance: Tolerance,
    out: Tensor,
    lse: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> Report:
    """`compare` with each of `references`: right is what agrees with one of them in every tensor.

    The report is that of the closest one. Where there are several, or K is rounded, it also says how far the result is from
    the truth, if that is among them.
    """
    found = {kind: compare(reference, tolerance, out, lse, max_logits) for kind, reference in known.items()}
    closest = min(found, key=lambda kind: (not found[kind].ok, _misfits(found[kind])))
    if tuple(known) == (EXACT,):
        return found[EXACT]
    report, truth = found[closest], found.get(EXACT)
    if truth is None:
        far, off = {}, ""
    else:
        far = {tensor.name: tensor.max_abs for tensor in truth.tensors}
        off = f" From the truth: {', '.join(f'{name} {value:.2e}' for name, value in far.items())}."
    if report.ok:
        return replace(report, sentence=f"{_WORDS[closest]}: {report.sentence}{off}", from_truth=far)
    faults = " ".join(f"Against {_WORDS[kind]}: {each.sentence}" for kind, each in found.items())
    return replace(report, sentence=faults + off, from_truth=far)


def _misfits(report: Report) -> tuple[int, float]:
    """How badly a result differs: elements out of bounds, then how far off its tensors are as a whole."""
    return sum(t.outside + t.special for t in report.tensors), sum(t.cos_diff for t in report.tensors)
