"""The shipped entry as a benchmark calls it: outputs and scratch passed in, and what serves a row."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.rows import Row
from kgen.check import Inputs

ROOT = Path(__file__).resolve().parents[1]
VERIFIED = ROOT / "bench" / "results" / "verify_full.json"


def shape_of_row(row: Row, scale_range: tuple[float, float] | None) -> Any:
    """The look-up's key of a row's calls. `scale_range`: what the calls state about their caches."""
    from generated.dispatch import Shape
    from generated.validate import fits_fp16

    spec = row.spec
    return Shape(
        layout=spec.layout, heads=spec.heads, topk=spec.topk, page=spec.page, tokens=row.tokens,
        extra_topk=spec.extra_topk, extra_page=spec.extra_page, fp16=spec.kv.fp8 and fits_fp16(scale_range),
    )  # fmt: skip


class Ours:
    """`sparse_mla` bound to inputs as an engine does: one out, lse and workspace for all calls of a stream."""

    def __init__(self, row: Row, inputs: Inputs, scale_range: tuple[float, float] | None) -> None:
        from generated.dispatch import workspace_size

        lead, device = inputs.q.shape[:-1], inputs.q.device
        self.scale_range = scale_range
        self.shape = shape_of_row(row, scale_range)
        self.out = torch.full((*lead, 512), float("nan"), dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(lead, dtype=torch.float32, device=device)
        self.workspace = torch.empty(max(workspace_size(self.shape), 16), dtype=torch.uint8, device=device)

    def bind(self, inputs: Inputs) -> Callable[[], Any]:
        from generated.dispatch import sparse_mla

        kwargs = inputs.kwargs() | {"out": self.out, "lse": self.lse, "workspace": self.workspace}
        return lambda: sparse_mla(**kwargs, scale_range=self.scale_range)


def served_by(shape: Any, **where: Any) -> dict[str, Any]:
    """Module and constants that serve a shape, and where they come from. `where`: arch and device class without a GPU."""
    from generated.dispatch import explain
    from generated.launch import make_plan

    found = explain(shape, **where)
    entry = found.entry
    config = make_plan(replace(shape, lse=True), entry, found.exact).config  # the benchmark's calls ask for lse
    return {
        "module": entry.module,
        "config": config_slug(config),
        "exact": found.exact,
        "source": f"{entry.provenance.source} on {entry.provenance.device_class}",
        "fp16": bool(getattr(shape, "fp16", False)) and "latent=fp16" in config_slug(config),
    }


def config_slug(config: Any) -> str:
    """Readable constants of an entry, e.g. `block_h=64 splits=4 warps=8 stages=2`."""
    parts = [f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in config.tunables]
    parts += [f"warps={config.num_warps}", f"stages={config.num_stages}"]
    return " ".join(parts + ([] if config.maxnreg is None else [f"maxnreg={config.maxnreg}"]))


def module_hash(arch: str, module: str) -> str:
    """First digits of the SHA-256 of an emitted module's text."""
    path = Path(str(importlib.import_module("generated").__file__)).parent / arch / f"{module}.py"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def verification(subject: str, path: Path = VERIFIED) -> dict[str, Any]:
    """Whether the last full verification was of `subject`, in the fields that a result file states."""
    found: dict[str, Any] = {"subject": subject, "verified": False, "verified_why": "there is no full verification"}
    if not path.is_file():
        return found
    done = json.loads(path.read_text())
    theirs = next(
        (at[k] for at in (done, done.get("environment", {})) for k in ("subject", "fingerprint") if at.get(k)), None
    )
    if theirs is None:
        found["verified_why"] = f"{path.name} names no fingerprint"
    elif theirs != subject:
        found["verified_why"] = f"{path.name} is of {theirs}"
    elif done.get("failures") or done.get("done") != done.get("planned"):
        failed = len(done.get("failures", []))
        found["verified_why"] = f"{done.get('done')} of {done.get('planned')} cases ran, {failed} failed"
    else:
        found |= {"verified": True, "verified_why": f"all {done['planned']} cases of {path.name} passed"}
    return found
