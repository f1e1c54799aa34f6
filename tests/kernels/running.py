"""Binds candidates of the portable family to cases, runs them between canaries, and compares with the reference."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kgen.check import CaseSpec, Inputs, Report, compare_any, make_case, references, roundings, tolerance_for
from kgen.evaluate import Ready, bind
from kgen.render import render_module
from kgen.types import Candidate, LaunchOptions
from kgen.verify import canaries_whole, poisoned_out

ARCH = "sm90"
CHUNK = {"v32": 128, "v4": 64}
"""The only chunk of a layout; the others take 64, 128 or 256."""


def candidate(layout: str, **changes: Any) -> Candidate:
    tunables: dict[str, Any] = {
        "block_h": 16, "block_k": 64, "swap_ab": False, "scale_site": "operand", "splits": 1, "specialise": False,
        "partial": "fp32", "prefetch": True, "chunk": CHUNK.get(layout, 128),
    }  # fmt: skip
    return Candidate.make("portable", tunables | changes, LaunchOptions(num_warps=4, num_stages=2))


def forms(layout: str) -> list[Candidate]:
    """Three ways to run a layout that differ in everything that changes the code."""
    site = "score" if layout in CHUNK else "operand"
    wide = CHUNK.get(layout, 256)
    return [
        candidate(layout),
        candidate(layout, block_k=32, swap_ab=True, splits=3, specialise=True, prefetch=False, chunk=wide),
        candidate(layout, block_k=16, scale_site=site, splits=8, block_h=32, chunk=CHUNK.get(layout, 64)),
    ]


def ready(
    chosen: Candidate, inputs: Inputs, wide: bool = True, module: ModuleType | None = None
) -> tuple[Ready, torch.Tensor]:
    """(the bound candidate, the buffer around its output); `module` takes the place of the attention kernel's."""
    buffer, out = poisoned_out(inputs, wide=wide)
    bound = bind(chosen, inputs, ARCH, out=out, return_lse=True, return_max_logits=True)
    if module is not None:
        bound = dataclasses.replace(bound, modules=dataclasses.replace(bound.modules, attention=module))
    assert bound.call.lse is not None and bound.call.max_logits is not None
    bound.call.lse.fill_(float("nan"))
    bound.call.max_logits.fill_(float("nan"))
    return bound, buffer


def run(chosen: Candidate, inputs: Inputs) -> Ready:
    bound, buffer = ready(chosen, inputs)
    bound.run()
    assert canaries_whole(buffer, inputs), "rows or heads beside the output were overwritten"
    return bound


def report(chosen: Candidate, spec: CaseSpec, module: ModuleType | None = None) -> Report:
    inputs = make_case(spec)
    bound, buffer = ready(chosen, inputs, spec.q_pad, module)
    bound.run()
    assert canaries_whole(buffer, inputs), f"{spec.slug}: rows or heads beside the output were overwritten"
    call, tolerance = bound.call, tolerance_for(spec)
    kinds = roundings(tolerance, inputs)
    if len(kinds) > 1:  # what this candidate does with scales is known
        kinds = ("exact",) if dict(chosen.tunables)["scale_site"] == "score" else ("bf16",)
    return compare_any(references(inputs, kinds), tolerance, call.out, call.lse, call.max_logits)


def check(chosen: Candidate, spec: CaseSpec) -> None:
    found = report(chosen, spec)
    assert found.ok, f"{chosen.slug} on {spec.slug}: {found.sentence}"


def broken(layout: str, chunk: int, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """The rendered module with text replaced; every change must be found."""
    text = render_module("portable", layout, ARCH, chunk)
    for old, new in changes:
        assert old in text, f"the template no longer says {old!r}"
        text = text.replace(old, new)
    path = folder / f"broken_{layout}_{abs(hash(changes)):x}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
